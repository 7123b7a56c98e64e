"""The measurements, on a tiny model: what they report is consistent; how fast it is is not tested."""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell import LLM, Sampling, kernels
from foretell.bench.compare import compare, first_difference
from foretell.bench.decode import Settings as DecodeSettings
from foretell.bench.decode import decode
from foretell.bench.forward import Settings as ForwardSettings
from foretell.bench.forward import forward, forward_times, timed
from foretell.bench.peers import Peers
from foretell.bench.peers import Settings as PeerSettings
from foretell.bench.prompts import PROMPTS, encoded
from foretell.bench.questions import Question
from foretell.bench.run import Run, afresh, warm_up
from foretell.bench.timing import Answer, Speed, figures, quantile
from foretell.cli.terminal import Interrupt
from foretell.engine.request import Completion
from foretell.models.llama import LlamaModel
from foretell.models.load import tensor_shapes
from foretell.models.native import NativeOps
from foretell.types import Rows
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


def test_forward_times_leave_the_cache_as_it_was(llm: LLM) -> None:
    warm_up(llm)
    available = llm.engine.cache.available
    times = forward_times(llm, [(1, None), (4, None)], context=300, repetitions=2)
    assert times.keys() == {(1, None), (4, None)}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())
    assert llm.engine.cache.available == available
    llm.engine.cache.check()


def test_forward_reads_the_weights_between_any_two(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[object] = []
    run, read = LlamaModel.forward, NativeOps.stream

    def forwards(self: LlamaModel, rows: Rows, *rest: Any, **named: Any) -> Any:
        did.append(len(rows.tokens))
        return run(self, rows, *rest, **named)

    def streams(self: NativeOps, weights: Sequence[object]) -> int:
        did.append("read")
        return read(self, weights)

    monkeypatch.setattr(LlamaModel, "forward", forwards)
    monkeypatch.setattr(NativeOps, "stream", streams)
    report = forward(llm, ForwardSettings((1, 5), 40, 3))
    assert did[did.index("read") :] == ["read", 1, "read", 5] * 4  # the first of them warms up
    assert report["complete"] and [row["rows"] for row in report["rows"]] == [1, 5]
    for row in report["rows"]:
        assert row["times_streaming"] == pytest.approx(row["ms"] / report["streaming_ms"])
        assert row["times_one_row"] == pytest.approx(row["ms"] / report["rows"][0]["ms"])
    config = llm.target.config  # type: ignore[attr-defined]
    matrices = {name: shape for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    assert report["streaming_bytes"] >= 4 * sum(map(math.prod, matrices.values()))  # the head is the embedding
    llm.engine.cache.check()


def test_forward_stops_when_asked(llm: LLM) -> None:
    asked = iter([False, False, True])
    report = forward(llm, ForwardSettings((1,), 40, 9), stopping=lambda: next(asked))
    assert not report["complete"] and report["repetitions"] == 2
    report = forward(llm, ForwardSettings((2,), 40, 9), stopping=lambda: True)
    assert report["rows"] == [] and report["repetitions"] == 0


@pytest.mark.parametrize("at", [0, 1, 127, 128, 131071, 131072, 131199, 200000, 200001])
def test_streaming_reads_every_byte(at: int) -> None:
    library = kernels.library()
    if library is None:
        pytest.skip("there is no compiler here")
    pool = library.ft_pool_new(2)
    parts = [np.zeros(200002, dtype=np.uint8), np.zeros(3, dtype=np.uint8)]
    data = (ctypes.c_void_p * 2)(*[part.ctypes.data for part in parts])
    sizes = (ctypes.c_int64 * 2)(*[part.nbytes for part in parts])
    assert library.ft_stream(pool, data, sizes, 2) == 0
    parts[0][at] = 1
    assert library.ft_stream(pool, data, sizes, 2) != 0
    parts[0][at], parts[1][2] = 0, 1
    assert library.ft_stream(pool, data, sizes, 2) == 1
    library.ft_pool_free(pool)


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


def test_afresh_computes_a_prompt_anew(llm: LLM) -> None:
    prompt = list(range(40))
    for fresh, cached in ((True, 0), (False, 32), (True, 0)):
        if fresh:
            afresh(llm)
        run = Run(llm, prompt, Sampling(max_tokens=2))
        run.finish()
        assert run.request.stats.cached_tokens == cached
        llm.engine.cache.check()


def test_an_answer_is_a_run_in_other_terms(llm: LLM) -> None:
    run = Run(llm, [1, 2, 3] * 5, Sampling(temperature=0, max_tokens=30))
    completion = run.finish()
    answer = run.answer
    assert answer.token_ids == completion.token_ids and answer.first + run.decoded == len(completion.token_ids)
    assert answer.per_token_s == pytest.approx(1 / run.tokens_per_second)
    assert answer.first_s == run.prefill_s


def test_speeds_weigh_prompts_by_their_tokens() -> None:
    slow = [Answer([1] * 11, 1, 0.2, 0.2 + 10 * t) for t in (0.5, 0.3, 0.4)]  # median 0.4 s a token
    fast = [Answer([1] * 33, 3, 0.1, 0.1 + 30 * 0.1)]
    lone = [Answer([1], 1, 0.3, 0.3)]
    found = figures([Speed.of(answers) for answers in (slow, fast, lone)])
    assert found["ttft_ms"] == pytest.approx(200) and found["tpot_ms"] == pytest.approx(250)
    assert found["tokens_per_second"] == pytest.approx(44 / (11 * 0.4 + 33 * 0.1))
    assert figures([]) == figures([Speed.of(lone)]) | {"ttft_ms": 0.0} == {
        "ttft_ms": 0.0, "tpot_ms": 0.0, "tokens_per_second": 0.0,
    }  # fmt: skip


def test_quantiles() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert quantile([3.0], 0.99) == 3 and quantile([], 0.5) == 0


def test_decode(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    options = ("-m", folder, "-n", 24, "--repetitions", 2, "--kind", "code", "--kind", "edit")
    result = foretell("bench", "decode", *options, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["complete"] and [row["kind"] for row in report["kinds"]] == ["code", "edit"]
    total = report["all"]
    assert total["identical"] and total["tokens"] == 48 and total["prompts"] == 2 and total["peers"] == {}
    for row in [*report["kinds"], total]:
        plain, drafted = (row[engine]["tokens_per_second"] for engine in ("plain", "drafted"))
        assert row["speedup"] == pytest.approx(drafted / plain)
        assert all(row[engine][name] > 0 for engine in ("plain", "drafted") for name in ("ttft_ms", "tpot_ms"))
        assert row["E"] >= 1 and row["estimated_speedup"] > 0 and 0 <= row["wasted_share"] < 1
    assert all(0 < share < 1 for share in report["outside_forward"].values())
    page = tmp_path / "page.html"
    text = foretell("bench", "decode", *options, "--html", page).stdout
    assert re.search(r"speed-up +estimated +wasted +E ", text) and ">estimated</th>" in page.read_text()
    assert "plain tok/s" in text and "drafted TTFT" in text and "Outside the model's forward" in text


def test_plain_and_drafted_take_turns(llm: LLM) -> None:
    seen: list[int | None] = []
    submit = llm.submit
    llm.submit = lambda p, s: (seen.append(s.draft_tokens), submit(p, s))[1]  # type: ignore[method-assign]
    try:
        questions = [Question("a", "one"), Question("b", "two")]
        decode(llm, questions, DecodeSettings(4, repetitions=2), Peers(PeerSettings(), llm, "", "auto", 1))
    finally:
        del llm.submit  # type: ignore[method-assign]
    assert seen[2:] == [0, None, 0, None, None, 0, None, 0]  # after warming up


def test_forged_tokens_fail(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path / "tiny")
    finish = Run.finish

    def forged(self: Run) -> Completion:
        completion = finish(self)
        if self.request.seq.sampling.draft_tokens is None:
            completion.token_ids[2] += 1
        return completion

    monkeypatch.setattr(Run, "finish", forged)
    monkeypatch.setattr(
        Run, "completion", property(lambda self: self.__dict__.setdefault("kept", self.request.completion()))
    )
    result = foretell("bench", "decode", "-m", folder, "-n", 8, "--repetitions", 1, "--kind", "list")
    assert result.exit_code == 1 and "the tokens differ" in result.stderr and "NO" in result.stdout


@pytest.mark.parametrize("steps", [0, 40])
@pytest.mark.parametrize("name", ["decode", "load"])
def test_ctrl_c_prints_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, steps: int) -> None:
    class Pressed(Interrupt):
        def __call__(self) -> bool:
            self.calls = getattr(self, "calls", 0) + 1
            return self.calls > steps

    monkeypatch.setattr("foretell.cli.peers.Interrupt", Pressed)
    options = ("-m", write_tiny(tmp_path / "tiny"), "-n", 4, "--set", "edits", "--drafter", "ngram")
    page = tmp_path / "page.html"
    result = foretell("bench", name, *options, *(("--concurrency", "16,32") if name == "load" else ()), "--html", page)
    assert result.exit_code == 130, result.stderr
    assert "stopped before the end" in result.stdout and "stopped before the end" in page.read_text()
    report = json.loads(foretell("bench", name, *options, "--json").stdout)
    assert not report["complete"]
    if name == "decode":
        assert bool(report["kinds"]) == (steps > 0)


def test_bad_settings(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    for options, reason in (
        (("decode", "--repetitions", 0), "repetitions must be at least 1"),
        (("decode", "--peers", "nothing"), "no peer 'nothing'"),
        (("decode", "--peers", "vllm", "--temperature", 1), "peers decode greedily"),
        (("decode", "--html", tmp_path), "--html takes a file in a folder that there is"),
        (("decode", "--html", tmp_path / "no" / "page.html"), "--html takes a file in a folder that there is"),
        (("decode", "--max-context", 20), "leave it out or raise max_context"),
        (("load", "--concurrency", "1,x"), "--concurrency takes whole numbers with commas between them"),
        (("load", "--concurrency", "4,4"), "each once"),
        (("load", "--concurrency", "0"), "at least 1"),
        (("load", "--requests", 0), "requests must be at least 1"),
        (("load", "--peers", "vllm", "--temperature", 1), "peers decode greedily"),
        (("forward", "--rows", "0,1"), "rows must be whole numbers of at least 1"),
        (("forward", "--rows", ""), "--rows takes whole numbers"),
        (("forward", "--context", 0), "context must be at least 1"),
        (("forward", "--context", 5000), "context 5000 is too long"),
        (("forward", "--repetitions", 0), "repetitions must be at least 1"),
    ):
        result = foretell("bench", options[0], "-m", folder, *options[1:])
        assert result.exit_code == 2 and reason in result.stderr, (options, result.stderr, result.exception)
        assert result.stdout == "" and result.stderr.count("\n") == 1


def test_forward_on_the_command_line(tmp_path: Path) -> None:
    options = ("bench", "forward", "-m", write_tiny(tmp_path / "tiny"), "--rows", "1,3", "--repetitions", 2)
    report = json.loads(foretell(*options, "--json").stdout)
    assert [row["rows"] for row in report["rows"]] == [1, 3] and report["context"] == 300
    text = foretell(*options).stdout
    assert "times streaming" in text and "streaming: " in text
    text = foretell(*options, "--dtype", "float64").stdout  # PyTorch's operations, which pack nothing
    assert "times one row" in text and "streaming: " not in text
