"""How fast one request decodes, with drafts and without: everything from one run, the engines taking turns.

For each prompt and repetition plain decoding, speculative decoding and, if asked for, another engine generate the same
number of tokens one after the other, in an order that turns round with the repetition; medians over the repetitions are
reported, with ratios of those. Speeds are of decoding: tokens after the first round, without the prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from foretell.bench.against import Other
from foretell.bench.compare import first_difference
from foretell.bench.forward import TimedTarget, row_times, timed
from foretell.bench.prompts import encoded
from foretell.bench.run import Run, afresh, warm_up
from foretell.engine.llm import LLM
from foretell.engine.stats import Stats
from foretell.machine import cores, processor
from foretell.types import Sampling

ROWS = (1, 4, 8, 16, 32)
CONTEXT = 300
FORWARDS = 15  # of each size at least
PLAIN, DRAFTED, OTHER = "plain", "drafted", "other"


@dataclass(frozen=True, slots=True)
class Settings:
    """ValueError if they cannot be met."""

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    repetitions: int = 3
    kinds: list[str] = field(default_factory=list)  # of prompt; empty: all

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ValueError(f"repetitions must be at least 1, not {self.repetitions}")
        self.sampling(None)

    def sampling(self, draft_tokens: int | None) -> Sampling:
        return Sampling(
            temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens, draft_tokens=draft_tokens
        )


@dataclass(slots=True)
class _Result:
    """What was measured on one prompt."""

    kind: str
    prompt: list[int]
    seconds: dict[str, list[float]] = field(default_factory=dict)  # per token, of each repetition, by engine
    stats: Stats = field(default_factory=Stats)  # of one drafted run; the others are its equals
    difference: int | None = None  # first token where plain and drafted part
    other_difference: int | None = None  # and where plain and the other engine do

    def add(self, engine: str, seconds: float, tokens: int) -> None:
        if tokens:
            self.seconds.setdefault(engine, []).append(seconds / tokens)

    def median(self, engine: str) -> float:
        """Seconds per token; 0 where nothing was decoded."""
        return statistics.median(self.seconds[engine]) if engine in self.seconds else 0.0


class _Bench:
    def __init__(self, llm: LLM, settings: Settings, other: Other | None) -> None:
        self.llm, self.settings, self.other = llm, settings, other
        self.results = [_Result(kind, prompt) for kind, prompt in encoded(llm, settings.kinds).items()]
        self.engines = (PLAIN, DRAFTED) if other is None else (PLAIN, DRAFTED, OTHER)
        self.step_s = {PLAIN: 0.0, DRAFTED: 0.0}  # of decoding steps
        self.forward_s = {PLAIN: 0.0, DRAFTED: 0.0}  # of the target's forwards in them
        self.row_s: dict[int, list[float]] = {size: [] for size in ROWS}  # of forwards by their number of rows

    def run(self, progress: Callable[[str], None]) -> None:
        count = self.settings.repetitions
        each = -(-FORWARDS // (count * len(self.results)))  # spread over the run, like everything else
        with timed(self.llm) as target:
            for repetition in range(count):
                for result in self.results:
                    progress(f"{result.kind}, repetition {repetition + 1} of {count}")
                    self._turn(result, repetition, target)
                    for size, seconds in row_times(self.llm, ROWS, context=CONTEXT, repetitions=each).items():
                        self.row_s[size] += seconds

    def _turn(self, result: _Result, repetition: int, target: TimedTarget) -> None:
        """Each engine once on one prompt."""
        outputs: dict[str, list[int]] = {}
        for engine in (PLAIN, DRAFTED) if repetition % 2 == 0 else (DRAFTED, PLAIN):
            sampling = self.settings.sampling(0 if engine == PLAIN else None)
            afresh(self.llm)
            run = Run(self.llm, result.prompt, sampling, meter=lambda: target.seconds)
            outputs[engine] = run.finish().token_ids
            result.add(engine, run.decode_s, run.decoded)
            self.step_s[engine] += run.decode_s
            self.forward_s[engine] += run.metered
            if engine == DRAFTED:
                result.stats = run.request.stats
        plain = outputs[PLAIN]
        difference = first_difference(plain, outputs[DRAFTED])
        result.difference = difference if result.difference is None else result.difference
        if self.other is not None and len(plain) > 1:
            theirs, seconds = self.other.decode(result.prompt, len(plain))
            result.add(OTHER, seconds, len(theirs) - 1)
            result.other_difference = first_difference(plain, theirs)

    def row(self, result: _Result) -> dict[str, Any]:
        """One prompt's part of the report."""
        return {
            "kind": result.kind,
            "prompt_tokens": len(result.prompt),
            "tokens": result.stats.emitted,
            **self._speeds({engine: result.median(engine) for engine in self.engines}),
            **_rates(result.stats),
            "first_difference": result.difference,
            **({"other_first_difference": result.other_difference} if self.other else {}),
        }

    def total(self) -> dict[str, Any]:
        """All prompts together, each with the weight of its tokens."""
        tokens = sum(result.stats.emitted for result in self.results)
        seconds = {e: sum(r.median(e) * r.stats.emitted for r in self.results) / tokens for e in self.engines}
        return {
            "tokens": tokens,
            **self._speeds(seconds),
            **_rates(Stats.pooled(result.stats for result in self.results)),
            "identical": all(result.difference is None for result in self.results),
        }

    def _speeds(self, seconds: dict[str, float]) -> dict[str, float]:
        """Tokens per second, and how many times as fast as the others drafting is. seconds: per token, by engine."""
        speeds = {f"{engine}_tokens_per_second": 1 / s if s else 0.0 for engine, s in seconds.items()}
        drafted = seconds[DRAFTED]
        ratios = {"speedup": seconds[PLAIN] / drafted if drafted else 0.0}
        if OTHER in seconds:
            ratios["plain_against_other"] = seconds[OTHER] / seconds[PLAIN] if seconds[PLAIN] else 0.0
            ratios["drafted_against_other"] = seconds[OTHER] / drafted if drafted else 0.0
        return speeds | ratios


def decode(
    llm: LLM, settings: Settings, other: Other | None = None, progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """The report, ready for JSON. ValueError if no prompt can be made."""
    bench = _Bench(llm, settings, other)
    progress("warming up")
    warm_up(llm)
    bench.run(progress)
    seconds = {size: statistics.median(times) for size, times in bench.row_s.items()}
    return {
        "machine": {"processor": processor(), "cores": cores()},
        "settings": asdict(settings),
        "prompts": [bench.row(result) for result in bench.results],
        "total": bench.total(),
        "forward_context": CONTEXT,
        "forward_ms": {str(size): 1000 * s for size, s in seconds.items()},
        "forward_ratio": {str(size): s / seconds[1] for size, s in seconds.items()},
        "outside_forward": {engine: _rest(bench.forward_s[engine], bench.step_s[engine]) for engine in bench.step_s},
    }


def _rest(part: float, whole: float) -> float:
    return 1 - part / whole if whole else 0.0


def _rates(stats: Stats) -> dict[str, Any]:
    return {
        "alpha": stats.acceptance_rate,
        "E": stats.tokens_per_round,
        "drafted_by_depth": stats.drafted_by_depth,
        "accepted_by_depth": stats.accepted_by_depth,
    }
