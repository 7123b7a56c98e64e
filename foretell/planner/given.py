"""Costs from figures that someone gives: a table of forwards, or a machine's bandwidth and arithmetic; and a drafter's
steps. Pure arithmetic, nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from foretell.planner.cost import interpolated

Forward = Callable[[float, float, float], float]  # rows, attended, requests -> seconds; see `offline.Costs`


def piecewise(points: Mapping[float, float]) -> Callable[[float], float]:
    """The line through the points, see `interpolated`."""
    xs = sorted(points)
    return partial(interpolated, xs, [points[x] for x in xs])


def table(points: Mapping[float, float]) -> Forward:
    """Seconds of a forward by its rows. One point alone: whatever its rows. ValueError if they cannot be such."""
    if not points or min(points) < 1 or min(points.values()) <= 0:
        raise ValueError("a forward has at least one row and takes more than no time")
    at = piecewise(points)
    return lambda rows, attended, requests: at(rows)


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a machine. weights: bytes that a forward reads; parameters: multiplied with every row; kv: bytes of
    keys and values of a token; bandwidth: bytes per second; flops: operations per second, None: no bound."""

    weights: float
    bandwidth: float
    parameters: float
    flops: float | None = None
    kv: float = 0.0

    def __post_init__(self) -> None:
        for name in ("weights", "bandwidth", "parameters", "flops"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if self.kv < 0:
            raise ValueError(f"kv must not be negative, not {self.kv}")


def roofline(machine: Machine) -> Forward:
    """A forward takes as long as reading the weights or as computing the rows, whichever is longer, and reads the keys
    and values of every request once for all its rows (Williams et al. 2009, doi 10.1145/1498765.1498785)."""
    reading = machine.weights / machine.bandwidth
    row = 2 * machine.parameters / machine.flops if machine.flops else 0.0
    token = machine.kv / machine.bandwidth
    return lambda rows, attended, requests: max(reading, rows * row) + attended / rows * requests * token


class GivenCosts:
    """forward: of the target. gamma: a step of the drafter, which drafts one node for every request, in forwards of one
    row for each; step_s: instead, its seconds, however many requests there are."""

    def __init__(self, forward: Forward, gamma: float = 0.0, step_s: float | None = None) -> None:
        if gamma < 0 or (step_s is not None and step_s < 0):
            raise ValueError("a step of the drafter cannot take less than no time")
        self.forward, self._gamma, self._step_s = forward, gamma, step_s

    def draft(self, nodes: float, requests: float) -> float:
        step = self._gamma * self.forward(requests, 0.0, requests) if self._step_s is None else self._step_s
        return nodes / requests * step
