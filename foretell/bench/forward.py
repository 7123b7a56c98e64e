"""What the target's forward costs: by its number of rows, and as a share of a step."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from foretell.engine.llm import LLM
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.types import Output, Rows, Sampling, Seq

CHUNK = 256  # rows of one pass while the context is filled
Shape = tuple[int, tuple[int, ...] | None]  # rows of a forward, and the layers it runs (None: all)


class TimedTarget:
    """A target that keeps the time of its forwards; the engine under it is the one that users run."""

    def __init__(self, target: Target) -> None:
        self.target, self.seconds = target, 0.0
        self.vocab_size, self.max_context, self.stop_ids = target.vocab_size, target.max_context, target.stop_ids
        self.exact, self.backend, self.num_layers = target.exact, target.backend, target.num_layers

    def attach(self, cache: Cache, plane: str) -> None:
        self.target.attach(cache, plane)

    def kv_bytes(self) -> int:
        return self.target.kv_bytes()

    def forward(
        self, rows: Rows, cache: Cache, *, taps: Collection[int] = (), layers: Sequence[int] | None = None
    ) -> Output:
        started = time.perf_counter()
        out = self.target.forward(rows, cache, taps=taps, layers=layers)
        self.seconds += time.perf_counter() - started
        return out


@contextmanager
def timed(llm: LLM) -> Iterator[TimedTarget]:
    """Time the engine's forwards while inside."""
    target = TimedTarget(llm.engine.target)
    llm.engine.target = target
    try:
        yield target
    finally:
        llm.engine.target = target.target


def row_times(llm: LLM, sizes: Sequence[int], *, context: int, repetitions: int) -> dict[int, list[float]]:
    """Seconds of whole forwards over that many rows."""
    times = forward_times(llm, [(size, None) for size in sizes], context=context, repetitions=repetitions)
    return {size: times[size, None] for size in sizes}


@torch.inference_mode()
def forward_times(llm: LLM, shapes: Sequence[Shape], *, context: int, repetitions: int) -> dict[Shape, list[float]]:
    """Seconds of forwards of those shapes in turn, each a chain behind `context` tokens. No request may be running.

    The context is computed once: a further call finds it in the prefix cache.
    """
    cache, target = llm.engine.cache, llm.target
    largest = max(size for size, _ in shapes)
    context = max(1, min(context, llm.max_context - largest))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (context + largest,), generator=generator).tolist()
    seq = Seq(-1, tokens, len(tokens), Sampling(), seed=0)
    if not cache.admit(seq):
        raise RuntimeError("the cache has no free line: a request is still running")
    times: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    try:
        fill(llm, seq, context)
        for repetition in range(repetitions + 1):
            for shape in shapes:
                seconds = _forward(llm, seq, shape)
                cache.commit(seq, ())
                if repetition:  # the first round warms up
                    times[shape].append(seconds)
    finally:
        cache.release(seq)
    return times


def fill(llm: LLM, seq: Seq, length: int) -> None:
    """Compute and commit the request's first `length` tokens."""
    while seq.cached < length:
        size = min(CHUNK, length - seq.cached)
        _forward(llm, seq, (size, None))
        llm.engine.cache.commit(seq, range(size))


def _forward(llm: LLM, seq: Seq, shape: Shape) -> float:
    """Compute the next tokens of the request on slots reserved here; returns the forward's seconds."""
    cache, (size, layers) = llm.engine.cache, shape
    if not cache.reserve(seq, size):
        raise RuntimeError(f"the cache has no {size} free slots: a request is still running")
    first = seq.cached
    rows = Rows.of(seq, seq.tokens[first : first + size], range(-1, size - 1), cache.reserved(seq))
    started = time.perf_counter()
    llm.target.forward(rows, cache, layers=layers)
    return time.perf_counter() - started
