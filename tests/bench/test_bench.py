"""The measurements, on a tiny model: what they report is consistent; how fast it is is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell import LLM, Sampling
from foretell.bench.compare import compare, first_difference
from foretell.bench.forward import row_times, timed
from foretell.bench.prompts import PROMPTS, encoded
from foretell.bench.run import Run, warm_up
from tests.cli.conftest import write_tiny
from tests.cli.run import foretell


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny(tmp_path_factory.mktemp("models") / "tiny"), max_batch=1, max_context=2000)


def test_run_counts_decoding_apart_from_the_prompt(llm: LLM) -> None:
    ticks = iter(range(1000))
    run = Run(llm, [1, 2, 3] * 5, Sampling(temperature=0, max_tokens=30), meter=lambda: float(next(ticks)))
    completion = run.finish()
    stats = completion.stats
    assert 0 < run.decoded < stats.emitted
    assert run.metered == stats.rounds - 1
    assert run.tokens_per_second == run.decoded / run.decode_s
    assert run.prefill_s > 0


def test_run_can_be_stopped(llm: LLM) -> None:
    answers = iter([False, False, True])
    run = Run(llm, [1, 2], Sampling(max_tokens=100, ignore_eos=True), stopping=lambda: next(answers))
    assert run.finish().finish_reason == "abort"
    events = Run(llm, [1, 2], Sampling(max_tokens=100, ignore_eos=True)).events()
    next(events)
    events.close()
    assert not llm.engine.requests


def test_compare_stops_when_asked(llm: LLM) -> None:
    run = Run(llm, [1, 2], Sampling(max_tokens=5))
    run.finish()
    assert compare(run, llm, Sampling(max_tokens=5), lambda: True) is None


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1


def test_row_times_leave_the_cache_as_it_was(llm: LLM) -> None:
    warm_up(llm)
    available = llm.engine.cache.available
    times = row_times(llm, (1, 4), context=300, repetitions=2)
    assert times.keys() == {1, 4}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())
    assert llm.engine.cache.available == available
    llm.engine.cache.check()


def test_timing_does_not_change_the_engine(llm: LLM) -> None:
    target = llm.engine.target
    plain = llm.generate("abc", Sampling(seed=1, max_tokens=20))
    with timed(llm) as clock:
        inside = llm.generate("abc", Sampling(seed=1, max_tokens=20))
    assert clock.seconds > 0 and llm.engine.target is target
    assert inside[0].token_ids == plain[0].token_ids


def test_prompts(llm: LLM) -> None:
    assert list(encoded(llm, [])) == list(PROMPTS) and list(encoded(llm, ["code"])) == ["code"]
    with pytest.raises(ValueError, match="no kind of prompt 'poem'"):
        encoded(llm, ["poem"])


def test_decode(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    options = ("-m", folder, "-n", 24, "--repetitions", 2, "--kind", "code", "--kind", "edit")
    result = foretell("bench", "decode", *options, "--against", "transformers", "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [row["kind"] for row in report["prompts"]] == ["code", "edit"]
    total = report["total"]
    assert total["identical"] and total["tokens"] == 48
    for row in [*report["prompts"], total]:
        ratio = row["drafted_tokens_per_second"] / row["plain_tokens_per_second"]
        assert row["speedup"] == pytest.approx(ratio)
        assert row["plain_against_other"] == pytest.approx(
            row["plain_tokens_per_second"] / row["other_tokens_per_second"]
        )
    assert [row["other_first_difference"] for row in report["prompts"]] == [None, None]
    assert list(report["forward_ms"]) == ["1", "4", "8", "16", "32"] and report["forward_ratio"]["1"] == 1
    assert all(0 < share < 1 for share in report["outside_forward"].values())
    text = foretell("bench", "decode", *options).stdout
    assert "plain tok/s" in text and "times one row" in text and "outside the model's forward" in text


def test_bad_settings(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    result = foretell("bench", "decode", "-m", folder, "--repetitions", 0)
    assert result.exit_code == 2 and "repetitions must be at least 1" in result.stderr
    result = foretell("bench", "decode", "-m", folder, "--against", "nothing")
    assert result.exit_code == 2 and "not one of transformers" in result.stderr
