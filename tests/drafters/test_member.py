"""Any drafter in one tree with sources: what each is good at is not lost, whoever else has written to the slots."""

from __future__ import annotations

import pytest

from foretell.drafters import Parts, build
from foretell.drafters.base import NoDrafter
from foretell.drafters.member import MemberSource
from foretell.drafters.model import ModelDrafter
from foretell.drafters.search import SearchDrafter
from foretell.drafters.suffix import SuffixSource
from foretell.types import Sampling
from tests.conftest import VOCAB, run, table_target
from tests.engine.test_invariance import prompts

GREEDY = Sampling(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_a_perfect_member_is_taken_at_its_word(rule: str) -> None:
    """Its keys and values are those of its own nodes, not of what the search made of their slots."""
    target, texts = table_target(), prompts(4)
    plain = [done.token_ids for done in run(target, NoDrafter(), texts, [GREEDY] * 4)]
    mixed = SearchDrafter({"suffix": SuffixSource(), "model": MemberSource(ModelDrafter(table_target(), VOCAB))})
    done = run(target, mixed, texts, [GREEDY] * 4, rule=rule, draft_tokens=8)
    assert [c.token_ids for c in done] == plain
    for c in done:
        assert c.stats.rounds <= 40 / 5 + 2, "four nodes and the target's own token in nearly every round"
        assert c.stats.by_member["model"][1] >= 15


def test_a_useless_member_costs_little() -> None:
    """On a text that repeats, beside a draft of other weights."""
    target, prompt = table_target(), [1, 2, 3, 4, 5, 6] * 4
    alone = run(target, SearchDrafter({"suffix": SuffixSource()}), [prompt], [GREEDY])[0]
    other = MemberSource(ModelDrafter(table_target(seed=9), VOCAB))
    mixed = run(target, SearchDrafter({"suffix": SuffixSource(), "model": other}), [prompt], [GREEDY])[0]
    assert mixed.token_ids == alone.token_ids and mixed.stats.rounds <= alone.stats.rounds + 4


def test_by_name() -> None:
    target = table_target()
    mixed = build("suffix+early_exit+model", Parts(target, VOCAB, table_target(noise=0.1)))
    done = run(target, mixed, prompts(3), [GREEDY] * 3)
    plain = run(target, NoDrafter(), prompts(3), [GREEDY] * 3)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert all({"suffix", "early_exit", "model"} >= c.stats.by_member.keys() >= {"model"} for c in done)
