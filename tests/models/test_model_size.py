"""What a model is said to take before it is loaded is what its tensors then take; weights come a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from foretell.kv.cache import Cache
from foretell.models import matrix
from foretell.models.config import ModelConfig
from foretell.models.llama import LlamaModel
from foretell.models.load import _Shard, open_checkpoint, tensor_shapes
from foretell.models.matrix import Stacked, Stored, pieces
from foretell.models.native import NativeOps, Packed, supported
from foretell.models.ops import AttentionSpec, Ops, TorchOps
from foretell.models.size import TOKEN, decoder_size
from foretell.types import Rows, Sampling, Seq
from tests.models.small import SMALL

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "biases": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 48},
    "odd": {"architectures": ["MistralForCausalLM"], "intermediate_size": 77, "vocab_size": 101},
}


def config_of(kind: str, **other: int) -> ModelConfig:
    return ModelConfig.from_hf({**SMALL, "max_position_embeddings": 128, **KINDS[kind], **other})


def build(config: ModelConfig, ops: Ops) -> LlamaModel:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        for name, shape in tensor_shapes(config).items()
    }
    return LlamaModel(config, weights.__getitem__, ops, stop_ids=frozenset(), max_context=128, exact=False)


def held(model: LlamaModel) -> Iterator[Tensor]:
    """Every tensor of the model, once."""
    layers = [getattr(layer, field.name) for layer in model._layers for field in fields(layer)]
    norms = [norm for layer in model._layers for norm in (layer.attention.q_norm, layer.attention.k_norm)]
    found = [model._embedding, model._head, model._norm, *layers, *norms]
    tensors = [part.data if isinstance(part, Packed) else part for part in found if not isinstance(part, AttentionSpec)]
    yield from {id(part): part for part in tensors if isinstance(part, Tensor)}.values()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("native", [True, False])
def test_weights_and_cache_to_the_byte(kind: str, dtype: torch.dtype, native: bool) -> None:
    config = config_of(kind)
    if native and not supported(dtype, config.head_dim):
        pytest.skip("the native kernels do not run this")
    model = build(config, NativeOps(dtype, 1) if native else TorchOps(dtype))
    told = decoder_size(config, str(dtype).removeprefix("torch."), dtype, native=native, tokens=10)
    assert told.weights == sum(part.nbytes for part in held(model)) + 10 * TOKEN
    assert told.kv == model.kv_bytes() and told.vocab_size == config.vocab_size
    spec = model._layers[0].attention
    assert told.position * 128 == spec.cos.nbytes + spec.sin.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_native_buffers_of_a_forward(kind: str) -> None:
    config = config_of(kind, vocab_size=3001)
    if not supported(torch.float32, config.head_dim):
        pytest.skip("the native kernels do not run this")
    ops = NativeOps(torch.float32, 1)
    model = build(config, ops)
    cache = Cache(128, 1, 128)
    model.attach(cache, "target")
    tokens = [i % config.vocab_size for i in range(64)]
    seq = Seq(0, tokens, 64, Sampling(), 0)
    cache.admit(seq)
    cache.reserve(seq, 64)
    model.forward(Rows.of(seq, tokens, range(-1, 63), cache.reserved(seq)), cache)
    told = decoder_size(config, "float32", torch.float32, native=True, tokens=0)
    taken = sum(buffer.nbytes for buffer in ops._buffers.values())
    # beside the buffers, `work` tells of the wanted rows' own copies and of the lists that rows are made from
    assert taken <= told.work(64, 64, 64) < taken + 64 * (4 * 2 * config.hidden_size + 800) + 1000


def test_buffers_grow_by_doubling_and_keep_their_rows() -> None:
    if not supported(torch.float32, 16):
        pytest.skip("no native kernels here")
    ops = NativeOps(torch.float32, 1)
    sizes = [ops._buffer("x", rows, 8).shape[0] and ops._buffers["x", 8].shape[0] for rows in (1, 33, 40, 64, 65, 2)]
    assert sizes == [32, 64, 64, 64, 128, 128]


def test_stacked_parts_read_as_one() -> None:
    parts = [torch.randn(n, 5) for n in (3, 1, 6)]
    whole = torch.cat(parts)
    stacked = Stacked(parts)
    assert stacked.shape == (10, 5)
    for start in range(10):
        for stop in range(start + 1, 11):
            assert torch.equal(stacked[start:stop], whole[start:stop])
    assert torch.equal(Stacked([torch.arange(3.0), torch.arange(2.0)])[:], torch.tensor([0.0, 1, 2, 0, 1]))


def test_pieces_are_small_and_cover_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "PIECE", 4 * 5 * 7)
    asked: list[tuple[int, int]] = []
    whole = torch.randn(40, 5)

    def read(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return whole[start:stop]

    found = list(pieces(Stored((40, 5), read), multiple=3))
    assert torch.equal(torch.cat([rows for _, rows in found]), whole)
    assert asked == [(start, min(start + 6, 40)) for start in range(0, 40, 6)] and found[1][0] == 6
    assert [start for start, _ in pieces(whole, multiple=16)] == [0, 16, 32]  # never less than the multiple


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("native", [True, False])
def test_packing_in_pieces_is_packing_at_once(kind: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(kind)
    if native and not supported(torch.bfloat16, config.head_dim):
        pytest.skip("the native kernels do not run this")

    def packed() -> list[Tensor]:
        return list(held(build(config, NativeOps(torch.bfloat16, 1) if native else TorchOps(torch.bfloat16))))

    whole = packed()
    monkeypatch.setattr(matrix, "PIECE", 4 * 64 * 9)
    for one, other in zip(packed(), whole, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_a_checkpoint_is_read_by_rows_whatever_its_heads(smollm2_path: Path) -> None:
    """llama.cpp interleaves the rows of q and k: any stretch of them must be that of the whole."""
    checkpoint = open_checkpoint(smollm2_path)
    for name in ("layers.3.self_attn.q_proj.weight", "layers.3.self_attn.k_proj.weight", "layers.3.mlp.up_proj.weight"):
        stored = checkpoint.matrix(name)
        whole = checkpoint.tensor(name)
        assert stored.shape == tuple(whole.shape)
        for start, stop in ((0, 1), (0, 64), (5, 70), (63, 65), (100, stored.shape[0])):
            assert torch.equal(stored[start:stop], whole[start:stop])


def test_a_file_that_became_shorter_is_said(smollm2_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(smollm2_path.read_bytes())
    checkpoint = open_checkpoint(copy)
    with copy.open("r+b") as file:
        file.truncate(10_000_000)
    with pytest.raises(ValueError, match="model.gguf has become shorter since it was opened"):
        for name in checkpoint.names():
            checkpoint.tensor(name)


def test_a_map_of_safetensors_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Shard, "STRETCH", 1000)
    weight = torch.randn(100, 10)
    save_file({"w": weight}, tmp_path / "x.safetensors")
    shard = _Shard(tmp_path / "x.safetensors")
    files = set()
    for start in range(0, 100, 10):
        assert torch.equal(shard.rows("w", start, start + 10), weight[start : start + 10])
        files.add(shard._file)
    assert len(files) == 4  # after three pieces of 400 bytes each
