"""One prompt with drafts and without, on the same loaded model: speeds, and whether the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foretell.bench.run import Run, afresh
from foretell.engine.llm import LLM
from foretell.types import Sampling

REPEAT_BELOW_S = 8.0  # a pair of runs shorter than this is repeated: one short run says little on a busy machine


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speeds are of decoding alone, in tokens per second. difference: first index where the tokens part, or None."""

    plain_speed: float
    drafted_speed: float
    plain_tokens: list[int]
    difference: int | None

    @property
    def speedup(self) -> float:
        return self.drafted_speed / self.plain_speed if self.plain_speed else 0.0

    @property
    def identical(self) -> bool:
        return self.difference is None


def compare(drafted: Run, llm: LLM, sampling: Sampling, stopping: Callable[[], bool]) -> Comparison | None:
    """drafted: a finished run; sampling: the one it was made with. None if it was stopped.

    The order is drafted, plain, plain, drafted, so that a machine that slows down or speeds up favours neither.
    """
    prompt = drafted.completion.prompt_token_ids
    seeded = replace(sampling, seed=drafted.seed)
    plain = replace(seeded, draft_tokens=0)
    runs: dict[bool, list[Run]] = {True: [drafted], False: []}
    with llm.engine.plain():
        runs[False].append(_finished(llm, prompt, plain, stopping))
        again = drafted.decode_s + runs[False][0].decode_s < REPEAT_BELOW_S
        if again:
            runs[False].append(_finished(llm, prompt, plain, stopping))
    if again:
        runs[True].append(_finished(llm, prompt, seeded, stopping))
    if any(run.completion.finish_reason == "abort" for run in runs[True] + runs[False]):
        return None
    tokens = drafted.completion.token_ids
    differences = [first_difference(tokens, run.completion.token_ids) for run in runs[True] + runs[False]]
    return Comparison(
        speed(runs[False]),
        speed(runs[True]),
        runs[False][0].completion.token_ids,
        min((d for d in differences if d is not None), default=None),
    )


def _finished(llm: LLM, prompt: list[int], sampling: Sampling, stopping: Callable[[], bool]) -> Run:
    afresh(llm)
    run = Run(llm, prompt, sampling, stopping=stopping)
    run.finish()
    return run


def speed(runs: Sequence[Run]) -> float:
    """Tokens per second of decoding, over all runs together."""
    seconds = sum(run.decode_s for run in runs)
    return sum(run.decoded for run in runs) / seconds if seconds else 0.0


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two sequences differ, be it that one ends there; None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
