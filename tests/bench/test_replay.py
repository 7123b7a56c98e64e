"""A made-up trajectory, replayed: what counts as a turn, what is accepted, what a warm drafter knows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foretell import LLM, Sampling
from foretell.bench.replay import (
    CALL,
    TEXT,
    Player,
    Settings,
    Trajectory,
    Turn,
    agreeing,
    chosen,
    plain,
    replay,
    spread,
    trajectories,
    turns,
)  # fmt: skip
from foretell.drafters import SOURCES
from foretell.drafters.base import Drafter
from foretell.types import Drafts, Draw, Seen, Seq
from tests.cli.conftest import write_tiny
from tests.cli.run import foretell
from tests.conftest import ScriptedDrafter

CALLED = {"function": {"name": "get_user", "arguments": '{"id": "mia_7"}'}, "id": "call_1", "type": "function"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You sell trains."},
    {"role": "user", "content": "I am mia_7, when does my train leave?"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "name": "get_user", "content": '{"id": "mia_7", "train": "9:40"}'},
    {"role": "assistant", "content": "Your train leaves at 9:40."},
    {"role": "user", "content": "Thanks."},
]
RECORD = [
    {"task_id": 0, "traj": MESSAGES},
    {"task_id": 0, "traj": MESSAGES},
    {"task_id": 4, "traj": [*MESSAGES, {"role": "assistant", "content": "It was a pleasure to help you."}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "agent.json"
    path.write_text(json.dumps(RECORD))
    return path


def opened(folder: Path, drafter: str | Drafter) -> LLM:
    return LLM(folder, drafter, max_batch=1, max_context=100)


def test_tool_calls_are_json() -> None:
    line = '{"name": "get_user", "arguments": {"id": "mia_7"}}'
    assert plain(MESSAGES[2]) == {"role": "assistant", "content": line}
    both = {"role": "assistant", "content": "One moment.", "tool_calls": [CALLED, CALLED]}
    assert plain(both)["content"] == f"One moment.\n{line}\n{line}"
    odd = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "no json"}}]}
    assert plain(odd)["content"] == '{"name": "f", "arguments": "no json"}'


def test_turns_are_what_the_model_would_be_asked(folder: Path) -> None:
    llm = opened(folder, "none")
    text = llm.tokenizer
    assert text is not None
    call, answer = turns(llm, MESSAGES)
    assert (call.kind, answer.kind) == (CALL, TEXT)
    assert (
        text.decode(call.answer, skip_special=False) == '{"name": "get_user", "arguments": {"id": "mia_7"}}<|im_end|>'
    )
    asked = text.decode(answer.prompt, skip_special=False)
    assert asked.endswith('"train": "9:40"}<|im_end|>\n<|im_start|>assistant\n') and "You sell trains." in asked
    assert '"arguments": {"id": "mia_7"}}<|im_end|>' in asked
    [short, _] = turns(llm, MESSAGES, context=10)
    assert short.prompt == call.prompt[-10:] and short.answer == call.answer


def test_agreeing_is_the_longest_path() -> None:
    assert agreeing([], [], [5]) == []
    assert agreeing([5, 6, 7], [-1, 0, 1], [5, 6, 8]) == [0, 1]
    assert agreeing([9, 5, 6, 6, 7], [-1, -1, 0, 1, 3], [5, 6, 7, 8]) == [1, 3, 4]  # 6 below 9 does not count
    assert agreeing([5, 5, 6], [-1, -1, 1], [5, 6]) == [1, 2]  # twice the same sibling
    assert agreeing([5, 6, 7], [-1, 0, 1], [5, 6]) == [0, 1]  # no further than the recording


class Watched(ScriptedDrafter):
    """Proposes a script's tree and writes down what it is told."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.budgets: list[int] = []
        self.calls: list[tuple[str, int]] = []

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        self.budgets += budget
        return super().propose(seqs, budget, draw)

    def observe(self, seen: Seen) -> None:
        assert len(seen.logits) == 0 and seen.rows.want.numel() == 0 and len(seen.kept) == 1
        self.calls.append(("observe", len(seen.seqs[0].tokens)))

    def admit(self, seq: Seq) -> None:
        self.calls.append(("admit", len(seq.tokens)))

    def forget(self, seq: Seq) -> None:
        self.calls.append(("forget", len(seq.tokens)))


def test_rounds_are_those_of_an_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [7, 8, 9, 10, 11, 12]
    trees = {2: ([7, 8, 1], [-1, 0, 1]), 5: ([1], [-1]), 6: ([11, 12], [-1, 0])}
    drafter = Watched(lambda tokens, budget: trees[len(tokens)])
    player = Player(opened(folder, drafter), 4)
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    sample = player.play(Turn(TEXT, [3, 4], answer))
    stats = sample.stats
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted) == (3, 6, 4, 6)
    assert stats.accepted_by_depth == [2, 2, 0] and stats.drafted_by_depth == [3, 2, 1]
    assert stats.tokens_per_round == 2 and sample.rounds == 2 and sample.draft_s == 2  # not of the first
    assert drafter.budgets == [4, 4, 4]
    assert drafter.calls == [("admit", 2), ("observe", 5), ("observe", 6), ("observe", 8), ("forget", 8)]


def test_counters_are_the_engines(folder: Path) -> None:
    """With the target's own answer as the recording and a drafter that knows half of it, on a tree."""
    prompt = [ord(letter) for letter in "one two three"]
    tokens = opened(folder, "none").generate(prompt, Sampling(temperature=0, max_tokens=60))[0].token_ids
    last = max(range(len(tokens)), key=lambda i: (tokens[i] not in tokens[:i], i))  # a token said late and only once
    known = prompt + tokens[: last + 1]

    def script(text: list[int], budget: int) -> tuple[list[int], list[int]]:
        path = known[len(text) : len(text) + budget - 2]
        right = [(token + 1) % 256 if (len(text) + i) % 3 == 0 else token for i, token in enumerate(path)]
        return [65, 66, *right], [-1, 0, *([-1, *range(2, len(right) + 1)] if right else [])]

    sampling = Sampling(temperature=0, max_tokens=90, stop_token_ids=[tokens[last]])
    llm = LLM(folder, ScriptedDrafter(script), max_batch=1, max_context=200, draft_tokens=6)
    done = llm.generate(prompt, sampling)[0]
    assert done.finish_reason == "stop" and prompt + done.token_ids == known and done.stats.accepted > 10
    stats = Player(llm, 6).play(Turn(TEXT, prompt, done.token_ids)).stats
    counters = ("rounds", "drafted", "accepted", "emitted", "accepted_by_depth", "drafted_by_depth")
    assert [getattr(stats, name) for name in counters] == [getattr(done.stats, name) for name in counters]


def test_warm_is_more_than_cold(folder: Path, file: Path) -> None:
    settings = Settings(tasks=[4], warm=1, draft_tokens=6)
    result = replay(lambda name: opened(folder, name), ["suffix"], trajectories(file), settings)
    [entry] = result["drafters"]
    cold, warm = entry["cold"], entry["warm"]
    assert [(row["kind"], row["prompts"]) for row in cold["kinds"]] == [(CALL, 1), (TEXT, 2)]
    assert cold["all"]["tokens"] == warm["all"]["tokens"]
    assert warm["kinds"][0]["E"] > 1.5 * cold["kinds"][0]["E"] > 1.5  # the very same call was made before
    assert result["tasks"] == [4] and result["warm"] == 1


def test_every_state_starts_from_nothing(folder: Path, file: Path) -> None:
    """Cold figures do not depend on what was played before them."""
    found = trajectories(file)
    both, alone = (
        replay(lambda name: opened(folder, name), ["suffix"], found, Settings(tasks, 1, 6)) for tasks in ([4, 0], [0])
    )
    first = replay(lambda name: opened(folder, name), ["suffix"], found, Settings([4], 1, 6))
    rounds = [result["drafters"][0]["cold"]["all"]["rounds"] for result in (both, alone, first)]
    assert rounds[0] == rounds[1] + rounds[2]


def test_warming_takes_no_trajectory_of_the_same_task() -> None:
    found = [Trajectory(i // 4, [{"role": "user", "content": str(i)}]) for i in range(40)]
    plan = chosen(found, Settings([3], warm=6))
    [(measured, others)] = plan
    assert measured is found[12] and len(others) == 6 and all(other.task != 3 for other in others)
    assert [measured.task for measured, _ in chosen(found, Settings())] == [0, 2, 4, 6, 8]
    with pytest.raises(ValueError, match="no task 10"):
        chosen(found, Settings([10]))
    with pytest.raises(ValueError, match="no trajectories"):
        chosen([], Settings())
    assert spread([1, 2, 3], 5) == [1, 2, 3] and spread(list(range(10)), 3) == [0, 3, 6]


def test_command(folder: Path, file: Path) -> None:
    options = ("bench", "replay", file, "-m", folder, "--warm", 1, "--draft-tokens", 6)
    result = foretell(*options, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["tasks"] == [0, 4] and len(report["drafters"]) == len(SOURCES) + 1
    assert all(entry["warm"]["all"]["E"] >= 1 for entry in report["drafters"])
    text = foretell(*options, "--drafter", "suffix", "--task", 0).stdout
    assert "their last 8192 tokens" in text and "tool call" in text and "nodes/round" in text


def test_bad_settings(folder: Path, file: Path, tmp_path: Path) -> None:
    for drafter in ("model", "none", "suffix+model"):
        result = foretell("bench", "replay", file, "-m", folder, "--drafter", drafter)
        assert result.exit_code == 2 and "needs a model that runs" in result.stderr
    result = foretell("bench", "replay", file, "-m", folder, "--warm", 0)
    assert result.exit_code == 2 and "must be at least 1" in result.stderr
    wrong = tmp_path / "wrong.json"
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    for text in ("{", "{}", "[1]", '[{"task_id": 1}]', json.dumps([{"task_id": 1, "traj": calls}])):
        wrong.write_text(text)
        result = foretell("bench", "replay", wrong, "-m", folder)
        assert result.exit_code == 2 and "wrong.json" in result.stderr
    bare = write_tiny(tmp_path / "bare", tokenizer=False)
    assert "needs a model with a tokenizer" in foretell("bench", "replay", file, "-m", bare).stderr
