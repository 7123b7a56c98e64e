"""Costs from figures that someone gives: a table of forwards, or a machine's bandwidth and arithmetic; and a drafter's
steps. Pure arithmetic, nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foretell.planner.cost import Costs
from foretell.planner.offline import Beside


def table(points: Mapping[float, float]) -> Costs:
    """From seconds of a forward by its rows. One point alone: whatever its rows. ValueError if they cannot be such."""
    if not points or min(points) < 1 or min(points.values()) <= 0:
        raise ValueError("a forward has at least one row and takes more than no time")
    rows = sorted(points)
    return Costs(rows, [points[n] for n in rows])


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


def roofline(machine: Machine) -> Costs:
    """A forward takes as long as reading the weights or as computing the rows, whichever is longer, and reads the keys
    and values of every request once for all its rows (Williams et al. 2009, doi 10.1145/1498765.1498785)."""
    reading, token = machine.weights / machine.bandwidth, machine.kv / machine.bandwidth
    if machine.flops is None:
        return Costs([1], [reading], per_cached=token)
    row = 2 * machine.parameters / machine.flops
    knee = max(1.0, reading / row)
    rows = sorted({1.0, knee, 2 * knee})
    return Costs(rows, [max(reading, n * row) for n in rows], per_cached=token)


def steps(costs: Costs, gamma: float = 0.0, step_s: float | None = None) -> Beside:
    """Of a drafter that drafts one node for every request in a step. gamma: what that takes, in forwards of one row for
    each; step_s: instead, its seconds, however many requests there are."""
    if gamma < 0 or (step_s is not None and step_s < 0):
        raise ValueError("a step of the drafter cannot take less than no time")

    def beside(nodes: float, requests: float) -> float:
        return nodes / requests * (gamma * costs.forward(requests, 0.0, requests) if step_s is None else step_s)

    return beside
