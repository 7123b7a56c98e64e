"""The native kernels against the PyTorch operations, one by one, and how they are built."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretell import kernels
from foretell.kv.cache import Cache, Plane
from foretell.models.check import rows_are_independent
from foretell.models.native import NativeOps, Pool, supported
from foretell.models.open import open_model
from foretell.models.ops import AttentionSpec, Ops, TorchOps, key_slots
from foretell.models.quantise import quantise
from foretell.types import Rows
from tests.models.drive import Driver, random_llama
from tests.models.test_architectures import save

BUILT = kernels.library()
pytestmark = pytest.mark.skipif(BUILT is None, reason="no native kernels: there is no C++ compiler here")
DTYPES = [torch.bfloat16, torch.float32]
REFERENCE = TorchOps(torch.float32)


@pytest.fixture(scope="module", params=[1, 2, 3])
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(request.param)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 15, 16, 31, 33, 64, 100, 130, 333])
def test_linear(pool: Pool, dtype: torch.dtype, outputs: int) -> None:
    ops = NativeOps(dtype, None, pool)
    inputs = 37 if outputs % 2 else 96
    weight = randn(outputs, inputs).to(dtype).float()
    bias = randn(outputs, seed=1)
    packed = ops.pack(weight)
    for rows in range(1, 41):
        x, residual = randn(rows, inputs, seed=2), randn(rows, outputs, seed=3)
        assert_close(ops.linear(x, packed, None, None), REFERENCE.linear(x, weight, None, None), 3e-5)
        assert_close(ops.linear(x, packed, bias, None), REFERENCE.linear(x, weight, bias, None), 3e-5)
        wanted = REFERENCE.linear(x, weight, bias, residual)
        found = ops.linear(x, packed, bias, residual)
        assert found.data_ptr() == residual.data_ptr()
        assert_close(found, wanted, 3e-5)


def test_linear_reads_strided_rows(pool: Pool) -> None:
    ops = NativeOps(torch.float32, None, pool)
    wide, weight = randn(9, 100), randn(50, 40, seed=1)
    assert_close(ops.linear(wide[:, 20:60], ops.pack(weight), None, None), wide[:, 20:60] @ weight.T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_huge_and_tiny_weights(dtype: torch.dtype) -> None:
    """Values at both ends of the range, zeros, and weights of either sign go through packing unharmed."""
    ops = NativeOps(dtype, 1)
    tiles = ops.backend == "native-amx"  # they take denormals for 0, and a part of an input that is 0 times inf is NaN
    tiny = 2e-38 if tiles else 1e-38
    weight = torch.tensor([[1e30, -1e30, 0.0], [1e-30, -0.0, tiny], [float("inf"), 1.0, 2.0]]).to(dtype).float()
    for k in range(3):
        x = torch.zeros(1, 3)
        x[0, k] = 1.0
        finite = weight[:2, k]
        assert torch.equal(ops.linear(x, ops.pack(weight[:2]), None, None)[0], finite + 0.0)
    found = ops.linear(torch.ones(1, 3), ops.pack(weight), None, None)[0, 2]
    assert found == float("inf") or (tiles and found.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype: torch.dtype) -> None:
    ops = NativeOps(dtype, 1)
    for vocabulary in (1, 16, 33, 100):
        weight = randn(vocabulary, 40).to(dtype).float()
        tokens = torch.arange(vocabulary).flip(0)
        assert torch.equal(ops.embed(ops.pack(weight), tokens), weight[tokens])


# int8


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """The product with the weight that int8 stands for, in float64."""
    values, scales = quantise(weight)
    return (x.double() @ (values.double() * scales.double()[:, None]).T).float()


@pytest.mark.parametrize("inputs", [1, 2, 7, 8, 37, 256, 257, 576, 1024 + 15])
@pytest.mark.parametrize("outputs", [1, 16, 33, 130])
def test_int8_linear(pool: Pool, outputs: int, inputs: int) -> None:
    ops = NativeOps(torch.int8, None, pool)
    weight, bias = randn(outputs, inputs), randn(outputs, seed=1)
    packed = ops.pack(weight)
    x, residual = randn(20, inputs, seed=2), randn(20, outputs, seed=3)
    x *= 10 ** randn(20, 1, seed=4)  # rows of very different size
    wanted = int8_product(x, weight)
    size = x.abs().amax(1, keepdim=True) * weight.abs().max() * inputs**0.5  # what rounding errors are relative to
    assert ((ops.linear(x, packed, None, None) - wanted).abs() <= 3e-5 * size).all()
    found = ops.linear(x, packed, bias, residual.clone())
    assert ((found - (wanted + bias + residual)).abs() <= 3e-5 * size + 1e-5).all()


@pytest.mark.parametrize("inputs", [37, 600])
def test_int8_rows_are_independent(pool: Pool, inputs: int) -> None:
    ops = NativeOps(torch.int8, None, pool)
    packed, x = ops.pack(randn(100, inputs)), randn(33, inputs, seed=2)
    whole = ops.linear(x, packed, None, None).clone()
    for rows in range(1, 33):
        assert torch.equal(ops.linear(x[:rows], packed, None, None), whole[:rows])
        assert torch.equal(ops.linear(x[rows:], packed, None, None), whole[rows:])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 299])
def test_int8_spreads_what_is_not_finite(wrong: float, at: int) -> None:
    ops = NativeOps(torch.int8, 1)
    x = randn(2, 300)
    x[1, at] = wrong
    found = ops.linear(x, ops.pack(randn(20, 300)), None, None)
    assert found[0].isfinite().all() and found[1].isnan().all()


def test_int8_of_nothing_but_zeros_and_of_a_weight_out_of_range() -> None:
    ops = NativeOps(torch.int8, 1)
    assert (ops.linear(torch.zeros(3, 40), ops.pack(randn(20, 40)), None, None) == 0).all()
    assert (ops.linear(randn(3, 40), ops.pack(torch.zeros(20, 40)), None, None) == 0).all()
    with pytest.raises(ValueError, match="not finite"):
        ops.pack(torch.tensor([[1.0, float("nan")]]))


def test_int8_embed() -> None:
    ops = NativeOps(torch.int8, 1)
    for vocabulary, width in ((1, 3), (16, 40), (100, 41)):
        weight = randn(vocabulary, width)
        values, scales = quantise(weight)
        tokens = torch.arange(vocabulary).flip(0)
        assert torch.equal(ops.embed(ops.pack(weight), tokens), (values * scales[:, None])[tokens])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_layers_in_one_call(dtype: torch.dtype) -> None:
    """The same bits as operation by operation, and the logits that the PyTorch operations find."""
    logits = []
    for ops in (NativeOps(dtype, 2), OneByOne(dtype, 2), TorchOps(torch.float32 if dtype != torch.int8 else dtype)):
        driver = Driver(random_llama(ops, "Qwen3ForCausalLM", num_hidden_layers=2))
        logits.append(driver.prefill(range(60), [60])[1].float())
    assert torch.equal(logits[0], logits[1])
    error = (logits[0] - logits[2]).norm() / logits[2].norm()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.int8: 0.02}[dtype]


class OneByOne(NativeOps):
    """Without the call that runs whole layers."""

    run = Ops.run


@pytest.mark.parametrize("width", [3, 8, 64, 100, 576])
def test_norm(pool: Pool, width: int) -> None:
    ops = NativeOps(torch.float32, None, pool)
    weight = randn(width, seed=1)
    for rows in (1, 2, 17, 40):
        for scale in (1e-6, 1.0, 1e6):
            x = scale * randn(rows, width)
            assert_close(ops.norm(x, weight, 1e-5), REFERENCE.norm(x, weight, 1e-5))


def test_swiglu(pool: Pool) -> None:
    for width in (1, 7, 8, 40, 100):
        ops = NativeOps(torch.float32, None, pool)
        for rows in (1, 2, 40):
            x = 4 * randn(rows, 2 * width)
            assert_close(ops.swiglu(x), REFERENCE.swiglu(x), 2e-6)


def test_swiglu_far_from_zero() -> None:
    ends = [0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 86.9, -86.9, 87.1, -87.1, 89.0, -89.0, 1e4, -1e4, 3e38, -3e38]
    for gate in (torch.tensor([ends]), torch.tensor([ends[::-1] + ends[:5]]), torch.linspace(-90, 90, 4001)[None]):
        x = torch.cat([gate, torch.ones_like(gate)], dim=-1)
        found, wanted = NativeOps(torch.float32, 1).swiglu(x), REFERENCE.swiglu(x.double()).float()
        assert found.isfinite().all()
        assert_close(found, wanted, 1e-6)


# Attention


def spec(heads: int, kv_heads: int, dim: int, *, norms: bool = False, window: int | None = None) -> AttentionSpec:
    angles = torch.arange(2048)[:, None] * (0.7 ** torch.arange(dim // 2))[None]
    head_norms = (1 + 0.3 * randn(dim, seed=8), 1 + 0.3 * randn(dim, seed=9)) if norms else (None, None)
    return AttentionSpec(heads, kv_heads, dim, (angles.cos(), angles.sin()), head_norms, 1e-6, window)


def forest(contexts: list[int], nodes: int, *, trails: bool = False) -> tuple[Rows, Cache]:
    """A tree of rows for each request over shuffled slots of its context. trails: some roots hang on earlier ones."""
    generator = torch.Generator().manual_seed(sum(contexts) + nodes)

    def below(n: int) -> int:
        return int(torch.randint(n, (1,), generator=generator))

    slots = torch.randperm(sum(contexts) + 2 * nodes * len(contexts) + 7, generator=generator).tolist()
    cache = Cache(len(slots), len(contexts) + 2, max(contexts) + 5)
    tables = torch.randperm(len(contexts) + 2, generator=generator)[: len(contexts)]
    indptr, parents, positions, own, trail_indptr, trail = [0], [], [], [], [0], []
    for line, context in zip(tables.tolist(), contexts, strict=True):
        cache.table[line, :context] = torch.tensor([slots.pop() for _ in range(context)], dtype=torch.int32)
        depths: list[int] = []
        for row in range(nodes):
            parent = below(row + 1) - 1
            hung = [slots.pop() for _ in range(below(4))] if trails and parent < 0 and len(slots) > 4 * nodes else []
            depths.append(depths[parent] + 1 if parent >= 0 else len(hung))
            trail += hung
            trail_indptr.append(len(trail))
            parents.append(parent)
            positions.append(context + depths[row])
            own.append(slots.pop())
        indptr.append(len(parents))
    rows = Rows(
        indptr=torch.tensor(indptr, dtype=torch.int32),
        tokens=torch.zeros(len(parents), dtype=torch.int64),
        positions=torch.tensor(positions),
        parents=torch.tensor(parents, dtype=torch.int32),
        slots=torch.tensor(own),
        want=torch.arange(len(parents)),
        tables=tables.to(torch.int32),
        context=torch.tensor(contexts, dtype=torch.int32),
    )
    if trails:
        rows = replace(rows, trail_indptr=torch.tensor(trail_indptr), trail=torch.tensor(trail, dtype=torch.int32))
    return rows, cache


def plane_of(cache: Cache, attention: AttentionSpec, dtype: torch.dtype) -> Plane:
    """Two layers, filled, for whatever the rows do not write."""
    plane = cache.add_plane("p", 2, attention.kv_heads, attention.dim, dtype)
    plane.k.copy_(randn(*plane.k.shape, seed=4))
    plane.v.copy_(randn(*plane.v.shape, seed=5))
    return plane


class RoundingOps(TorchOps):
    """The reference for a narrower cache: float32 numbers that the cache's dtype can hold."""

    def __init__(self, cache_dtype: torch.dtype) -> None:
        super().__init__(torch.float32)
        self.narrow = cache_dtype

    def rope_write(self, qkv: Tensor, layer: int, plane: Plane, spec: AttentionSpec) -> None:
        super().rope_write(qkv, layer, plane, spec)
        for cached in (plane.k, plane.v):
            cached.copy_(cached.to(self.narrow))


def run_attention(ops: Ops, rows: Rows, cache: Cache, attention: AttentionSpec) -> tuple[Tensor, Tensor, Plane]:
    """qkv after rope_write, what attend makes of it, and the plane, of which they used layer 1."""
    dtype = torch.float32 if isinstance(ops, TorchOps) else ops.cache_dtype
    plane = plane_of(cache, attention, dtype)
    qkv = 2 * randn(len(rows.tokens), (attention.heads + 2 * attention.kv_heads) * attention.dim, seed=6)
    ops.start(rows, cache)
    ops.rope_write(qkv, 1, plane, attention)
    return qkv, ops.attend(qkv, 1, plane, attention).clone(), plane


def compare_attention(pool: Pool, dtype: torch.dtype, rows: Rows, cache: Cache, attention: AttentionSpec) -> None:
    qkv, found, plane = run_attention(NativeOps(dtype, None, pool), rows, cache, attention)
    wanted_qkv, wanted, wanted_plane = run_attention(RoundingOps(dtype), rows, cache, attention)
    assert_close(qkv, wanted_qkv)
    untouched = torch.ones(cache.slots, dtype=torch.bool)
    untouched[rows.slots] = False
    rounding = 1e-5 if dtype == torch.float32 else 2**-7
    for ours, theirs in ((plane.k, wanted_plane.k), (plane.v, wanted_plane.v)):
        assert torch.equal(ours[0].float(), theirs[0]) and torch.equal(ours[1, untouched].float(), theirs[1, untouched])
        assert_close(ours[1].float(), theirs[1], rounding)
    assert_close(found, wanted, 2e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(4, 4, 16), (9, 3, 64), (8, 2, 128), (8, 1, 32), (10, 2, 48), (3, 1, 96), (2, 1, 112)],
)
def test_attention(pool: Pool, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, norms: bool) -> None:
    rows, cache = forest([0, 3, 70], 7)
    compare_attention(pool, dtype, rows, cache, spec(heads, kv_heads, dim, norms=norms))


@pytest.mark.parametrize("window", [None, 1, 5, 64, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_far_back(pool: Pool, dtype: torch.dtype, window: int | None) -> None:
    rows, cache = forest([1500, 8, 500], 3)
    compare_attention(pool, dtype, rows, cache, spec(6, 2, 32, window=window))


def test_attention_with_scores_far_apart() -> None:
    """One key overwhelms the rest, or all are far below zero: the softmax neither overflows nor vanishes."""
    rows, cache = forest([40], 2)
    attention = spec(2, 1, 16)
    for scale in (-1e4, 1e-3, 1e4):
        attention.scale = scale
        compare_attention(Pool(1), torch.float32, rows, cache, attention)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paths_with_trails(pool: Pool, dtype: torch.dtype) -> None:
    rows, cache = forest([9, 0, 33], 9, trails=True)
    assert rows.trail is not None and len(rows.trail) > 3
    owner = torch.empty(len(rows.tokens), dtype=torch.int32)
    starts, path = torch.empty(len(owner) + 1, dtype=torch.int64), torch.empty(1000, dtype=torch.int32)
    given = (rows.indptr, 3, rows.parents, rows.slots, rows.trail_indptr, rows.trail, owner, starts)
    pointers = [x.data_ptr() if isinstance(x, Tensor) else x for x in given]
    assert BUILT is not None
    total = BUILT.ft_paths(*pointers, None)
    assert BUILT.ft_paths(*pointers, path.data_ptr()) == total == starts[-1]
    for r, keys in enumerate(key_slots(rows, cache)):
        line, context = int(rows.tables[owner[r]]), int(rows.context[owner[r]])
        assert [*cache.table[line, :context].tolist(), *path[starts[r] : starts[r + 1]].tolist()] == keys.tolist()
        assert len(keys) == rows.positions[r] + 1
    compare_attention(pool, dtype, rows, cache, spec(4, 2, 16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    rows, cache = forest([70, 3, 0, 16], 11)
    attention = spec(6, 2, 32, norms=True)
    qkv, out, _ = run_attention(NativeOps(dtype, 1), rows, cache, attention)
    for threads in (2, 3):
        ops = NativeOps(dtype, threads)
        assert rows_are_independent(ops, 32)
        for _ in range(20):
            again = run_attention(ops, rows, cache, attention)
            assert torch.equal(again[0], qkv) and torch.equal(again[1], out)


# Pools and building


def test_pools_come_and_go() -> None:
    """A script of its own with a time limit: threads that do not end must not hang the tests."""
    script = """
import torch
from foretell.models.native import NativeOps, Pool
x, weight = torch.randn(5, 64), torch.randn(400, 64)
for threads in (1, 2, 3, 5) * 6:
    pool = Pool(threads)
    assert pool.threads == threads
    ops = NativeOps(torch.float32, None, pool)
    packed = ops.pack(weight)
    for _ in range(threads % 3):
        assert torch.allclose(ops.linear(x, packed, None, None), x @ weight.T, atol=1e-4)
    del ops, pool
    Pool(threads)
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_what_is_supported() -> None:
    assert supported(torch.bfloat16, 64) and supported(torch.float32, 16)
    assert not supported(torch.float32, 24) and not supported(torch.float64, 64) and not supported(torch.float16, 64)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder without kernels, and a process that has not looked for them."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "library", functools.cache(kernels.library.__wrapped__))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def slow_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Writes its output, the library of this process, in two halves; returns where it notes its runs."""
    script, log = tmp_path / "compiler", tmp_path / "log"
    assert BUILT is not None
    script.write_text(
        f"""#!/bin/sh
echo run >> '{log}'
for out in "$@"; do :; done
head -c 1000 '{BUILT._name}' > "$out"
sleep 0.5
cat '{BUILT._name}' > "$out"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def test_kernels_are_built_once_and_whole(slow_compiler: Path, fresh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who builds at the same time does not meet half a library, and the next one finds it built."""
    look = kernels.library.__wrapped__
    with ThreadPoolExecutor(2) as both:
        first = both.submit(look)
        time.sleep(0.25)  # the first is half way
        assert both.submit(look).result() is not None and first.result() is not None
    runs = slow_compiler.read_text()
    said = "foretell: building the native kernels (once on this machine)\n"
    assert capsys.readouterr().err == said * runs.count("run")
    assert [path.suffix for path in fresh.iterdir()] == [".so"]
    assert look() is not None
    assert slow_compiler.read_text() == runs and capsys.readouterr().err == ""


def test_another_compiler_builds_anew(slow_compiler: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = kernels.library.__wrapped__
    assert look() is not None
    other = slow_compiler.with_name("other")
    other.symlink_to(os.environ["CXX"])
    monkeypatch.setenv("CXX", str(other))
    assert look() is not None
    assert slow_compiler.read_text().count("run") == 2 and len(list(fresh.iterdir())) == 2


@pytest.mark.parametrize("compiler", ["/nonexistent", "false"])
def test_without_a_compiler_torch_takes_over(
    fresh: Path, tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", compiler)
    save(tmp_path / "model", "llama")
    capsys.readouterr()
    for _ in range(2):
        target = open_model(tmp_path / "model", dtype="float32").target
        assert target.backend == "torch" and target.exact
    *building, reason = capsys.readouterr().err.splitlines()
    assert building == (
        [] if compiler == "/nonexistent" else ["foretell: building the native kernels (once on this machine)"]
    )
    assert reason.startswith("foretell: no native kernels here, PyTorch runs instead (") and compiler in reason
    assert not fresh.exists() or not list(fresh.iterdir())
    with pytest.raises(ValueError, match="native kernels cannot run"):
        open_model(tmp_path / "model", dtype="float32", backend="native")


def test_a_damaged_library_is_no_library(fresh: Path, slow_compiler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(os.environ["CXX"]).write_text('#!/bin/sh\nfor out in "$@"; do :; done\necho nonsense > "$out"\n')
    assert kernels.library() is None
    assert "PyTorch runs instead" in capsys.readouterr().err
