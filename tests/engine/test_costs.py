"""The table of what forwards cost: measured once, kept, and measured anew when it cannot be true."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretell import LLM
from foretell.engine import measure as module
from foretell.models.base import Target
from foretell.planner.cost import Costs
from foretell.types import Sampling
from tests.cli.conftest import write_tiny


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Costs]:
    """Every table that is measured from here on."""
    found: list[Costs] = []
    measure = module.measure

    def counted(*arguments: object) -> Costs:
        found.append(measure(*arguments))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(module, "measure", counted)
    monkeypatch.setattr(module, "ODD", 100.0)  # a tiny model's forwards are all odd
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tiny(tmp_path / "tiny")
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def load(folder: Path) -> LLM:
    return LLM(folder / "tiny", "suffix", max_context=200, max_batch=2)


def table(llm: LLM) -> Path:
    [path] = llm.folder.glob("costs-*.json")
    return path


def test_a_table_is_measured_once(folder: Path, measured: list[Costs]) -> None:
    first, again = load(folder), load(folder)
    assert first.engine.costs == again.engine.costs == measured[0] and len(measured) == 1
    assert {1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64} <= set(measured[0].rows)
    for threads in (1, 2):
        LLM(folder / "tiny", "suffix", max_context=200, max_batch=2, threads=threads)
    assert len(measured) >= 2 and len(list(first.folder.glob("costs-*.json"))) >= 2, "each number of threads its own"


def test_a_table_that_cannot_be_true_is_measured_anew(folder: Path, measured: list[Costs]) -> None:
    llm = load(folder)
    known = json.loads(table(llm).read_text())
    flat = {**known, "seconds": [known["seconds"][0] * 50**i for i in range(len(known["rows"]))]}
    table(llm).write_text(json.dumps(flat))
    assert load(folder).engine.costs == measured[1]
    assert json.loads(table(llm).read_text())["seconds"] == list(measured[1].seconds)


def test_a_table_of_an_odd_moment_is_measured_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not hold right after it was measured never will."""
    limits: list[float] = []
    measure = module.measure

    def slow_at_first(target: Target, limit_s: float = module.LIMIT_S) -> Costs:
        limits.append(limit_s)
        costs = measure(target, limit_s)
        return costs if len(limits) > 1 else replace(costs, seconds=[s * 50**i for i, s in enumerate(costs.seconds)])

    monkeypatch.setattr(module, "measure", slow_at_first)
    monkeypatch.setattr(module, "ODD", 100.0)
    costs = load(folder).engine.costs
    assert limits == [module.LIMIT_S, module.AGAIN_S] and sum(limits) < 5
    assert costs is not None and costs.seconds[-1] < 100 * costs.seconds[0]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"rows": [1, 2], "seconds": [0.1]}', "no json"])
def test_a_table_that_is_none_is_measured_anew(folder: Path, measured: list[Costs], text: str) -> None:
    llm = load(folder)
    table(llm).write_text(text)
    assert load(folder).engine.costs == measured[1]


def test_the_cache_of_requests_is_not_touched(folder: Path) -> None:
    llm = load(folder)
    llm.engine.cache.check()
    plain = llm.generate("one two", Sampling(temperature=0, max_tokens=8, draft_tokens=0))[0]
    assert llm.generate("one two", Sampling(temperature=0, max_tokens=8))[0].token_ids == plain.token_ids
