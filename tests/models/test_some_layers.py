"""A forward through some of the layers: it is the model made of them, writes nothing else, and fills no slot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.models.blocks import BlockOps
from foretell.models.hf import HFModel
from foretell.models.llama import LlamaModel
from foretell.models.ops import TorchOps
from foretell.types import Output, Rows, Sampling, Seq
from tests.conftest import table_target, tiny_llama
from tests.models.drive import make_ops, random_llama
from tests.models.test_architectures import NATIVE

KINDS: dict[str, Callable[[], Target]] = {
    "table": table_target,
    "llama": lambda: tiny_llama(layers=4),
    "blocks": lambda: tiny_llama(layers=4, ops=BlockOps(torch.float64)),
}
TEXT = [5, 9, 2, 2, 17, 8]
BAD: list[Sequence[int]] = [[], [1, 0], [1, 1], [-1, 2], [0, 4]]


@torch.inference_mode()
def compute(target: Target, seq: Seq, cache: Cache, tokens: Sequence[int], layers: Sequence[int] | None) -> Output:
    """A chain of those tokens behind what is committed; left uncommitted."""
    assert cache.reserve(seq, len(tokens))
    rows = Rows.of(seq, tokens, range(-1, len(tokens) - 1), cache.reserved(seq))
    return target.forward(rows, cache, taps=(2,), layers=layers)


def place(target: Target) -> tuple[Cache, Seq]:
    cache = Cache(64, 2, 64)
    target.attach(cache, "target")
    seq = Seq(0, [*TEXT, 3], len(TEXT) + 1, Sampling(), 0)
    assert cache.admit(seq)
    return cache, seq


def made_of(model: LlamaModel, layers: Sequence[int]) -> LlamaModel:
    made = copy.copy(model)
    made._layers = [replace(model._layers[i], number=n) for n, i in enumerate(layers)]
    made.num_layers, made.config = len(layers), replace(model.config, num_layers=len(layers))
    return made


@pytest.mark.parametrize("backend", ["torch", "blocks", pytest.param("native", marks=NATIVE)])
@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 2), (0, 1, 2)])
def test_it_is_the_model_made_of_those_layers(backend: str, layers: tuple[int, ...]) -> None:
    model = random_llama(make_ops(backend, torch.float32))
    cache, seq = place(model)
    found = compute(model, seq, cache, TEXT, layers)
    logits, tapped = found.logits.clone(), {layer: x.clone() for layer, x in found.taps.items()}
    small = made_of(model, layers)
    other, twin = place(small)
    wanted = compute(small, twin, other, TEXT, None)
    assert torch.equal(logits, wanted.logits)
    assert tapped.keys() == ({2} if 2 in layers else set()), "a layer that does not run has no input"
    if layers == (0, 1, 2):
        assert torch.equal(tapped[2], wanted.taps[2])


@pytest.mark.parametrize("kind", KINDS)
def test_only_its_keys_and_values_are_written_and_no_slot_counts_as_filled(kind: str) -> None:
    target = KINDS[kind]()
    cache, seq = place(target)
    plane = cache.planes["target"]
    compute(target, seq, cache, TEXT, None)
    slots = list(cache.reserved(seq))
    assert plane.filled[slots].all()
    before = plane.k.clone()
    rows = Rows.of(seq, TEXT[::-1], range(-1, len(TEXT) - 1), slots)
    target.forward(rows, cache, layers=[0, 2])
    changed = [not torch.equal(plane.k[i][slots], before[i][slots]) for i in range(target.num_layers)]
    assert changed == [True, False, True, False]
    assert not plane.filled[slots].any(), "what only some layers know now is not computed"
    target.forward(rows, cache, layers=range(target.num_layers))
    assert plane.filled[slots].all()


@pytest.mark.parametrize("kind", KINDS)
def test_all_by_name_are_all(kind: str) -> None:
    target = KINDS[kind]()
    cache, seq = place(target)
    whole = compute(target, seq, cache, TEXT, None).logits.clone()
    assert torch.equal(compute(target, seq, cache, TEXT, range(4)).logits, whole)
    assert not torch.equal(compute(target, seq, cache, TEXT, range(3)).logits, whole)


@pytest.mark.parametrize("layers", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_choice_is_refused(kind: str, layers: Sequence[int]) -> None:
    target = KINDS[kind]()
    cache, seq = place(target)
    with pytest.raises(ValueError, match="are no choice among the model's 4: name one at least, each once, in ascend"):
        compute(target, seq, cache, TEXT, layers)


def test_transformers_runs_whole_only() -> None:
    model = HFModel.__new__(HFModel)
    assert model.num_layers == 0
    model._plane = Cache(4, 1, 4).add_plane("target", 1, 1, 1, torch.float32)
    cache, seq = place(random_llama(TorchOps(torch.float32)))
    with pytest.raises(ValueError, match="this model runs whole only"):
        compute(model, seq, cache, TEXT, [0])
