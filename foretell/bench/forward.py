"""What the target's forward costs: by its rows, beside reading its weights alone, and as a share of a step."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from foretell.engine.llm import LLM
from foretell.engine.measure import forward_s
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.models.llama import LlamaModel
from foretell.models.native import NativeOps
from foretell.types import Output, Rows, Sampling, Seq

Progress = Callable[[int, int, str], None]  # rounds done, of how many, what is running
CHUNK = 256  # rows of one pass while the context is filled
Shape = tuple[int, tuple[int, ...] | None]  # rows of a forward, and the layers it runs (None: all)


@dataclass(frozen=True, slots=True)
class Settings:
    """Of `forward`; ValueError if they cannot be met by any model."""

    rows: Sequence[int] = (1, 2, 4, 5, 6, 8, 12, 16, 24, 32)
    context: int = 300
    repetitions: int = 30

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 1 or len(set(self.rows)) < len(self.rows):
            raise ValueError(f"rows must be whole numbers of at least 1, each once, not {list(self.rows)}")
        for name in ("context", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


def forward(
    llm: LLM,
    settings: Settings,
    progress: Progress = lambda done, total, what: None,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The report, ready for JSON: medians of forwards over those numbers of rows in turn and, between any two of them,
    of reading the packed weights that a forward reads, once, with all threads and nothing else to do."""
    longest = llm.max_context - max(settings.rows)
    if settings.context > longest:
        raise ValueError(f"context {settings.context} is too long: the model's own leaves {longest} before these rows")
    stream = Stream(llm.target)
    times: dict[int, list[float]] = {size: [] for size in settings.rows}
    rounds = _rounds(llm, [(size, None) for size in settings.rows], settings.context, stream.read)
    with contextlib.closing(rounds):
        done = 0
        while done < settings.repetitions and not stopping():
            for (size, _), took in next(rounds).items():
                times[size].append(took)
            done += 1
            progress(done, settings.repetitions, "forwards")
    seconds = {size: statistics.median(values) for size, values in times.items() if values}
    streaming = statistics.median(stream.seconds) if stream.seconds else None
    one = seconds.get(1)
    return {
        "context": settings.context,
        "repetitions": done,
        "complete": done == settings.repetitions,
        "streaming_bytes": stream.bytes,
        "streaming_ms": streaming and 1000 * streaming,
        "rows": [
            {
                "rows": size,
                "ms": 1000 * s,
                "times_one_row": one and s / one,
                "times_streaming": streaming and s / streaming,
            }
            for size, s in seconds.items()
        ],
    }


class Stream:
    """Times of reading a model's packed weights. Only the native kernels pack them: of others nothing is read."""

    def __init__(self, target: Target) -> None:
        self.seconds: list[float] = []
        self.bytes = 0  # of one reading
        self._ops, self._weights = None, []
        if isinstance(target, LlamaModel) and isinstance(target.ops, NativeOps):
            self._ops, self._weights = target.ops, target.weights()

    def read(self) -> None:
        if self._ops is not None:
            started = time.perf_counter()
            self.bytes = self._ops.stream(self._weights)
            self.seconds.append(time.perf_counter() - started)


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


Timed = TypeVar("Timed", bound=TimedTarget)


@contextmanager
def running(llm: LLM, target: Timed) -> Iterator[Timed]:
    """The engine runs that target, around its own, while inside."""
    llm.engine.target = target
    try:
        yield target
    finally:
        llm.engine.target = target.target


def timed(llm: LLM) -> AbstractContextManager[TimedTarget]:
    """Time the engine's forwards while inside."""
    return running(llm, TimedTarget(llm.engine.target))


def forward_times(llm: LLM, shapes: Sequence[Shape], *, context: int, repetitions: int) -> dict[Shape, list[float]]:
    """Seconds of forwards of those shapes in turn, each a chain behind `context` tokens. No request may be running."""
    times: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    with contextlib.closing(_rounds(llm, shapes, context)) as rounds:
        for _, round_s in zip(range(repetitions), rounds, strict=False):
            for shape, took in round_s.items():
                times[shape].append(took)
    return times


@torch.inference_mode()
def _rounds(
    llm: LLM, shapes: Sequence[Shape], context: int, between: Callable[[], None] = lambda: None
) -> Generator[dict[Shape, float]]:
    """Seconds of one forward of each shape, in turn, without end; `between` is called before each of them.

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
    try:
        fill(llm, seq, context)
        for repetition in itertools.count():
            times: dict[Shape, float] = {}
            for shape in shapes:
                between()
                times[shape] = forward_s(target, cache, [seq], *shape)
                cache.commit(seq, ())
            if repetition:  # the first round warms up
                yield times
    finally:
        cache.release(seq)


def fill(llm: LLM, seq: Seq, length: int) -> None:
    """Compute and commit the request's first `length` tokens."""
    while seq.cached < length:
        size = min(CHUNK, length - seq.cached)
        forward_s(llm.target, llm.engine.cache, [seq], size)
        llm.engine.cache.commit(seq, range(size))
