"""Pain K58: pipelines accepted no draft at all, or had none to offer, and said nothing."""

from __future__ import annotations

import logging

import pytest

from foretell.drafters.base import Drafter, NoDrafter
from foretell.drafters.model import ModelDrafter
from foretell.engine.stats import Lookout
from foretell.types import Sampling
from tests.conftest import VOCAB, ScriptedDrafter, run, table_target

LONG = Sampling(temperature=0, max_tokens=90, ignore_eos=True)


def never(tokens: list[int], budget: int) -> tuple[list[int], list[int]]:
    return [], []


def wrong(tokens: list[int], budget: int) -> tuple[list[int], list[int]]:
    likeliest = int(table_target().logits(tokens).argmax())
    return [(likeliest + 1) % VOCAB][:budget], [-1][:budget]


@pytest.mark.parametrize("script", [never, wrong])
def test_a_drafter_that_gains_nothing_is_named_once(script: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(table_target(), ScriptedDrafter(script), [[3]], [LONG])  # type: ignore[arg-type]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "none of the drafts was accepted in 50 rounds" in caplog.text


@pytest.mark.parametrize("drafter", [NoDrafter(), ModelDrafter(table_target(noise=0.1), VOCAB)])
def test_nothing_is_said_where_there_is_nothing_to_say(drafter: Drafter, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(table_target(), drafter, [[3]], [LONG], draft_tokens=drafter.draft_tokens)
    assert not caplog.records


def test_an_accepted_draft_starts_the_count_anew(caplog: pytest.LogCaptureFixture) -> None:
    lookout = Lookout()
    for i in range(400):
        lookout.round([3], [[0]] if i % 49 == 0 else [[]])
        lookout.round([0], [[]])  # no room: no round
    assert not caplog.records
