"""What `bench accept` reports: pooled from hand-made counters, then run on a tiny model."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from foretell import LLM
from foretell.bench.accept import Sample, Settings, accept, by_kind, figures
from foretell.bench.questions import Question, edits, mixed, of_kinds, own, spec_bench
from foretell.cli import accept as verb
from foretell.cli.terminal import Interrupt
from foretell.drafters.base import Drafter
from foretell.drafters.recycling import RecyclingSource
from foretell.drafters.search import SearchDrafter
from foretell.engine.stats import Stats
from foretell.types import Drafts, Draw, Seq
from tests.cli.conftest import write_tiny
from tests.cli.run import foretell

QUESTIONS = [Question("list", "one two three one two"), Question("text", "a cat"), Question("list", "four, four, four")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


def opened(folder: Path, drafter: str | Drafter) -> LLM:
    return LLM(folder, drafter, max_batch=1, max_context=400, draft_tokens=6)


def counted(*rounds: tuple[list[int], list[int]]) -> Stats:
    """Stats of rounds given as the tree's parents and the accepted path."""
    stats = Stats()
    for parents, accepted in rounds:
        stats.count_round(parents, accepted)
    stats.emitted = stats.accepted + stats.rounds
    return stats


def test_figures_divide_sums_by_sums() -> None:
    good = counted(([-1, 0, 1], [0, 1, 2]), ([-1, -1, 1], [1, 2]))  # 6 nodes, 5 accepted, depths 3 + 2 + 1
    bad = counted(([-1], []), ([], []), ([], []))
    samples = [
        Sample("a", good, rounds=1, draft_s=0.002, verify_s=0.010, rest_s=0.003),
        Sample("a", bad, rounds=2, draft_s=0.004, verify_s=0.050, rest_s=0.0),
    ]
    found = figures(samples)
    assert (found["prompts"], found["tokens"], found["rounds"]) == (2, 10, 5)
    assert found["E"] == 2 and found["alpha"] == 5 / 7 and found["nodes_per_round"] == 7 / 5
    assert found["drafted_by_depth"] == [4, 2, 1] and found["accepted_by_depth"] == [2, 2, 1]
    assert found["alpha_by_depth"] == [2 / 4, 2 / 2, 1 / 1]
    assert [found[name] for name in ("draft_ms", "verify_ms", "rest_ms")] == pytest.approx([2, 20, 1])
    assert found["identical"] and not figures([*samples, Sample("a", bad, difference=0)])["identical"]


def test_nothing_measured_is_nought() -> None:
    found = figures([Sample("a", Stats())])
    assert found["E"] == found["alpha"] == found["draft_ms"] == found["nodes_per_round"] == 0
    assert found["alpha_by_depth"] == []


def test_kinds_are_apart_and_together() -> None:
    one, two = counted(([-1], [0])), counted(([-1], []))
    found = by_kind([Sample("b", one), Sample("a", two), Sample("b", two)])
    assert [(row["kind"], row["E"]) for row in found["kinds"]] == [("b", 1.5), ("a", 1.0)]
    assert found["all"]["E"] == pytest.approx(4 / 3) and "kind" not in found["all"]


def test_accept_runs_every_drafter_on_every_prompt(folder: Path) -> None:
    told: list[tuple[int, int, str]] = []
    names = ["none", "ngram", "suffix+recycling"]
    result = accept(
        lambda name: opened(folder, name), names, QUESTIONS, Settings(max_tokens=30), lambda *line: told.append(line)
    )
    assert result["complete"] and [entry["drafter"] for entry in result["drafters"]] == names
    plain, *drafted = result["drafters"]
    assert plain["all"]["E"] == 1 and plain["all"]["nodes_per_round"] == 0
    for entry in drafted:
        assert [(row["kind"], row["prompts"]) for row in entry["kinds"]] == [("list", 2), ("text", 1)]
        assert entry["all"]["identical"] and entry["all"]["tokens"] == plain["all"]["tokens"]
        assert entry["all"]["E"] > 1 and entry["all"]["nodes_per_round"] > 0.5
        assert all(entry["all"][name] > 0 for name in ("draft_ms", "verify_ms", "rest_ms"))
    assert told[-1][:2] == (9, 9) and [line[0] for line in told] == sorted(line[0] for line in told)


class Forged(Drafter):
    """Changes the text behind the engine's back, which no drafter may do."""

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        for seq in seqs:
            seq.tokens[-1] = 65
        return Drafts.chains([[] for _ in seqs])


def test_other_tokens_are_noticed(folder: Path) -> None:
    drafters: dict[str, str | Drafter] = {"none": "none", "forged": Forged()}
    settings = Settings(max_tokens=12)
    result = accept(lambda name: opened(folder, drafters[name]), list(drafters), QUESTIONS, settings)
    assert [entry["all"]["identical"] for entry in result["drafters"]] == [True, False]


@pytest.mark.parametrize("carry", [False, True])
def test_a_drafter_learns_from_prompt_to_prompt_only_if_it_may(folder: Path, carry: bool) -> None:
    result = accept(
        lambda name: opened(folder, name), ["none", "recycling"], QUESTIONS[:1] * 2, Settings(24, carry=carry)
    )
    alone = accept(lambda name: opened(folder, name), ["none", "recycling"], QUESTIONS[:1], Settings(24))
    both, one = (found["drafters"][1]["all"] for found in (result, alone))
    assert one["tokens"] * 2 == both["tokens"]
    assert (both["rounds"] < 2 * one["rounds"]) == carry
    assert (both["rounds"] == 2 * one["rounds"]) != carry


def test_one_model_at_a_time(folder: Path) -> None:
    seen: list[weakref.ref[LLM]] = []

    def open_with(name: str) -> LLM:
        assert all(llm() is None for llm in seen), "the model before is still there"
        llm = opened(folder, name)
        seen.append(weakref.ref(llm))
        return llm

    gc.disable()
    try:
        accept(open_with, ["none", "ngram", "suffix"], QUESTIONS, Settings(max_tokens=4))
    finally:
        gc.enable()
    assert len(seen) == 3


def test_stopping_reports_what_is_there(folder: Path) -> None:
    answers: Iterator[bool] = iter([False] * 20)
    result = accept(
        lambda name: opened(folder, name),
        ["none", "ngram"],
        QUESTIONS,
        Settings(max_tokens=8),
        stopping=lambda: next(answers, True),
    )
    assert not result["complete"] and len(result["drafters"]) == 1
    assert result["drafters"][0]["all"]["prompts"] == 2


@pytest.mark.parametrize("steps", [0, 40])
def test_ctrl_c_prints_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    class Pressed(Interrupt):
        def __call__(self) -> bool:
            self.calls = getattr(self, "calls", 0) + 1
            return self.calls > steps

    monkeypatch.setattr(verb, "Interrupt", Pressed)
    result = foretell("bench", "accept", "-m", folder, "-n", 30, "--drafter", "ngram")
    assert result.exit_code == 130, result.stderr
    assert "stopped before the end" in result.stdout and ("question" in result.stdout) == (steps > 0)


def test_a_prompt_must_fit(folder: Path) -> None:
    with pytest.raises(ValueError, match="prompt 2, of kind 'long', has .* tokens"):
        accept(lambda name: opened(folder, name), ["none"], [QUESTIONS[0], Question("long", "x" * 500)], Settings())


def test_times_are_of_decoding_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round's drafting, which reads the prompt, is not in them."""
    rounds: list[int] = []
    ticks = iter(range(10**9))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    propose = SearchDrafter.propose

    def slow(self: SearchDrafter, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        rounds.append(sum(seq.rounds for seq in seqs))
        if rounds[-1] == 0:
            for _ in range(1000):
                next(ticks)
        return propose(self, seqs, budget, draw)

    monkeypatch.setattr(SearchDrafter, "propose", slow)
    result = accept(lambda name: opened(folder, name), ["none", "suffix"], QUESTIONS[:1], Settings(max_tokens=12))
    assert 0 in rounds and max(rounds) > 1
    assert result["drafters"][1]["all"]["draft_ms"] == pytest.approx(2000)  # a tick to draft, one to learn


def test_edits_are_whole_files_to_copy() -> None:
    found = edits()
    assert len(found) == 10 and {question.kind for question in found} == {"edit"}
    assert len({question.text for question in found}) == 10
    for question in found:
        code = question.text.split("```")[1]
        assert 30 <= len(code.splitlines()) <= 62, question.text


def test_spec_bench_takes_categories_in_turn(tmp_path: Path) -> None:
    lines = [{"category": c, "turns": [f"{c} {i}", "and then?"]} for i in range(3) for c in ("math", "coding", "rag")]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [(q.kind, q.text) for q in spec_bench(path, 3)] == [
        ("mt_bench", "math 0"), ("mt_bench", "coding 0"), ("mt_bench", "math 1"),
        ("rag", "rag 0"), ("rag", "rag 1"), ("rag", "rag 2"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="per-kind must be at least 1"):
        spec_bench(path, 0)
    path.write_text('{"category": "math"}')
    with pytest.raises(ValueError, match='line 1: a question needs a "category" and "turns"'):
        spec_bench(path, 1)


def test_own_prompts(tmp_path: Path) -> None:
    text, lines = tmp_path / "mine.txt", tmp_path / "mine.jsonl"
    text.write_text("first one\n\nsecond\n")
    assert own(text) == [Question("mine", "first one"), Question("mine", "second")]
    lines.write_text('{"kind": "k", "prompt": "p\\nq"}\n{"prompt": "r"}\n')
    assert own(lines) == [Question("k", "p\nq"), Question("mine", "r")]
    assert of_kinds(own(lines), ["mine"]) == [Question("mine", "r")]
    for wrong, reason in (("{", "line 1 is not valid JSON"), ("[]", "must hold a JSON object"), ("{}", "a text")):
        lines.write_text(wrong)
        with pytest.raises(ValueError, match=reason):
            own(lines)
    with pytest.raises(ValueError, match="no kind of prompt 'poem' here: choose from question, story"):
        of_kinds(mixed(), ["poem"])
    with pytest.raises(ValueError, match="no prompts"):
        of_kinds([], [])


def test_by_default_all_that_need_no_draft_model() -> None:
    assert {"ngram", "suffix", "recycling", "suffix+recycling+ngram"} <= set(verb.training_free())
    assert not {"none", "auto", "model"} & set(verb.training_free())


def test_command(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("\n".join(json.dumps({"kind": q.kind, "prompt": q.text}) for q in QUESTIONS))
    options = ("bench", "accept", "-m", folder, "--prompts", prompts, "-n", 16, "--draft-tokens", 5)
    result = foretell(*options, "--drafter", "ngram", "--drafter", "suffix+recycling", "--kind", "list", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [entry["drafter"] for entry in report["drafters"]] == ["none", "ngram", "suffix+recycling"]
    assert [row["kind"] for row in report["drafters"][1]["kinds"]] == ["list"]
    assert report["draft_tokens"] == "5" and report["settings"]["max_tokens"] == 16 and report["complete"]
    text = foretell(*options, "--drafter", "ngram").stdout
    assert (
        "verify ms" in text and "alpha at depth" in text and "tokens identical to those of plain decoding: yes" in text
    )
    drafted = foretell(*options, "--drafter", "ngram", "--drafter", "model", "--draft-model", folder, "--json")
    assert drafted.exit_code == 0, drafted.stderr
    assert json.loads(drafted.stdout)["drafters"][2]["all"]["alpha"] > 0.9  # the model itself


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--drafter", "guess"], "drafter 'guess' is not one of"),
        (["--drafter", "model"], "needs draft_model"),
        (["--draft-model", "x"], "none of these drafters has a use for --draft-model"),
        (["--set", "x"], "no set of prompts 'x'"),
        (["--questions", "/nowhere.jsonl"], "cannot be read"),
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_settings(folder: Path, options: list[str], reason: str) -> None:
    result = foretell("bench", "accept", "-m", folder, *options)
    assert result.exit_code == 2 and reason in result.stderr


def test_tokens_that_differ_are_a_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecyclingSource, "observe", lambda self, seen: _forge(seen.seqs))
    result = foretell("bench", "accept", "-m", folder, "-n", 8, "--kind", "list", "--drafter", "recycling")
    assert result.exit_code == 1 and "the tokens differ" in result.stderr
    assert "NO, not with recycling (list)" in result.stdout


def _forge(seqs: Sequence[Seq]) -> None:
    for seq in seqs:
        seq.tokens[-1] = 65
