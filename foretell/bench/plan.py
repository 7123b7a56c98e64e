"""What `planner.offline` needs of a model on this machine: how much of what a drafter guesses is accepted, by budget,
and what forwards and drafting take. The budgets take turns on each prompt of one run. How forwards differ by their rows
is measured as the engine does it for its controller; how long they take within the engine is told by those of that run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.bench.accept import Progress
from foretell.bench.forward import TimedTarget, running
from foretell.bench.prompts import ids_of
from foretell.bench.questions import Question
from foretell.bench.run import Run, afresh, plain_if, warm_up
from foretell.engine.llm import LLM
from foretell.engine.measure import measure as costs_now
from foretell.engine.stats import Stats
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.planner.cost import Costs, interpolated
from foretell.planner.offline import Acceptance, Counted, measured
from foretell.types import Output, Rows, Sampling

LONGEST = 15  # nodes, unless the user asks for another number
FEWEST = 2  # nodes of the smallest budget that is run at most, and the next is about three times as large
TOGETHER = 8  # requests at once, to see how the rest of a round grows with them
STEPS = 12  # rounds of these


@dataclass(frozen=True, slots=True)
class Settings:
    """longest: nodes of the largest budget. ValueError if they cannot be met."""

    longest: int = LONGEST
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise ValueError("draft-tokens must be at least 1: a plan compares lengths up to it with plain decoding")
        self.sampling(0, 0)

    def sampling(self, number: int, budget: int, **more: Any) -> Sampling:
        """Of the prompt of that number."""
        fields = {"temperature": self.temperature, "seed": self.seed + number, "max_tokens": self.max_tokens, **more}
        return Sampling(**fields, draft_tokens=budget)

    def budgets(self) -> list[int]:
        """Those that are run besides plain decoding."""
        found = [self.longest]
        while found[0] > FEWEST:
            found.insert(0, round(found[0] / 3))
        return found


class Watched(TimedTarget):
    """A target that keeps of every forward its rows, and how many tokens these attend to."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.seen: list[tuple[int, int]] = []

    def forward(
        self, rows: Rows, cache: Cache, *, taps: Collection[int] = (), layers: Sequence[int] | None = None
    ) -> Output:
        self.seen.append((len(rows.tokens), int(rows.positions.sum()) + len(rows.tokens)))
        return super().forward(rows, cache, taps=taps, layers=layers)


@dataclass(slots=True)
class Rounds:
    """Rounds of decoding with one budget, on one prompt after the other. forward, beside: seconds of a round in the
    target's forward and beside it, of each prompt's run; slow: seconds of its forwards for one of the table; decode_s:
    of all rounds; sizes: rounds by their nodes."""

    budget: int
    parts: list[Stats] = field(default_factory=list)
    count: int = 0
    tokens: int = 0
    decode_s: float = 0.0
    attended: int = 0
    forward: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    slow: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, run: Run, forwards: Sequence[tuple[int, int]], table: Costs) -> None:
        """forwards: rows and attended tokens of those of its rounds of decoding. table: what they cost."""
        self.parts.append(run.request.stats)
        self.count += len(forwards)
        self.tokens += run.decoded
        self.decode_s += run.decode_s
        self.forward.append(run.metered / len(forwards))
        self.beside.append((run.decode_s - run.metered) / len(forwards))
        self.slow.append(run.metered / sum(table.forward(rows, attended / rows) for rows, attended in forwards))
        for rows, attended in forwards:
            self.attended += attended
            self.sizes += [0] * (rows - len(self.sizes))
            self.sizes[rows - 1] += 1

    @property
    def nodes(self) -> float:
        """Of a round, on average."""
        return sum(n * count for n, count in enumerate(self.sizes)) / self.count

    def counted(self) -> Counted:
        accepted = Stats.pooled(self.parts).accepted_by_node
        return Counted(self.budget, self.count, self.tokens, accepted, self.sizes)


@dataclass(slots=True)
class Measured:
    """All of it. table: as the engine has one; beside: seconds of a round beside its forward, by requests and nodes for
    each; complete: all prompts were run."""

    runs: list[Rounds]  # plain decoding first
    table: Costs
    beside: dict[float, dict[float, float]]
    complete: bool

    @property
    def context(self) -> float:
        """Tokens that a row attends to, on average."""
        return self.runs[0].attended / self.runs[0].count

    def acceptance(self) -> Acceptance:
        return measured([run.counted() for run in self.runs if run.budget])

    def costs(self) -> Costs:
        """The table, on the machine as it was in these rounds. Budgets are held against plain decoding prompt by
        prompt: what else the machine did then fell on both."""
        plain = self.runs[0].slow
        one = statistics.median(plain)
        factors = {}
        for run in self.runs:
            beside_plain = (mine / theirs for mine, theirs in zip(run.slow, plain, strict=True))
            factors[1 + run.nodes] = one * statistics.median(beside_plain)
        return self.table.scaled(factors)

    def beside_s(self, nodes: float, requests: float) -> float:
        """See `offline.Beside`: straight lines between what was measured, the last ones going on beyond it."""
        return _line({count: _line(points, nodes / requests) for count, points in self.beside.items()}, requests)

    def speedup(self, run: Rounds) -> float:
        """As it was in these rounds."""
        plain = self.runs[0]
        return (plain.decode_s / plain.tokens) / (run.decode_s / run.tokens)


def measure(
    llm: LLM,
    questions: Sequence[Question],
    settings: Settings,
    progress: Progress = lambda done, total, what: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Measured | None:
    """llm: with room for `TOGETHER` requests and `settings.longest` draft nodes. Once `stopping` says True, only the
    prompts that are through count; None if none is."""
    prompts = [ids_of(llm, question.text) for question in questions]
    largest = max(map(len, prompts))
    if largest + settings.max_tokens > llm.max_context:
        raise ValueError(
            f"a prompt of {largest} tokens and {settings.max_tokens} of answer do not fit the context of "
            f"{llm.max_context}: lower max_tokens or leave the prompt out"
        )
    runs = [Rounds(budget) for budget in (0, *settings.budgets())]
    total = len(runs) * len(prompts) + 1
    progress(0, total, "forwards by their rows")
    table = measured_costs(llm)
    warm_up(llm)
    with running(llm, Watched(llm.engine.target)) as target:
        for number, (question, prompt) in enumerate(zip(questions, prompts, strict=True)):
            turn = []
            for i in range(len(runs)):
                into = runs[(i + number) % len(runs)]  # none of them always comes first
                progress(number * len(runs) + i, total, f"{question.kind}, {into.budget} draft tokens")
                turn.append((into, *_run(llm, target, prompt, settings.sampling(number, into.budget), stopping)))
            if stopping():
                break
            if all(forwards for *_, forwards in turn):  # else it was over before it could be timed
                for into, run, forwards in turn:
                    into.add(run, forwards, table)
        if not runs[0].count:
            return None
        progress(total - 1, total, f"{TOGETHER} requests at once")
        few = min(FEWEST, settings.longest)
        beside: dict[float, dict[float, float]] = {1: {run.nodes: statistics.median(run.beside) for run in runs}}
        beside[TOGETHER] = {}
        for budget in (0, few):
            with plain_if(llm, budget == 0):
                nodes, seconds = _together(llm, target, prompts, settings.sampling(0, budget))
            beside[TOGETHER][nodes] = seconds
    return Measured(runs, table, beside, not stopping())


def measured_costs(llm: LLM) -> Costs:
    """The engine's own table, measured anew: what it goes by may be from another day. No request may be running."""
    afresh(llm)
    try:
        return costs_now(llm.target)
    finally:
        llm.target.attach(llm.engine.cache, "target")


def _run(
    llm: LLM, target: Watched, prompt: list[int], sampling: Sampling, stopping: Callable[[], bool]
) -> tuple[Run, list[tuple[int, int]]]:
    """A run, and rows and attended tokens of its rounds after the first, which has the prompt in it."""
    afresh(llm)
    target.seen.clear()
    with plain_if(llm, sampling.draft_tokens == 0):
        run = Run(llm, prompt, sampling, stopping=stopping, meter=lambda: target.seconds)
        run.finish()
    rounds = max(0, run.request.stats.rounds - 1)
    return run, target.seen[len(target.seen) - rounds :]


def _together(llm: LLM, target: Watched, prompts: Sequence[list[int]], sampling: Sampling) -> tuple[float, float]:
    """Of `TOGETHER` requests at once: nodes for each, and seconds of a round beside its forward."""
    afresh(llm)
    longest = STEPS * (2 + (sampling.draft_tokens or 0))
    asked = replace(sampling, ignore_eos=True, max_tokens=min(longest, llm.max_context - max(map(len, prompts))))
    requests = [llm.submit(prompts[i % len(prompts)], asked) for i in range(TOGETHER)]
    beside: list[float] = []
    nodes: list[float] = []
    try:
        while any(request.seq.generated == 0 for request in requests):
            llm.step()
        while len(beside) < STEPS and all(request.finish_reason is None for request in requests):
            started, within = time.perf_counter(), target.seconds
            llm.step()
            beside.append(time.perf_counter() - started - (target.seconds - within))
            nodes.append(target.seen[-1][0] / TOGETHER - 1)
    finally:
        for request in requests:
            llm.cancel(request)
    return statistics.mean(nodes), statistics.median(beside)


def _line(points: Mapping[float, float], x: float) -> float:
    xs = sorted(points)
    return interpolated(xs, [points[at] for at in xs], x)
