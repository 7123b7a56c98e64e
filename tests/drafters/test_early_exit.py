"""Drafting with the target's own layers: on its own plane, from the text alone, and never into what is committed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from foretell.drafters import Parts, build
from foretell.drafters.base import NoDrafter
from foretell.drafters.early_exit import CHOICE, Choice, EarlyExitDrafter
from foretell.models.files import write_json
from foretell.models.llama import LlamaModel
from foretell.types import Sampling
from tests.conftest import VOCAB, run, table_target, tiny_llama
from tests.engine.test_invariance import prompts
from tests.play import Stage

MODES = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9}}


def deep() -> LlamaModel:
    return tiny_llama(layers=4)


def idle(*layers: int) -> LlamaModel:
    """Four layers, of which these add nothing."""
    model = deep()
    for i in layers:
        for weight in (model._layers[i].o, model._layers[i].down):
            weight.zero_()  # type: ignore[attr-defined]
    return model


def samplings(count: int, **settings: Any) -> list[Sampling]:
    return [Sampling(seed=9 + i, max_tokens=30, ignore_eos=True, **settings) for i in range(count)]


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (0, 3), (0, 1, 3)])
def test_layers_that_say_what_all_say_are_always_right(layers: tuple[int, ...], mode: str, rule: str) -> None:
    """Every node is accepted, alone and in company, after preemption and after a prefix hit."""
    target, texts, how = idle(1, 2), [p[:30] for p in prompts(4)], samplings(4, **MODES[mode])
    plain = [run(target, NoDrafter(), [p], [s], reuse=False)[0].token_ids for p, s in zip(texts, how, strict=True)]
    for preempt in (None, random.Random(2)):
        stage = Stage(target, EarlyExitDrafter(target, layers), rule=rule, draft_tokens=4, max_rows=24)
        for again in (False, True):
            requests = [stage.add(p, s) for p, s in zip(texts, how, strict=True)]
            while stage.engine.requests:
                if preempt and stage.engine.scheduler.running and preempt.random() < 0.1:
                    stage.preempt(preempt.choice(stage.engine.scheduler.running))
                stage.step()
            for request, expected in zip(requests, plain, strict=True):
                assert request.stats.accepted == request.stats.drafted > 15
                if rule == "match" or mode == "greedy":
                    assert request.completion().token_ids == expected
            assert not again or sum(request.stats.cached_tokens for request in requests) > 0


@pytest.mark.parametrize("width", [1, 2])
def test_a_draft_depends_on_the_text_alone(width: int) -> None:
    """Under `ratio` other drafts are other tokens. Whatever of a text happens to be cached, all of it before the root
    is known to the draft as the whole target has it."""
    target = deep()
    texts, how = [p[:40] for p in prompts(5)], samplings(5, temperature=0.9)
    scenarios: dict[str, dict[str, Any]] = {
        "in a batch": {},
        "in small chunks": {"max_rows": 5},
        "preempted": {"preempt": random.Random(4)},
        "preempted, no reuse": {"preempt": random.Random(5), "preempt_rate": 0.05, "reuse": False},
    }

    def tokens(count: slice = slice(None), **options: Any) -> list[list[int]]:
        drafter = EarlyExitDrafter(target, [0, 2], width=width)
        return [c.token_ids for c in run(target, drafter, texts[count], how[count], rule="ratio", **options)]

    alone = [tokens(slice(i, i + 1))[0] for i in range(5)]
    for name, options in scenarios.items():
        assert tokens(**options) == alone, name


def test_a_long_text_between_cache_and_root_is_computed_in_bounded_passes() -> None:
    target = table_target()
    target.max_context = 1200
    texts = [[i % 23 + 1 for i in range(n)] for n in (700, 3, 300)]
    how = samplings(3, temperature=0.0)
    plain = [c.token_ids for c in run(target, NoDrafter(), texts, how, slots=4000)]
    drafter = EarlyExitDrafter(target, range(4))
    stage = Stage(target, drafter, slots=4000, max_rows=2000, reuse=False)
    requests = [stage.add(p, s) for p, s in zip(texts, how, strict=True)]
    stage.step()
    for request in requests:
        stage.preempt(request.seq)
    stage.finish()
    for request, expected in zip(requests, plain, strict=True):
        assert request.completion().token_ids == expected
        assert request.stats.accepted == request.stats.drafted > 0


def test_it_has_no_memory_of_its_own_and_what_is_committed_is_whole() -> None:
    target = deep()
    stage = Stage(target, EarlyExitDrafter(target, [0, 2], width=2))
    plane = stage.cache.planes["target"]
    assert stage.cache.planes.keys() == {"target"}
    requests = [stage.add(p, s) for p, s in zip(prompts(3), samplings(3, temperature=0.7), strict=True)]

    def whole() -> None:
        for seq in (request.seq for request in requests if request.seq.table >= 0):
            assert plane.filled[stage.cache.committed(seq, 0, seq.cached)].all()

    stage.finish(whole)
    assert sum(request.stats.drafted for request in requests) > 50


def test_a_round_takes_a_pass_for_each_drafted_token_and_the_first_none() -> None:
    target = table_target()
    stage = Stage(target, EarlyExitDrafter(target, [0]), draft_tokens=5)
    request = stage.add([1, 2, 3, 4], Sampling(seed=1, max_tokens=90, ignore_eos=True))
    stage.step()
    assert (target.forwards, request.stats.drafted) == (1, 0)
    for _ in range(3):
        before = target.forwards
        stage.step()
        assert target.forwards - before == 5 + 1
    assert request.stats.drafted == 15


def test_what_cannot_draft_is_refused() -> None:
    target = table_target()
    with pytest.raises(ValueError, match=r"layers \[0, 4\] are no choice among the model's 4"):
        EarlyExitDrafter(target, [0, 4])
    target.num_layers = 0
    for make in (lambda: EarlyExitDrafter(target, [0]), lambda: build("early_exit", Parts(target, VOCAB, None))):
        with pytest.raises(ValueError, match="this model runs whole only: no drafter can use some of its layers"):
            make()


def test_what_was_found_is_used_if_it_is_whole_and_fits(tmp_path: Path) -> None:
    def drafter() -> EarlyExitDrafter:
        made = build("early_exit", Parts(table_target(), VOCAB, None, folder=tmp_path / "deep"))
        assert isinstance(made, EarlyExitDrafter)
        return made

    default = drafter()
    assert (default.layers, default.draft_tokens) == ((0,), 3), "the first third"
    path = tmp_path / "deep" / CHOICE
    Choice((0, 1, 3), 2).save(path)
    assert [p.name for p in path.parent.iterdir()] == [CHOICE]
    assert (drafter().layers, drafter().draft_tokens) == ((0, 1, 3), 2)
    good = {"layers": [0, 1], "draft_tokens": 2}
    wrong: list[Any] = [[0, 4], [1, 0], [], [0.0], ["0"], "01", None, [True]]
    for bad in [{"layers": [0, 1]}, *({**good, "layers": w} for w in wrong), {**good, "draft_tokens": 0}]:
        write_json(path, bad)
        assert drafter().layers == (0,), bad
    path.write_text(path.read_text()[:-3])
    assert drafter().layers == (0,), "cut off"
