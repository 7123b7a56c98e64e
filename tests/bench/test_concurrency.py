"""`bench load`: so many requests are kept running, whose times and tokens are what they are alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretell import LLM, Sampling
from foretell.bench import peers
from foretell.bench.load import Settings, _Timed, distinct, load
from foretell.bench.peers import Peers
from foretell.bench.peers import Settings as PeerSettings
from foretell.bench.questions import Question, fitted
from foretell.bench.run import afresh
from foretell.engine.request import Request
from foretell.engine.stats import Stats
from foretell.types import Seq
from tests.cli.conftest import write_tiny
from tests.cli.run import foretell

QUESTIONS = [Question("list", "one two three one two"), Question("text", "a cat"), Question("list", "four, four, four")]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny(tmp_path_factory.mktemp("models") / "tiny"), "ngram", max_batch=4, max_context=400)


def none(llm: LLM) -> Peers:
    return Peers(PeerSettings(), llm, "", "auto", 1)


def test_so_many_are_kept_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    step = llm.step

    def counted() -> None:
        running.append(len(llm.engine.requests))
        step()

    monkeypatch.setattr(llm, "step", counted)
    report = load(llm, QUESTIONS, Settings((3,), max_tokens=12), none(llm))
    assert max(running) == 3 and running.count(3) > len(running) / 2
    row = report["levels"][0]
    assert (row["concurrency"], row["requests"], row["identical"]) == (3, 8, True)
    assert not llm.engine.requests and report["complete"]


def test_figures_belong_together(llm: LLM) -> None:
    report = load(llm, QUESTIONS, Settings((1, 4), requests=3, max_tokens=20, repetitions=2), none(llm))
    assert [(row["concurrency"], row["requests"]) for row in report["levels"]] == [(1, 16), (4, 24)]
    for row in report["levels"]:
        plain, drafted = row["plain"], row["drafted"]
        assert row["speedup"] == pytest.approx(drafted["tokens_per_second"] / plain["tokens_per_second"])
        assert drafted["E"] > 1 and 0 < drafted["alpha"] < 1 and row["identical"]
        assert drafted["estimated_speedup"] > 0 and 0 < drafted["wasted_share"] < 1
        for engine in (plain, drafted):
            assert 0 < engine["ttft_ms_p50"] <= engine["ttft_ms_p99"]
            assert 0 < engine["tpot_ms_p50"] <= engine["tpot_ms_p99"]
    one = report["levels"][0]
    # alone, the time is that of the requests, one after the other
    seconds = one["tokens"] / one["plain"]["tokens_per_second"]
    each = one["plain"]["ttft_ms_p50"] + 19 * one["plain"]["tpot_ms_p50"]
    assert 0.2 * seconds < 16 * each / 1000 < 5 * seconds


def test_a_draft_comes_from_the_requests_own_text(tmp_path: Path) -> None:
    """A drafter with a memory would have seen most of the other requests' text."""
    llm = LLM(write_tiny(tmp_path / "tiny"), "suffix", draft_tokens=4, max_batch=2, max_context=400)
    settings = Settings((2,), max_tokens=24)
    report = load(llm, QUESTIONS[:1], settings, none(llm))
    alone = []
    for number, prompt in enumerate(fitted(llm, distinct(QUESTIONS[:1], 8))):
        afresh(llm)
        alone.append(llm.generate(prompt, settings.sampling(number, None))[0].stats)
    assert report["levels"][0]["drafted"]["E"] == Stats.pooled(alone).tokens_per_round


def test_other_tokens_are_noticed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    look = _Timed.look

    def forged(self: _Timed, request: Request, now: float) -> None:
        look(self, request, now)
        if request.seq.sampling.draft_tokens is None and request.finish_reason:
            self.answer.token_ids[1] += 1  # type: ignore[index]

    monkeypatch.setattr(_Timed, "look", forged)
    assert not load(llm, QUESTIONS, Settings((2,), max_tokens=6), none(llm))["levels"][0]["identical"]


def test_times_of_a_request() -> None:
    seq = Seq(0, [5, 6], 2, Sampling(), 0)
    request = Request(seq, None, 100)
    timed = _Timed()
    timed.started = 10.0
    for tokens, now in (([], 11.0), ([7, 8], 12.5), ([], 13.0), ([9], 14.5)):
        seq.tokens += tokens
        timed.look(request, now)
    answer = timed.answer
    assert (answer.token_ids, answer.first, answer.first_s, answer.last_s) == ([7, 8, 9], 2, 2.5, 4.5)
    assert answer.per_token_s == 2.0


def test_stopping_keeps_whole_levels(llm: LLM) -> None:
    steps = 0

    def stopping() -> bool:
        nonlocal steps
        steps += 1
        return steps > 150

    report = load(llm, QUESTIONS, Settings((1, 2, 4), max_tokens=8), none(llm), stopping=stopping)
    assert not report["complete"] and 1 <= len(report["levels"]) < 3 and not llm.engine.requests


def test_peers_get_the_same(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WORKER", Path(__file__).with_name("fake_worker.py"))
    monkeypatch.setenv("FAKE_PEER", "works")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "options.json"))
    monkeypatch.setattr(llm, "folder", tmp_path)
    settings = PeerSettings(("transformers", "vllm"))
    with Peers(settings, llm, str(write_tiny(tmp_path / "tiny")), "auto", 2) as found:
        report = load(llm, QUESTIONS, Settings((2, 4), max_tokens=9), found)
    assert json.loads((tmp_path / "options.json").read_text())["concurrency"] == 4
    assert "one request at a time" in report["peers"]["transformers"]["skipped"]
    for row in report["levels"]:
        there = row["peers"]["vllm"]
        assert row["peers"]["transformers"] is None
        assert there["tokens_per_second"] == row["tokens"] / 2.0 and there["tpot_ms_p99"] == 250
        assert there["drafted_ratio"] == pytest.approx(row["drafted"]["tokens_per_second"] / there["tokens_per_second"])


def test_command(tmp_path: Path) -> None:
    folder, page = write_tiny(tmp_path / "tiny"), tmp_path / "page.html"
    options = ("bench", "load", "-m", folder, "-n", 8, "--concurrency", "1,3", "--max-context", 1000)
    result = foretell(*options, "--html", page)
    assert result.exit_code == 0, result.stderr
    assert "at once" in result.stdout and "TPOT ms p50" in result.stdout
    assert page.read_text().count("<svg") == 2
    report: dict[str, Any] = json.loads(foretell(*options, "--json").stdout)
    assert [row["concurrency"] for row in report["levels"]] == [1, 3] and report["settings"]["max_tokens"] == 8


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Random weights say what no drafter guesses, and that is logged."""
    with caplog.at_level("ERROR", "foretell"):
        yield
