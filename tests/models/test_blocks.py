"""Passes of one shape, captured and repeated: what a GPU runs, on the CPU as far as that goes.

`Traced` is the stand-in for a CUDA graph: PyTorch's operations are recorded once and repeated without any of the Python
around them, so whatever was not read from the inputs that stay in place is frozen, as it would be on a GPU.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from foretell import LLM
from foretell.engine.memory import Setup
from foretell.kv.cache import Cache
from foretell.models import blocks, device
from foretell.models.blocks import BLOCK, BlockOps, tree_kernel
from foretell.models.check import rows_are_independent
from foretell.models.device import Capture, GraphCapture, device_of
from foretell.models.open import open_model, prepare
from foretell.models.ops import ROWS, AttentionSpec, TorchOps
from foretell.types import Output, Rows, Sampling
from tests.models.drive import CUDA, Driver, make_ops, random_llama
from tests.models.test_architectures import save
from tests.models.test_tree_attention import MODELS, assert_plain, session

Found = TypeVar("Found")
DEVICES = ["blocks", pytest.param("cuda", marks=CUDA)]


class Traced(Capture):
    """What it recorded is all that runs afterwards. count: of recordings."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, compute: Callable[[], Found]) -> Callable[[], Found]:
        self.count += 1
        with torch.inference_mode(False), torch.no_grad():
            graph = make_fx(compute)()
        repeat: Callable[[], Found] = graph
        return repeat


def traced(dtype: torch.dtype) -> BlockOps:
    ops = BlockOps(dtype)
    ops.capture = Traced()
    return ops


@pytest.mark.parametrize("model", MODELS)
def test_what_was_recorded_is_repeated_for_other_rows(model: str) -> None:
    """Trees, chunks and partners at random: the same bits as when Python runs again for every pass."""
    ops = traced(torch.float32)
    target = random_llama(ops, num_hidden_layers=2, **MODELS[model])
    found = session(target, (90, 5, 61, 17), steps=12, seed=len(model))
    assert isinstance(ops.capture, Traced) and 1 < ops.capture.count <= 12
    direct = random_llama(BlockOps(torch.float32), num_hidden_layers=2, **MODELS[model])
    for tokens, lines in session(direct, (90, 5, 61, 17), steps=12, seed=len(model)).items():
        assert all(map(torch.equal, lines, found[tokens]))


def test_a_recording_sees_nothing_but_its_inputs() -> None:
    """The stand-in is a strict one: a number that Python reads is frozen."""
    x, state = torch.ones(3), {"factor": 2.0}
    repeat = Traced()(lambda: x * state["factor"] + x.sum())
    x += 1
    state["factor"] = 5.0
    assert torch.equal(repeat(), torch.full((3,), 10.0))


@pytest.mark.parametrize("device", DEVICES)
def test_int8_rows_are_those_of_plain_decoding(device: str) -> None:
    target = random_llama(make_ops(device, torch.int8), num_hidden_layers=2)
    assert_plain(target, session(target, (80, 5, 61), steps=8, seed=3), leaves=8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_rows_are_independent(device: str, dtype: torch.dtype) -> None:
    ops = make_ops(device, dtype)
    assert isinstance(ops, BlockOps)
    assert rows_are_independent(ops, 64)
    assert ops.even(random_llama(ops).weights())


def test_a_product_that_depends_on_the_place_is_noticed() -> None:
    class Uneven(BlockOps):
        def linear(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            out = super().linear(x, *rest)
            out[BLOCK // 2 :] = out[BLOCK // 2 :].nextafter(torch.tensor(9.0))
            return out

    ops = Uneven(torch.float32)
    assert not ops.even(random_llama(ops).weights())


# Passes


@torch.inference_mode()
def chain(driver: Driver, count: int, **asked: Any) -> tuple[Rows, Output]:
    """A pass over so many tokens of a request that is gone after it."""
    seq = driver.start(random.Random(count).choices(range(72), k=count + 1))
    assert driver.cache.reserve(seq, count)
    rows = Rows.of(seq, seq.tokens[:count], range(-1, count - 1), driver.cache.reserved(seq), asked.pop("want", None))
    out = driver.target.forward(rows, driver.cache, **asked)
    driver.cache.release(seq)
    return rows, out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, ROWS, ROWS + 1, BLOCK - 1, BLOCK + 1, 2 * BLOCK + 3])
def test_only_the_slots_of_the_rows_are_written(device: str, count: int) -> None:
    driver = Driver(random_llama(make_ops(device, torch.float32)))
    plane = driver.cache.planes["target"]
    plane.k.fill_(7), plane.v.fill_(7)
    rows, out = chain(driver, count)
    assert out.logits.isfinite().all() and out.logits.device.type == "cpu"
    written = torch.zeros(driver.cache.slots, dtype=torch.bool)
    written[rows.slots] = True
    for cached in (plane.k.cpu(), plane.v.cpu()):
        assert (cached[:, ~written] == 7).all() and not (cached[:, written] == 7).all(dim=(0, 2, 3)).any()


@pytest.mark.parametrize("device", DEVICES)
def test_taps_and_wanted_logits_come_from_all_passes(device: str) -> None:
    count, want = 2 * BLOCK + 9, [3 * BLOCK // 2, 2 * BLOCK + 8, 0, BLOCK - 1]
    outputs = []
    for ops in (make_ops(device, torch.float32), TorchOps(torch.float32)):
        model = random_llama(ops)
        outputs.append(chain(Driver(model), count, want=want, taps=(0, 2, 3))[1])
    found, wanted = outputs
    assert found.taps.keys() == wanted.taps.keys() == {0, 2, 3}
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-3)
    for layer, x in wanted.taps.items():
        torch.testing.assert_close(found.taps[layer], x, rtol=0, atol=1e-3)


def test_no_logits_are_computed_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_llama(BlockOps(torch.float32))
    asked: list[int] = []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda x: asked.append(len(x)) or logits(x))
    _, out = chain(Driver(model), 2 * BLOCK + 1, want=[2 * BLOCK])
    assert out.logits.shape == (1, 72) and asked == [BLOCK]
    assert chain(Driver(model), 5, want=[])[1].logits.shape == (0, 72) and asked == [BLOCK]


def test_passes_of_one_shape_are_captured_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = traced(torch.float32)
    assert isinstance(ops.capture, Traced)
    driver = Driver(random_llama(ops), slots=4096)
    first = chain(driver, 5)[1].logits.clone()
    for count in (3, 16, 1, 5):
        chain(driver, count)
    assert ops.capture.count == 1
    monkeypatch.setattr(blocks, "KEPT", 2)
    for count in (20, 40, 60):
        chain(driver, count)
    assert ops.capture.count == 4
    assert torch.equal(chain(driver, 5)[1].logits, first) and ops.capture.count == 5, "it was the oldest"
    chain(driver, 60)
    assert ops.capture.count == 5


def test_another_cache_is_captured_anew() -> None:
    ops = traced(torch.float32)
    model = random_llama(ops)
    first = chain(Driver(model), 9)[1].logits.clone()
    assert torch.equal(chain(Driver(model, slots=100), 9)[1].logits, first)
    assert isinstance(ops.capture, Traced) and ops.capture.count == 2


# The kernel, in Triton's interpreter


def with_kernel(dtype: torch.dtype) -> BlockOps:
    pytest.importorskip("triton", reason="there is no Triton on this system")
    ops = BlockOps(dtype)
    ops.kernel = tree_kernel()
    assert ops.kernel is not None
    return ops


@pytest.mark.parametrize("model", MODELS)
def test_the_kernel_sees_each_row_alone(model: str) -> None:
    """Trees, chunks and partners at random, of texts of several tiles: the bits of plain decoding."""
    target = random_llama(with_kernel(torch.float32), num_hidden_layers=1, **MODELS[model])
    assert_plain(target, session(target, (150, 5), steps=3, seed=1), leaves=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "window"), [(9, 3, 64, 0), (4, 1, 80, 90), (20, 1, 16, 1), (2, 2, 32, 64)]
)
def test_the_kernel_against_a_plain_computation(heads: int, kv: int, dim: int, window: int, dtype: torch.dtype) -> None:
    ops = with_kernel(dtype)
    torch.manual_seed(heads)
    spec = AttentionSpec(heads, kv, dim, (torch.empty(0), torch.empty(0)), (None, None), 0.0, window)
    lengths = torch.tensor([1, 2, 63, 64, 65, 128, 129, 200])
    keys = torch.stack([torch.randperm(260)[:256] for _ in lengths])
    k, v = (torch.randn(kv, 260, dim).to(dtype).transpose(0, 1) for _ in range(2))
    qkv, out = torch.randn(10, (heads + 2 * kv) * dim).to(dtype), torch.zeros(10, heads * dim, dtype=dtype)
    ops.kernel(qkv, keys, lengths, (k, v), out, spec)
    assert (out[8:] == 0).all()
    for row, length in enumerate(lengths.tolist()):
        seen = keys[row, max(0, length - window) if window else 0 : length]
        q = qkv[row, : heads * dim].view(kv, -1, dim).double()
        shares = (torch.einsum("hgd,thd->hgt", q, k[seen].double()) * dim**-0.5).softmax(-1)
        wanted = torch.einsum("hgt,thd->hgd", shares, v[seen].double()).flatten()
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out[row].double(), wanted, rtol=tolerance, atol=tolerance)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from foretell.models.tree_kernel import QUERIES, TILE, _attend
fixed = dict(GROUP=3, DIM=64, WIDTH=64, TILE=TILE, QUERIES=QUERIES)
kinds = {name: "i32" for name in _attend.arg_names} | dict(keys="*i64", lengths="*i64", scale="fp32")
for element in ("bf16", "fp32"):
    kinds |= {name: f"*{element}" for name in ("q", "k", "v", "out")} | dict.fromkeys(fixed, "constexpr")
    for generation in (80, 90):
        built = compile(ASTSource(_attend, kinds, constexprs=fixed), target=GPUTarget("cuda", generation, 32))
        print(element, generation, len(built.asm["cubin"]) > 0, built.metadata.shared <= 64 << 10)
"""


def test_the_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    """Down to their machine code, which needs none of them; and two thread blocks share the memory of a processor."""
    pytest.importorskip("triton", reason="there is no Triton on this system")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    wanted = [f"{element} {generation} True True" for element in ("bf16", "fp32") for generation in (80, 90)]
    assert run.stdout.splitlines() == wanted


# Devices


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device 'tpu' is not supported: choose 'auto', 'cpu' or 'cuda'"):
        device_of("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto") == device_of("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="^no CUDA device is available here: use device='cpu'$"):
        device_of("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_of("cuda") == torch.device("cuda", 1)
    assert device_of("auto") == device_of("cpu") == torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a GPU, as far as choosing goes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (10**9, 10**9))


def test_who_gets_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    save(tmp_path, "smollm2")
    assert Setup(tmp_path, "none", device="cuda").fit().target.device.type == "cuda"
    assert Setup(tmp_path, "none").fit().target.device.type == "cpu"
    both = Setup(tmp_path, "model", tmp_path, device="cuda", max_batch=2).fit()
    assert both.draft is not None and both.draft.device.type == both.target.device.type == "cuda"
    assert both.target.backend == "blocks" and both.split.slots == 2 * 128
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (0, 10**9))
    assert Setup(tmp_path, "none", device="cuda").fit().split.slots == 128
    with pytest.raises(ValueError, match="^memory limits what the process takes beside the CPU, .* use device='cpu'$"):
        Setup(tmp_path, "none", memory="200MB", device="cuda").fit()
    with pytest.raises(ValueError, match="^backend 'native' runs on the CPU alone: use device='cpu'$"):
        prepare(tmp_path, backend="native", device="cuda")


def test_transformers_stays_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.models.test_hf import save as save_other

    pretend(monkeypatch)
    save_other(tmp_path, "gpt2")
    assert prepare(tmp_path, device="auto").device.type == "cpu"
    with pytest.raises(ValueError, match=r"runs through transformers, on the CPU alone: use device='cpu'$"):
        prepare(tmp_path, device="cuda")
    with pytest.raises(ValueError, match="backend 'blocks' cannot run this architecture"):
        prepare(tmp_path, backend="blocks")


def test_planes_lie_where_they_are_told() -> None:
    cache = Cache(8, 1, 8)
    plane = cache.add_plane("there", 1, 2, 4, torch.float32, torch.device("meta"))
    assert plane.k.device.type == plane.v.device.type == "meta" and plane.k.shape == (1, 8, 2, 4)
    assert cache.add_plane("here", 1, 2, 4, torch.float32).k.device.type == "cpu"


def test_a_graph_is_recorded_after_a_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls alone: on a CPU there is nothing behind them."""
    said: list[str] = []

    class Graph:
        def replay(self) -> None:
            said.append("replay")

    class Recording:
        def __init__(self, graph: Graph, pool: object) -> None:
            assert pool == "pool"

        def __enter__(self) -> None:
            said.append("begin")

        def __exit__(self, *error: object) -> None:
            said.append("end")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    repeat = GraphCapture()(lambda: said.append("compute") or len(said))
    assert said == ["compute", "begin", "compute", "end"]
    assert repeat() == repeat() == 3, "what was returned when it was recorded"
    assert said[4:] == ["replay", "replay"]


# On a GPU


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_graph_repeats() -> None:
    x = torch.ones(3, device="cuda")
    repeat = GraphCapture()(lambda: 2 * x)
    x.fill_(5)
    assert repeat().tolist() == [10, 10, 10]
    assert device.free_memory_of(torch.device("cuda")) > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_gpu_answers_what_it_answers_plainly(tmp_path: Path) -> None:
    save(tmp_path, "smollm2")
    llm = LLM(tmp_path, "ngram", device="cuda", dtype="bfloat16", draft_tokens=6)
    assert llm.target.backend.startswith("cuda-") and llm.target.exact
    how = [Sampling(seed=5, max_tokens=60, ignore_eos=True, draft_tokens=n) for n in (None, 0)]
    drafted, plain = llm.generate([list(range(20)) * 2] * 2, how)
    assert drafted.token_ids == plain.token_ids and drafted.stats.drafted > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_a_larger_model_are_those_of_plain_decoding(dtype: torch.dtype) -> None:
    """Products wide enough for the library to choose among its kernels, and texts of several tiles of keys."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8192, "head_dim": 64}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    target = random_llama(make_ops("cuda", dtype), num_hidden_layers=4, **sizes, **heads)
    assert_plain(target, session(target, (1500, 5, 300, 700), steps=60, seed=1), leaves=6)


def test_a_model_in_blocks_opens_and_is_exact(tmp_path: Path) -> None:
    save(tmp_path, "smollm2")
    opened = open_model(tmp_path, backend="blocks")
    assert opened.target.backend == "blocks" and opened.target.exact
