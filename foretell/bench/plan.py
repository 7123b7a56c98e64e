"""What `planner.offline` needs of a model on this machine: how much of what a drafter guesses is accepted, by budget,
and what forwards and drafting take. Everything comes from one run, the budgets taking turns on each prompt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.bench.accept import Progress
from foretell.bench.forward import TimedTarget, forward_times, running
from foretell.bench.prompts import ids_of
from foretell.bench.questions import Question
from foretell.bench.run import Run, afresh, warm_up
from foretell.engine.llm import LLM
from foretell.engine.stats import Stats
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.planner.given import piecewise
from foretell.planner.offline import Acceptance, Costs, Counted, measured
from foretell.types import Output, Rows, Sampling

LONGEST = 15  # nodes, unless the user asks for another number
FEWEST = 2  # nodes of the smallest budget that is run at most, and the next is about three times as large
SMALL, LARGE = range(1, 17), (16, 24, 32, 48, 64)  # rows of the forwards that are timed
REACH = (1, 4, 16)  # of those that are timed behind texts of both lengths
NEAR, FAR = 64, 1024  # tokens of these texts
TURNS = 5  # of each size and text
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
    target's forward and beside it, of each prompt's run; decode_s: of all rounds; sizes: rounds by their nodes."""

    budget: int
    parts: list[Stats] = field(default_factory=list)
    count: int = 0
    tokens: int = 0
    decode_s: float = 0.0
    attended: int = 0
    forward: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, run: Run, forwards: Sequence[tuple[int, int]]) -> None:
        """forwards: rows and attended tokens of those of its rounds of decoding."""
        if not forwards:
            return
        self.parts.append(run.request.stats)
        self.count += len(forwards)
        self.tokens += run.decoded
        self.decode_s += run.decode_s
        self.forward.append(run.metered / len(forwards))
        self.beside.append((run.decode_s - run.metered) / len(forwards))
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


@dataclass(frozen=True, slots=True)
class Times:
    """Of forwards, as multiples of one over a single row behind `NEAR` tokens. Multiples are taken within a turn, of
    large ones over the largest of the small ones: what else a machine does then falls on both. rows: by their number;
    attended: what a token more that a row attends to adds for each row, by the number of rows of a request."""

    rows: dict[float, float]
    attended: dict[float, float]


class MeasuredCosts:
    """Straight lines between what was measured, the last ones going on beyond it. one_s: seconds of a forward over a
    single row behind `NEAR` tokens. beside: seconds of a round beside its forward, by requests and nodes for each."""

    def __init__(self, one_s: float, times: Times, beside: Mapping[float, Mapping[float, float]]) -> None:
        self._one_s = one_s
        self._rows, self._attended = piecewise(times.rows), piecewise(times.attended)
        self._beside = {requests: piecewise(points) for requests, points in beside.items()}

    def forward(self, rows: float, attended: float, requests: float) -> float:
        further = self._attended(rows / requests) * (attended - rows * NEAR)  # rows of several share no keys
        return self._one_s * (self._rows(rows) + further)

    def draft(self, nodes: float, requests: float) -> float:
        return piecewise({count: at(nodes / requests) for count, at in self._beside.items()})(requests)


@dataclass(slots=True)
class Measured:
    """All of it. beside: as of `MeasuredCosts`; complete: all prompts were run."""

    runs: list[Rounds]  # plain decoding first
    times: Times
    beside: dict[float, dict[float, float]]
    complete: bool

    @property
    def context(self) -> float:
        """Tokens that a row attends to, on average."""
        return self.runs[0].attended / self.runs[0].count

    @property
    def one_s(self) -> float:
        """Seconds of a forward over a single row behind `NEAR` tokens, within the engine."""
        further = piecewise(self.times.attended)(1) * (self.context - NEAR)
        return statistics.median(self.runs[0].forward) / (1 + further)

    def acceptance(self) -> Acceptance:
        return measured([run.counted() for run in self.runs if run.budget])

    def costs(self) -> Costs:
        return MeasuredCosts(self.one_s, self.times, self.beside)

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
    total = len(runs) * len(prompts) + 2
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
            for into, run, forwards in turn:
                into.add(run, forwards)
        if any(not run.count for run in runs):
            return None
        progress(total - 2, total, f"{TOGETHER} requests at once")
        few = min(FEWEST, settings.longest)
        beside: dict[float, dict[float, float]] = {1: {run.nodes: statistics.median(run.beside) for run in runs}}
        beside[TOGETHER] = dict(_together(llm, target, prompts, settings.sampling(0, n)) for n in (0, few))
    progress(total - 1, total, "forwards by their rows")
    return Measured(runs, row_times(llm), beside, not stopping())


def _run(
    llm: LLM, target: Watched, prompt: list[int], sampling: Sampling, stopping: Callable[[], bool]
) -> tuple[Run, list[tuple[int, int]]]:
    """A run, and rows and attended tokens of its rounds after the first, which has the prompt in it."""
    afresh(llm)
    target.seen.clear()
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


def row_times(llm: LLM) -> Times:
    """No request may be running."""
    rows: dict[float, float] = {}
    for sizes in (SMALL, LARGE):
        times = forward_times(llm, [(size, None) for size in sizes], context=NEAR, repetitions=TURNS)
        unit = rows.get(sizes[0], 1.0)
        for n in sizes:
            ratios = (t / first for t, first in zip(times[n, None], times[sizes[0], None], strict=True))
            rows[n] = unit * statistics.median(ratios)
    far = min(FAR, llm.max_context // 2)
    grown: dict[int, list[float]] = {n: [] for n in REACH}
    for _ in range(TURNS):
        short, long = (
            forward_times(llm, [(size, None) for size in REACH], context=context, repetitions=1)
            for context in (NEAR, far)
        )
        for n in REACH:
            grown[n] += [(long[n, None][0] - short[n, None][0]) / short[1, None][0] / n / (far - NEAR)]
    return Times(rows, {n: max(0.0, statistics.median(values)) for n, values in grown.items()})
