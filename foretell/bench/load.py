"""Throughput and latency with several requests at once: so many are kept running, the next begins when one ends.

At every level plain decoding, speculative decoding and the peers answer the same prompts, one engine after another, in
an order that turns round. All prompts differ, and a request drafts from its own text alone, so that the repetition of
answers, which a benchmark makes and users do not, helps nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from foretell.bench.compare import first_difference
from foretell.bench.peers import Peers
from foretell.bench.questions import Question, fitted
from foretell.bench.run import afresh, plain_if, warm_up
from foretell.bench.timing import DRAFTED, PLAIN, Answer, quantile
from foretell.engine.llm import LLM
from foretell.engine.request import Request
from foretell.engine.stats import Stats
from foretell.types import Sampling

FEWEST = 8  # requests of a level
Progress = Callable[[int, int, str], None]  # runs done, of how many, what is running


@dataclass(frozen=True, slots=True)
class Settings:
    """levels: requests kept running at once. requests: how many there are of a level for each of its places, FEWEST at
    least. ValueError if they cannot be met."""

    levels: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    requests: int = 2
    repetitions: int = 1
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 1 or len(set(self.levels)) < len(self.levels):
            raise ValueError(f"concurrency must be whole numbers of at least 1, each once, not {list(self.levels)}")
        for name in ("requests", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        self.sampling(0, None)

    def sampling(self, number: int, draft_tokens: int | None) -> Sampling:
        """Of the request of that number, each with a seed of its own."""
        return Sampling(
            temperature=self.temperature,
            seed=self.seed + number,
            max_tokens=self.max_tokens,
            draft_tokens=draft_tokens,
            private=True,
        )

    def count(self, level: int) -> int:
        return max(FEWEST, level * self.requests)


@dataclass(slots=True)
class _Engine:
    """What one engine did at a level, over all repetitions."""

    answers: list[Answer] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, answers: Sequence[Answer], seconds: float, stats: Sequence[Stats] = ()) -> None:
        self.answers += answers
        self.stats += stats
        self.seconds += seconds

    @property
    def throughput(self) -> float:
        """Tokens of all answers per second, prompts included in the time."""
        tokens = sum(len(answer.token_ids) for answer in self.answers)
        return tokens / self.seconds if self.seconds else 0.0

    def figures(self) -> dict[str, float]:
        first = [1000 * answer.first_s for answer in self.answers]
        each = [1000 * s for answer in self.answers if (s := answer.per_token_s) is not None]
        return {
            "tokens_per_second": self.throughput,
            **{f"ttft_ms_p{round(100 * p)}": quantile(first, p) for p in (0.5, 0.99)},
            **{f"tpot_ms_p{round(100 * p)}": quantile(each, p) for p in (0.5, 0.99)},
        }


@dataclass(slots=True)
class _Level:
    concurrency: int
    engines: dict[str, _Engine] = field(default_factory=dict)
    differ: int = 0  # answers that are not plain decoding's

    def row(self, peers: Sequence[str]) -> dict[str, Any]:
        plain, drafted = (self.engines[name] for name in (PLAIN, DRAFTED))
        stats = Stats.pooled(drafted.stats)
        return {
            "concurrency": self.concurrency,
            "requests": len(plain.answers),
            "tokens": sum(len(answer.token_ids) for answer in plain.answers),
            PLAIN: plain.figures(),
            DRAFTED: {**drafted.figures(), "E": stats.tokens_per_round, "alpha": stats.acceptance_rate}
            | stats.estimates(),
            "speedup": drafted.throughput / plain.throughput,
            "identical": self.differ == 0,
            "peers": {name: self._against(self.engines[name]) if name in self.engines else None for name in peers},
        }

    def _against(self, peer: _Engine) -> dict[str, float]:
        ratios = {f"{name}_ratio": self.engines[name].throughput / peer.throughput for name in (PLAIN, DRAFTED)}
        return peer.figures() | ratios


class _Bench:
    def __init__(self, llm: LLM, settings: Settings, prompts: Sequence[list[int]], peers: Peers) -> None:
        self.llm, self.settings, self.prompts, self.peers = llm, settings, prompts, peers
        self.expected: dict[int, Sequence[int]] = {}  # plain decoding's tokens by prompt, whatever ran beside it

    def run(self, number: int, level: _Level, progress: Callable[[str], None], stopping: Callable[[], bool]) -> bool:
        """Every engine once; False, and this time is not counted, if stopped in one of foretell's own."""
        count = self.settings.count(level.concurrency)
        found: dict[str, tuple[list[Answer], float, list[Stats]]] = {}
        for name in (PLAIN, DRAFTED) if number % 2 == 0 else (DRAFTED, PLAIN):
            progress(name)
            plain = name == PLAIN
            with plain_if(self.llm, plain):
                served = self._serve(count, level.concurrency, 0 if plain else None, stopping)
            if served is None:
                return False
            found[name] = served
        for i, answer in enumerate(found[PLAIN][0]):
            self.expected.setdefault(i, answer.token_ids)
        for name, (answers, seconds, stats) in found.items():
            level.engines.setdefault(name, _Engine()).add(answers, seconds, stats)
            pairs = ((answer.token_ids, self.expected[i]) for i, answer in enumerate(answers))
            level.differ += sum(first_difference(mine, plain) is not None for mine, plain in pairs)
        for name in self.peers.in_turn(number):
            progress(name)
            counts = [len(answer.token_ids) for answer in found[PLAIN][0]]
            theirs = self.peers.ask(name, self.prompts[:count], counts, stopping, level.concurrency)
            if theirs is not None:
                level.engines.setdefault(name, _Engine()).add(*theirs)
        return True

    def _serve(
        self, count: int, places: int, draft_tokens: int | None, stopping: Callable[[], bool]
    ) -> tuple[list[Answer], float, list[Stats]] | None:
        """The first `count` prompts answered, `places` at a time, and the seconds it took. None if stopped."""
        llm = self.llm
        afresh(llm)
        requests = [_Timed() for _ in range(count)]
        waiting, running = list(range(count)), dict[int, Request]()
        started = now = time.perf_counter()
        try:
            while waiting or running:
                if stopping():
                    return None
                while waiting and len(running) < places:
                    i = waiting.pop(0)
                    requests[i].started = now
                    running[i] = llm.submit(self.prompts[i], self.settings.sampling(i, draft_tokens))
                llm.step()
                now = time.perf_counter()
                for i, request in list(running.items()):
                    requests[i].look(request, now)
                    if request.finish_reason is not None:
                        del running[i]
        finally:
            for request in running.values():
                llm.cancel(request)
        return [r.answer for r in requests], now - started, [r.stats for r in requests]


class _Timed:
    """One request of foretell's own, looked at after every step."""

    def __init__(self) -> None:
        self.started = 0.0
        self.stats = Stats()
        self.answer = Answer([], 0, 0.0, 0.0)

    def look(self, request: Request, now: float) -> None:
        count = request.seq.generated
        if count > len(self.answer.token_ids):
            first, first_s = self.answer.first, self.answer.first_s
            tokens, last_s = request.seq.tokens[request.seq.prompt_len :], now - self.started
            self.answer = Answer(tokens, first or count, first_s if first else last_s, last_s)
        self.stats = request.stats


def load(
    llm: LLM,
    questions: Sequence[Question],
    settings: Settings,
    peers: Peers,
    progress: Progress = lambda done, total, what: None,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The report, ready for JSON; once `stopping` says True, of what was finished by then. peers: not opened yet.
    llm: with a place for each request of the highest level."""
    peers.check(settings.temperature)
    highest = max(settings.levels)
    prompts = fitted(llm, distinct(questions, settings.count(highest)))
    context = min(llm.max_context, max(map(len, prompts)) + settings.max_tokens)
    peers.open(context, highest, lambda what: progress(0, 1, what), stopping)
    progress(0, 1, "warming up")
    warm_up(llm)
    bench = _Bench(llm, settings, prompts, peers)
    levels = [_Level(concurrency) for concurrency in settings.levels]
    turns = [level for level in levels for _ in range(settings.repetitions)]
    done = 0
    while done < len(turns) and not stopping():
        level = turns[done]
        say = partial(_say, progress, done, len(turns), level.concurrency)
        if not bench.run(done, level, say, stopping):
            break
        done += 1
    return {
        "settings": asdict(settings),
        "complete": done == len(turns) and not stopping(),
        "identical": all(level.differ == 0 for level in levels),
        "levels": [level.row(peers.settings.names) for level in levels if level.engines],
        "peers": peers.notes,
    }


def _say(progress: Progress, done: int, total: int, concurrency: int, engine: str) -> None:
    progress(done, total, f"{concurrency} at once: {engine}")


def distinct(questions: Sequence[Question], count: int) -> list[Question]:
    """That many, no two of which begin alike: once all were taken, they come again with a number before them."""
    rounds = range(-(-count // len(questions)))
    numbered = [Question(q.kind, f"{n + 1}. {q.text}" if n else q.text) for n in rounds for q in questions]
    return numbered[:count]
