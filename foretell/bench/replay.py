"""Drafting what an agent said: recorded conversations played again, with the recording in the target's place.

For every assistant message of a trajectory the prompt is the conversation before it, and the answer to draft for is the
message as it was recorded, tool calls as JSON. A round proposes as in the engine; the longest path of the tree that
agrees with the recording is accepted, and the recording's next token comes on top. No target is run: a drafter sees
which tokens came and no logits, so only those that learn from texts can show all they have.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from foretell.bench.accept import Sample, by_kind
from foretell.engine.llm import LLM
from foretell.engine.stats import Stats
from foretell.models.files import read_text
from foretell.types import Rows, Sampling, Seen, Seq

CONTEXT = 8192  # the last tokens of a prompt that are kept
TASKS = 5  # measured where none is named, spread over the file
TEXT, CALL = "text", "tool call"

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """tasks: empty is some, spread over the file. warm: trajectories of other tasks that go before, and with same_task
    other runs of the same one after them. draft_tokens: nodes of a round, None: as many as it may have. ValueError
    if they cannot be met."""

    tasks: Sequence[int] = ()
    warm: int = 8
    draft_tokens: int | None = None
    same_task: bool = False

    def __post_init__(self) -> None:
        if self.warm < 1 or (self.draft_tokens is not None and self.draft_tokens < 1):
            raise ValueError("warm and draft-tokens must be at least 1")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One conversation; several may be of the same task, and then they are much alike."""

    task: int
    messages: Messages


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant message of a kind and the conversation before it, as tokens."""

    kind: str
    prompt: list[int]
    answer: list[int]


def trajectories(path: Path) -> list[Trajectory]:
    """tau-bench's form: a list of {"task_id": ..., "traj": [messages as in the OpenAI API]}."""
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    found = []
    for entry in value if isinstance(value, list) else [value]:
        task, messages = (entry.get("task_id"), entry.get("traj")) if isinstance(entry, dict) else (None, None)
        if not isinstance(task, int) or not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ValueError(f'{path} must hold a list of objects with "task_id", a number, and "traj", messages')
        found.append(Trajectory(task, messages))
    return found


def _is_message(value: Any) -> bool:
    """Whether `plain` can read it."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    calls = value.get("tool_calls") or ()
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    named = all(isinstance(f, dict) and isinstance(f.get("name"), str) and "arguments" in f for f in functions)
    return named and isinstance(value.get("content"), str | None)


def plain(message: Mapping[str, Any]) -> dict[str, str]:
    """A message as role and text; each tool call is a line of JSON with its name and arguments."""
    lines = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        lines.append(json.dumps({"name": function["name"], "arguments": _arguments(function)}, ensure_ascii=False))
    return {"role": message["role"], "content": "\n".join(lines)}


def _arguments(function: Mapping[str, Any]) -> Any:
    """An object where the recording has the text of one."""
    try:
        return json.loads(function["arguments"])
    except (json.JSONDecodeError, TypeError):
        return function["arguments"]


def turns(llm: LLM, messages: Messages, context: int = CONTEXT) -> Iterator[Turn]:
    """Every assistant message that follows a user's, each ended by the token that the template ends turns with."""
    text = llm.tokenizer
    if text is None or text.template is None:
        raise ValueError("a replay needs a model with a tokenizer and a chat template")
    said = [plain(message) for message in messages]
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:
            continue
        prompt = text.chat(said[:i])
        end = [token for token in reversed(prompt) if token in llm.target.stop_ids][:1]
        answer = text.tokenizer.encode(said[i]["content"], add_special_tokens=False).ids + end
        if answer:
            yield Turn(CALL if message.get("tool_calls") else TEXT, prompt[-context:], answer)


def agreeing(tokens: Sequence[int], parents: Sequence[int], answer: Sequence[int]) -> list[int]:
    """The nodes of the longest path of the tree, from the root, whose tokens are the next of the answer."""
    paths: dict[int, list[int]] = {-1: []}  # to the nodes whose path agrees
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        path = paths.get(parent)
        if path is not None and len(path) < len(answer) and token == answer[len(path)]:
            paths[node] = [*path, node]
    return max(paths.values(), key=len)


class Player:
    """Drives the drafter of an `LLM` whose own engine stands still. draft_tokens: nodes of every round."""

    def __init__(self, llm: LLM, draft_tokens: int) -> None:
        self._drafter, self._draw = llm.drafter, llm.engine.rule.draw
        self._nothing = torch.empty(0, llm.target.vocab_size)
        self._draft_tokens = draft_tokens
        self._count = 0

    def play(self, turn: Turn) -> Sample:
        """All rounds of one answer."""
        self._count += 1
        seq = Seq(self._count, list(turn.prompt), len(turn.prompt), Sampling(temperature=0), 0)
        seq.cached = len(seq.tokens) - 1
        stats, drafting = Stats(), 0.0
        self._drafter.admit(seq)
        while seq.generated < len(turn.answer):
            started = time.perf_counter()
            drafts = self._drafter.propose([seq], [self._draft_tokens], self._draw)
            [(tokens, parents)] = drafts.judged().trees()
            drafting += time.perf_counter() - started if seq.rounds else 0.0
            left = turn.answer[seq.generated :]
            accepted = agreeing(tokens, parents, left)
            seq.tokens += left[: len(accepted) + 1]
            seq.cached, seq.rounds = len(seq.tokens) - 1, seq.rounds + 1
            stats.count_round(parents, accepted)
            self._drafter.observe(
                Seen([seq], Rows.of(seq, [], [], []), [[]], {}, self._nothing, [range(0)], [range(0)])
            )
        stats.emitted = seq.generated
        self._drafter.forget(seq)
        return Sample(turn.kind, stats, seq.rounds - 1, draft_s=drafting)


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of them at equal distances, in their order."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def chosen(found: Sequence[Trajectory], settings: Settings) -> list[tuple[Trajectory, list[Trajectory]]]:
    """What is measured, the first trajectory of each task asked for, with the trajectories that go before it when the
    drafter is to be warm."""
    first = {trajectory.task: trajectory for trajectory in reversed(found)}
    unknown = next((task for task in settings.tasks if task not in first), None)
    if unknown is not None or not first:
        raise ValueError(f"there is no task {unknown} in the file" if first else "the file has no trajectories")
    tasks = list(dict.fromkeys(settings.tasks)) or spread(sorted(first), TASKS)
    plan = []
    for task in tasks:
        others = spread([t for t in found if t.task != task], settings.warm)
        again = [t for t in found if t.task == task and t is not first[task]] if settings.same_task else []
        plan.append((first[task], [*others, *again]))
    return plan


def replay(
    open_with: Callable[[str], LLM],
    names: Sequence[str],
    found: Sequence[Trajectory],
    settings: Settings,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """The report, ready for JSON. cold: a drafter knows no other trajectory; warm: it drafted for those that go before.
    open_with: the model with the drafter of that name; only one is open at a time."""
    plan = chosen(found, settings)
    read: dict[int, list[Turn]] = {}  # by id of the trajectory
    drafters, done, total = [], 0, len(names) * sum(2 + len(before) for _, before in plan)
    for name in names:
        llm = open_with(name)
        player = Player(llm, settings.draft_tokens or llm.drafter.draft_tokens)
        samples: dict[str, list[Sample]] = {"cold": [], "warm": []}
        for state, into in samples.items():
            for measured, others in plan:
                llm.drafter.reset()
                for trajectory in [*(others if state == "warm" else ()), measured]:
                    if id(trajectory) not in read:
                        read[id(trajectory)] = list(turns(llm, trajectory.messages))
                    played = [player.play(turn) for turn in read[id(trajectory)]]
                    done += 1
                    progress(done, total, f"{name}, {state}: task {measured.task}")
                into += played
        drafters.append({"drafter": name, **{state: by_kind(of) for state, of in samples.items()}})
        del llm, player
        gc.collect()  # as in `accept`
    return {
        "tasks": [measured.task for measured, _ in plan],
        "warm": settings.warm,
        "same_task": settings.same_task,
        "context": CONTEXT,
        "drafters": drafters,
    }
