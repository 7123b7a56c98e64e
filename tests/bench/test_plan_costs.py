"""What a plan measures: by hand-made rounds, and on a tiny model whose acceptance can be had by running it."""

from __future__ import annotations

from typing import Any

import pytest

from foretell import LLM, Sampling
from foretell.bench.plan import TOGETHER, Measured, Rounds, Settings, measure, measured_costs
from foretell.bench.prompts import ids_of
from foretell.bench.questions import Question
from foretell.bench.run import Run, afresh
from foretell.engine.stats import Stats
from foretell.planner.cost import Costs
from foretell.planner.offline import Forecast
from tests.cli.conftest import write_tiny

QUESTIONS = [Question("list", "one two three one two"), Question("text", "a cat"), Question("list", "four, four, four")]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    return LLM(folder, "suffix+recycling", draft_tokens=6, max_batch=TOGETHER, max_context=512)


@pytest.mark.parametrize(
    ("longest", "budgets"), [(1, [1]), (3, [1, 3]), (4, [1, 4]), (15, [2, 5, 15]), (40, [1, 4, 13, 40])]
)
def test_budgets_are_few_and_end_at_the_longest(longest: int, budgets: list[int]) -> None:
    assert Settings(longest).budgets() == budgets


def test_a_plan_for_no_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="draft-tokens must be at least 1"):
        Settings(0)
    with pytest.raises(ValueError, match="temperature"):
        Settings(temperature=-1)


def rounds(budget: int, **fields: Any) -> Rounds:
    return Rounds(budget, [Stats()], count=10, tokens=10, decode_s=0.2, attended=10 * 100, **fields)


def test_rounds_beside_their_forwards() -> None:
    found = Measured([], Costs([1], [1.0]), {1: {0.0: 0.002, 4.0: 0.004}, 5: {0.0: 0.006, 4.0: 0.016}}, True)
    assert found.beside_s(0, 1) == pytest.approx(0.002) and found.beside_s(2, 1) == pytest.approx(0.003)
    assert found.beside_s(20, 5) == pytest.approx(0.016) and found.beside_s(12, 3) == pytest.approx(0.010)
    assert found.beside_s(36, 9) == pytest.approx(0.028), "beyond what was measured the line goes on"


def test_the_table_is_held_against_plain_rounds() -> None:
    """How forwards differ comes from the table; how slow the machine is now comes from the rounds."""
    table = Costs([1, 3], [0.010, 0.012], per_attended=1e-5)
    plain, drafted = rounds(0, slow=[1.3, 1.2, 9.0], sizes=[10]), rounds(2, slow=[1.3, 1.8, 18.0], sizes=[0, 0, 10])
    drafted.decode_s = 0.1
    found = Measured([plain, drafted], table, {1: {0: 0.0, 2: 0.0}}, True)
    assert found.context == 100
    assert found.costs().forward(1, 100, 1) == pytest.approx(1.3 * (0.010 + 1e-3))
    assert found.costs().forward(3, 100, 1) == pytest.approx(1.3 * (1.5 * 0.012 + 3e-3)), "half as slow again, mostly"
    assert found.speedup(plain) == 1 and found.speedup(drafted) == 2


def test_measure_counts_what_runs_give(llm: LLM) -> None:
    settings = Settings(longest=6, max_tokens=60)
    told: list[tuple[int, int, str]] = []
    found = measure(llm, QUESTIONS, settings, lambda *line: told.append(line))
    assert found is not None and found.complete
    assert [run.budget for run in found.runs] == [0, 2, 6] and not llm.engine.requests
    for run in found.runs:
        stats = []
        for number, question in enumerate(QUESTIONS):
            afresh(llm)
            alone = Run(llm, ids_of(llm, question.text), settings.sampling(number, run.budget))
            alone.finish()
            stats.append(alone.request.stats)
        total = Stats.pooled(stats)
        assert run.count == total.rounds - 3 and run.tokens + 3 <= total.emitted, "less the rounds with the prompts"
        assert Stats.pooled(run.parts).accepted_by_node == total.accepted_by_node
        assert sum(run.sizes) == run.count and len(run.sizes) <= run.budget + 1
        assert run.nodes == pytest.approx(sum(n * c for n, c in enumerate(run.sizes)) / run.count)
        assert len(run.forward) == len(run.beside) == 3 and min(*run.forward, *run.beside, *run.slow) > 0
        assert run.decode_s == pytest.approx(
            sum((f + b) for f, b in zip(run.forward, run.beside, strict=True)) * run.count / 3, rel=0.5
        )
    assert llm.engine.costs is not None and found.table.rows == llm.engine.costs.rows
    assert set(found.beside) == {1, TOGETHER} and min(min(points.values()) for points in found.beside.values()) > 0
    assert [line[0] for line in told] == sorted(line[0] for line in told) and told[-1][0] == told[-1][1] - 1
    drafted = found.runs[-1]
    acceptance = found.acceptance()
    assert acceptance.tokens[6] == pytest.approx(drafted.tokens / drafted.count) and acceptance.tokens[6] > 1
    assert Forecast(found.costs(), found.beside_s, acceptance, found.context).round_s(6, 2) > 0


def test_stopped_early_whole_prompts_count(llm: LLM) -> None:
    def stopping_after(prompts: int) -> Measured | None:
        started: list[str] = []
        return measure(
            llm,
            QUESTIONS,
            Settings(longest=2, max_tokens=8),
            lambda done, total, what: started.append(what),
            lambda: len(started) > 2 * prompts + 1,
        )

    assert stopping_after(0) is None
    found = stopping_after(2)
    assert found is not None and not found.complete and len(found.runs[0].parts) == 2
    assert not llm.engine.requests


def test_what_does_not_fit_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="do not fit the context of 512: lower max_tokens"):
        measure(llm, QUESTIONS, Settings(longest=3, max_tokens=500))


def test_measuring_forwards_leaves_the_engine_as_it_was(llm: LLM) -> None:
    before = llm.generate("one two one two", Sampling(temperature=0, max_tokens=20))
    assert min(measured_costs(llm).seconds) > 0
    assert llm.generate("one two one two", Sampling(temperature=0, max_tokens=20))[0].token_ids == before[0].token_ids
    llm.engine.cache.check()
