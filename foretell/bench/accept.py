"""How much of what drafters guess is accepted: each of them on the same prompts, by kind of prompt.

Counts do not depend on the machine, only on model, prompts and drafter. Times are of this machine, and of decoding
rounds alone: the first round, which has the prompt in it, is left out of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.bench.compare import first_difference
from foretell.bench.questions import Question, fitted
from foretell.bench.run import Run, afresh, warm_up
from foretell.engine.llm import LLM
from foretell.engine.stats import Stats
from foretell.types import Sampling

Progress = Callable[[int, int, str], None]  # runs done, of how many, what is running


@dataclass(frozen=True, slots=True)
class Settings:
    """carry: a drafter keeps what it learns from one prompt to the next. ValueError if they cannot be met."""

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    carry: bool = False

    def __post_init__(self) -> None:
        self.sampling(0)

    def sampling(self, number: int) -> Sampling:
        """Of the prompt of that number, each with a seed of its own."""
        return Sampling(temperature=self.temperature, seed=self.seed + number, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class Sample:
    """One drafter's run on one prompt of a kind. rounds: those after the first; draft_s, verify_s, rest_s: seconds of
    these in the drafter's guessing, in the target's forward with verification, and in all else, the drafter's learning
    included. difference: first token that is not plain decoding's."""

    kind: str
    stats: Stats
    rounds: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0
    difference: int | None = None


def figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Of all rounds together: sums are divided by sums, no average of ratios is taken."""
    stats = Stats.pooled(sample.stats for sample in samples)
    rounds = sum(sample.rounds for sample in samples)
    depths = zip(stats.accepted_by_depth, stats.drafted_by_depth, strict=True)
    return {
        "prompts": len(samples),
        "tokens": stats.emitted,
        "rounds": stats.rounds,
        "E": stats.tokens_per_round,
        "alpha": stats.acceptance_rate,
        "alpha_by_depth": [accepted / drafted if drafted else 0.0 for accepted, drafted in depths],
        "accepted_by_depth": stats.accepted_by_depth,
        "drafted_by_depth": stats.drafted_by_depth,
        "nodes_per_round": stats.drafted / stats.rounds if stats.rounds else 0.0,
        "draft_ms": _per_round(sum(sample.draft_s for sample in samples), rounds),
        "verify_ms": _per_round(sum(sample.verify_s for sample in samples), rounds),
        "rest_ms": _per_round(sum(sample.rest_s for sample in samples), rounds),
        "identical": all(sample.difference is None for sample in samples),
    }


def by_kind(samples: Sequence[Sample]) -> dict[str, Any]:
    """The figures of each kind, in the order they come in, and of all."""
    kinds = dict.fromkeys(sample.kind for sample in samples)
    rows = [{"kind": kind, **figures([s for s in samples if s.kind == kind])} for kind in kinds]
    return {"kinds": rows, "all": figures(samples)}


def accept(
    open_with: Callable[[str], LLM],
    names: Sequence[str],
    questions: Sequence[Question],
    settings: Settings,
    progress: Progress = lambda done, total, what: None,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The report, ready for JSON. open_with: the model with the drafter of that name; only one is open at a time.

    The first of `names` is plain decoding, whose tokens the others' are compared with. Once `stopping` says True, the
    report is of what was finished by then.
    """
    report: dict[str, Any] = {"drafters": [], "complete": False}
    plain: list[list[int]] = []
    total = len(names) * len(questions)
    for number, name in enumerate(names):
        done = number * len(questions)
        progress(done, total, f"{name}: loading")
        llm = open_with(name)
        report |= {"model": llm.name, "backend": llm.target.backend, "exact": llm.target.exact}
        samples: list[Sample] = []
        for sample, tokens in _runs(llm, questions, settings, stopping):
            if number == 0:
                plain.append(tokens)
            samples.append(replace(sample, difference=first_difference(plain[len(samples)], tokens)))
            progress(done + len(samples), total, f"{name}: {sample.kind}")
        report["drafters"].append({"drafter": name, **by_kind(samples)})
        del llm
        gc.collect()  # engine and requests point to one another: the weights must go before the next ones come
        if stopping():
            return report
    report["complete"] = True
    return report


def _runs(
    llm: LLM, questions: Sequence[Question], settings: Settings, stopping: Callable[[], bool]
) -> Iterator[tuple[Sample, list[int]]]:
    """What was counted on each question and the tokens of the answer, until stopped."""
    prompts = fitted(llm, questions)
    warm_up(llm)
    for number, (question, prompt) in enumerate(zip(questions, prompts, strict=True)):
        if not settings.carry:
            afresh(llm)
        run = Run(llm, prompt, settings.sampling(number), stopping=stopping)
        completion = run.finish()
        if completion.finish_reason == "abort":
            return
        rest = run.decode_s - run.draft_s - run.verify_s
        stats = completion.stats
        yield (
            Sample(question.kind, stats, stats.rounds - 1, run.draft_s, run.verify_s, rest),
            completion.token_ids,
        )


def _per_round(seconds: float, rounds: int) -> float:
    """In milliseconds; 0 where no round was timed."""
    return 1000 * seconds / rounds if rounds else 0.0
