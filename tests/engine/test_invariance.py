"""The crown test: whatever the drafter, the shape of its trees, the company, the order, the chunks, preemption or the
budgets, a request's tokens are those of plain decoding with the same seed. All of them, on exact targets."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import drafters
from foretell.drafters import METHODS, Parts
from foretell.drafters.base import Drafter, NoDrafter
from foretell.drafters.model import ModelDrafter
from foretell.models.base import Target
from foretell.types import Sampling
from tests.conftest import (
    VOCAB,
    HostileDrafter,
    RandomDrafter,
    RandomPlanner,
    RidingDrafter,
    run,
    table_target,
    tiny_llama,
)
from tests.drafters.pairs import WAYS, letter_drafter
from tests.models.drive import CUDA, make_ops

TARGETS: dict[str, Callable[..., Target]] = {"table": table_target, "llama": tiny_llama}


def in_blocks(device: str, **settings: Any) -> Target:
    """The tiny model as a GPU runs it, rounding as models on a GPU do."""
    return tiny_llama(ops=make_ops(device, torch.bfloat16), **settings)


KINDS = {**TARGETS, **{device: functools.partial(in_blocks, device) for device in ("blocks", "cuda")}}
PENALTIES = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7, "min_tokens": 5},
    "shaped": {"top_k": 9, "top_p": 0.9, "min_p": 0.02, "logit_bias": {3: 2.0, 4: -5.0}},
}
MODES = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9}}


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Random, with repeats inside (n-grams find something) and a beginning that some share (the prefix cache does)."""
    source = random.Random(seed)
    shared = [source.randrange(1, VOCAB) for _ in range(20)]
    made = []
    for i in range(count):
        own = [source.randrange(1, VOCAB) for _ in range(source.randint(1, 9))]
        made.append((shared if i % 3 == 0 else []) + own * source.randint(1, 3))
    return made


def samplings(count: int, mode: str, penalty: str) -> list[Sampling]:
    settings = {**MODES[mode], **PENALTIES[penalty]}
    return [Sampling(seed=1000 + i, max_tokens=12 + i % 7, **settings) for i in range(count)]


def methods(target: Target, kind: str) -> dict[str, Callable[[list[list[int]]], Drafter]]:
    """Every method there is, chains and trees, and some that no one should ship."""
    near = KINDS[kind](noise=0.15)
    parts = Parts(target, VOCAB, near)
    made: dict[str, Callable[[list[list[int]]], Drafter]] = {
        name: lambda _, method=method: method.build(parts)
        for name, method in METHODS.items()
        if name != "auto"  # which is one of the others
    }
    made["a mixture"] = lambda _: drafters.build("suffix+recycling+ngram", parts)
    made["model, a tree"] = lambda _: ModelDrafter(near, VOCAB, width=3)
    made["model, itself"] = lambda _: ModelDrafter(KINDS[kind](), VOCAB)
    for way in WAYS:
        made[f"model, {way}"] = lambda _, way=way: letter_drafter(way)
    made["random"] = lambda _: RandomDrafter()
    made["random, with riders"] = lambda _: RidingDrafter()
    made["hostile"] = lambda known: HostileDrafter(known)
    return made


METHOD_NAMES = sorted(methods(table_target(), "table"))


WAYS_TO_SAMPLE = [(kind, mode, penalty) for kind in TARGETS for mode in MODES for penalty in PENALTIES]
WAYS_TO_SAMPLE += [("blocks", "greedy", "plain"), ("blocks", "sampled", "penalties")]
ON_GPU = [pytest.param("cuda", mode, "plain", marks=CUDA, id=f"cuda-{mode}-plain") for mode in MODES]


@pytest.mark.parametrize(("kind", "mode", "penalty"), [*WAYS_TO_SAMPLE, *ON_GPU])
def test_tokens_are_those_of_plain_decoding(kind: str, mode: str, penalty: str) -> None:
    target = KINDS[kind]()
    texts = prompts(5)
    how = samplings(5, mode, penalty)
    plain = [run(target, NoDrafter(), [p], [s], reuse=False)[0].token_ids for p, s in zip(texts, how, strict=True)]
    known = [p + t for p, t in zip(texts, plain, strict=True)]
    how = [replace(s, prediction=[*t[:4], 1, *t[4:9], *t[10:]]) for s, t in zip(how, plain, strict=True)]
    accepted = 0
    for name, build in methods(target, kind).items():
        for p, s, expected in list(zip(texts, how, plain, strict=True))[:2]:
            done = run(target, build(known), [p], [s])[0]
            accepted += done.stats.accepted
            assert done.token_ids == expected, f"{name}, alone"
        scenarios = {
            "in a batch": {},
            "in small chunks": {"max_rows": 5},
            "arriving late": {"arrivals": random.Random(3)},
            "preempted": {"preempt": random.Random(4)},
            "preempted, no reuse": {"preempt": random.Random(5), "preempt_rate": 0.03, "reuse": False, "max_rows": 7},
            "short of slots": {"slots": 110},
            "random budgets": {"planner": RandomPlanner(9, target.max_context)},
        }
        for scenario, options in scenarios.items():
            got = [c.token_ids for c in run(target, build(known), texts, how, **options)]
            assert got == plain, f"{name}, {scenario}"
        got = [c.token_ids for c in run(target, build(known), texts[::-1], how[::-1], max_batch=3)]
        assert got == plain[::-1], f"{name}, in another order"
    assert accepted > 20, "nothing was speculated: the test shows nothing"


@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("kind", TARGETS)
def test_other_rules_are_greedy_at_temperature_0(kind: str, rule: str) -> None:
    target = TARGETS[kind]()
    texts, how = prompts(5), samplings(5, "greedy", "penalties")
    plain = [run(target, NoDrafter(), [p], [s], reuse=False)[0].token_ids for p, s in zip(texts, how, strict=True)]
    for name, build in methods(target, kind).items():
        if rule == "block" and not build([]).chains:
            continue
        assert [c.token_ids for c in run(target, build([]), texts, how, rule=rule)] == plain, name


def test_a_run_goes_on_from_any_of_its_prefixes() -> None:
    target, prompt = table_target(), prompts(1)[0]
    whole = run(target, NoDrafter(), [prompt], [Sampling(seed=7, max_tokens=30, ignore_eos=True)])[0].token_ids
    for cut in (1, 5, 17):
        sampling = Sampling(seed=7, max_tokens=30 - cut, ignore_eos=True)
        rest = run(target, ModelDrafter(table_target(noise=0.1), VOCAB), [prompt + whole[:cut]], [sampling])[0]
        assert rest.token_ids == whole[cut:]


def test_every_method_takes_part() -> None:
    assert {"none", "ngram", "model", "hostile", "random, with riders"} <= set(METHOD_NAMES)
