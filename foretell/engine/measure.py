"""What forwards of this model cost on this machine: measured once, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from foretell.engine.rows import build_rows
from foretell.kv.cache import Cache
from foretell.machine import processor
from foretell.models.base import Target
from foretell.models.files import read_json, write_json
from foretell.planner.cost import Costs, Point, fit
from foretell.types import Drafts, Plan, Sampling, Seq

LIMIT_S, ROUNDS = 3.0, 6  # seconds that measuring may take, and how often everything is measured if they allow it
AGAIN_S = 1.5  # that it may take again, if it does not hold right after
SHORT, LONG = 16, 768  # tokens before the rows
# the most telling first: of a slow model no more than these may be had
POINTS: tuple[Point, ...] = (
    *((rows, SHORT, 1) for rows in (1, 4, 16, 8, 2, 32)),
    *((rows, LONG, 1) for rows in (1, 16)),
    (8, SHORT, 8),
    *((rows, SHORT, 1) for rows in (3, 5, 6, 7, 12, 10, 24, 64)),
)
CHECKED: tuple[Point, ...] = tuple((rows, SHORT, 1) for rows in (1, 4, 8))  # of a table from another day
CHECKS, CHECK_S, ODD = 3, 0.3, 1.35  # how often, within which time, and how far apart two of them may be from it


def costs_of(target: Target, folder: Path, dtype: str, threads: int) -> Costs:
    """The costs of the model that `folder` is about, from there, or measured and written there. dtype: of its weights;
    threads: those that compute. `attach` the target's cache after this."""
    setting = f"{processor()} {threads} {target.backend} {dtype}"
    path = folder / f"costs-{hashlib.sha256(setting.encode()).hexdigest()[:12]}.json"
    try:
        costs = Costs.from_json(read_json(path))
        if _holds(target, costs):
            return costs
    except ValueError:
        pass  # none, or not of this version: measure
    costs = measure(target)
    if not _holds(target, costs):  # something else ran beside it, in part of the time
        costs = measure(target, AGAIN_S)
    write_json(path, costs.to_json())
    return costs


def _holds(target: Target, costs: Costs) -> bool:
    """Whether a table still has the right shape: one of an odd moment, or of other kernels, would mislead for ever.
    That all takes longer or shorter now does not matter, the controller sees to it."""
    ratios = [seconds / costs.forward(*point) for point, seconds in _times(target, CHECKED, CHECKS, CHECK_S).items()]
    return max(ratios) < ODD * min(ratios)


def measure(target: Target, limit_s: float = LIMIT_S) -> Costs:
    """What forwards cost now, within that many seconds."""
    return fit(_times(target, POINTS, ROUNDS, limit_s))


@torch.inference_mode()
def _times(target: Target, all_points: Sequence[Point], rounds: int, limit_s: float) -> dict[Point, float]:
    """The median seconds of each point that fits into the context, over as many rounds as the time allows: the least
    would flatter many rows, which a busy neighbour slows down more than one row. It runs on a cache of its own, which
    holds zeros, so no context is computed."""
    length = min(target.max_context, max(rows + context for rows, context, _ in all_points) + 1)
    many = max(requests for *_, requests in all_points)
    cache = Cache(max(length, many * (SHORT + 1)), many, length, reuse=False)
    target.attach(cache, "measure")
    for plane in cache.planes.values():
        plane.k.zero_(), plane.v.zero_()
    times: dict[Point, list[float]] = {}
    points = [point for point in all_points if point[0] + point[1] < length] or [(1, 0, 1)]
    end = time.perf_counter() + limit_s
    for point in points * rounds:
        times.setdefault(point, []).append(_forward(target, cache, point))
        if time.perf_counter() > end and len(times) > 1:
            break
    return {point: statistics.median(seconds) for point, seconds in times.items()}


def _forward(target: Target, cache: Cache, point: Point) -> float:
    """Seconds of one forward."""
    rows, context, requests = point
    own = rows // requests
    seqs = [Seq(i, [0] * (context + own), 1, Sampling(), 0) for i in range(requests)]
    for seq in seqs:
        if not cache.admit(seq) or not cache.reserve(seq, context):
            raise AssertionError("the cache is too small for what is measured")
        cache.commit(seq, range(context))
    took = forward_s(target, cache, seqs, own)
    for seq in seqs:
        cache.release(seq)
    return took


def forward_s(
    target: Target, cache: Cache, seqs: Sequence[Seq], rows: int, layers: Sequence[int] | None = None
) -> float:
    """Seconds of one forward over the next tokens of each request, so many of each, on slots that are reserved here;
    the logits of all of them are wanted."""
    for seq in seqs:
        if not cache.reserve(seq, rows):
            raise RuntimeError(f"the cache has no {rows} free slots: a request is still running")
    plan = Plan(seqs, [rows] * len(seqs), [0] * len(seqs))
    made = build_rows(plan, Drafts.chains([[]] * len(plan.ready)), cache, target.vocab_size)
    made = replace(made, want=torch.arange(len(made.tokens)))
    started = time.perf_counter()
    target.forward(made, cache, layers=layers)
    return time.perf_counter() - started
