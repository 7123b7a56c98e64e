"""What a step costs: seconds of the target's forward by its rows and what they see, from a measured table.

seconds(rows, context, requests) = line through the measured points at `rows`, a jagged one as machines are
                                   + per_attended * rows * context       every row attends to its context,
                                   + per_cached * requests * context     which is read once for each request,
                                   + per_request * (requests - 1)
Between the measured numbers of rows the line is straight, beyond the last it goes on with its last slope.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[int, int, int]  # rows of a forward, tokens that each of them sees, requests they belong to


def interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Straight lines between the points, xs ascending; the last one goes on beyond them if it rises. Before the first,
    its value."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    at = min(bisect_left(xs, x), len(xs) - 1)
    slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
    return ys[at] + (max(0.0, slope) if x > xs[-1] else slope) * (x - xs[at])


@dataclass(frozen=True, slots=True)
class Costs:
    """rows: ascending, at least one. seconds: of a forward of so many rows of one request that see nothing yet."""

    rows: Sequence[float]
    seconds: Sequence[float]
    per_attended: float = 0.0
    per_cached: float = 0.0
    per_request: float = 0.0

    def forward(self, rows: float, context: float = 0.0, requests: float = 1.0) -> float:
        """Seconds of one forward of the target. rows: of all requests; context: tokens that a row sees on average;
        0 rows cost nothing."""
        if rows <= 0:
            return 0.0
        reading = self.per_attended * rows + self.per_cached * requests
        line = interpolated(self.rows, self.seconds, rows)
        return line + reading * context + self.per_request * max(0.0, requests - 1)

    def scaled(self, factors: Mapping[float, float]) -> Costs:
        """Of a machine that takes so many times as long, by the rows of a forward: other work beside it slows what is
        bound by arithmetic more than what is bound by memory. Even before the first of them and beyond the last; what
        context and requests add goes by the first."""
        xs = sorted(factors)
        ys = [factors[x] for x in xs]
        lines = [s * interpolated(xs, ys, min(n, xs[-1])) for n, s in zip(self.rows, self.seconds, strict=True)]
        return Costs(self.rows, lines, *(ys[0] * s for s in (self.per_attended, self.per_cached, self.per_request)))

    def to_json(self) -> dict[str, object]:
        return {
            "rows": list(self.rows),
            "seconds": list(self.seconds),
            "per_attended": self.per_attended,
            "per_cached": self.per_cached,
            "per_request": self.per_request,
        }

    @staticmethod
    def from_json(values: Mapping[str, object]) -> Costs:
        """ValueError if it is not what `to_json` wrote."""
        rows, seconds = values.get("rows"), values.get("seconds")
        more = [values.get(name) for name in ("per_attended", "per_cached", "per_request")]
        if not isinstance(rows, list) or not isinstance(seconds, list) or len(rows) != len(seconds) or not rows:
            raise ValueError("the costs are incomplete")
        numbers = [*rows, *seconds, *more]
        if any(isinstance(n, bool) or not isinstance(n, int | float) or not n >= 0 for n in numbers):
            raise ValueError("the costs are no numbers")
        if rows[0] < 1 or min(seconds) <= 0 or any(a >= b for a, b in pairwise(rows)):
            raise ValueError("the costs are out of order")
        return Costs(rows, seconds, *(float(str(value)) for value in more))


def fit(times: Mapping[Point, float]) -> Costs:
    """Costs from the seconds of measured forwards. Wanted: rows of one request behind a short context, best at several
    numbers of rows; behind a longer one at two numbers of rows, which tells what attending and reading cost; and rows
    of several requests. What is not told counts as 0."""
    single = {(rows, context): s for (rows, context, requests), s in times.items() if requests == 1}
    if not single:
        raise ValueError("no forward of one request was measured")
    per_attended, per_cached = _reading(single)
    lines: dict[int, list[float]] = {}
    for (rows, context), seconds in single.items():
        lines.setdefault(rows, []).append(seconds - (per_attended * rows + per_cached) * context)
    sizes = sorted(lines)
    base = [max(1e-9, min(lines[size])) for size in sizes]
    for i in range(len(base) - 2, -1, -1):  # fewer rows never cost more: what looks so was disturbed
        base[i] = min(base[i], base[i + 1])
    costs = Costs(sizes, base, per_attended, per_cached)
    extra = [
        (seconds - costs.forward(rows, context, requests)) / (requests - 1)
        for (rows, context, requests), seconds in times.items()
        if requests > 1
    ]
    return Costs(sizes, base, per_attended, per_cached, max(0.0, sum(extra) / len(extra)) if extra else 0.0)


def _reading(single: Mapping[tuple[int, int], float]) -> tuple[float, float]:
    """per_attended and per_cached: the least squares of what a token more of context costs at each number of rows."""
    slopes: dict[int, float] = {}  # seconds a token of context, by rows
    for (rows, context), seconds in single.items():
        for (others, longer), slower in single.items():
            if others == rows and longer > context:
                slopes[rows] = max(0.0, (slower - seconds) / (longer - context))
    if not slopes:
        return 0.0, 0.0
    if len(slopes) == 1:
        rows, slope = slopes.popitem()
        return slope / rows, 0.0
    slope, rest = statistics.linear_regression(list(slopes), list(slopes.values()))
    if slope < 0:
        return 0.0, statistics.mean(slopes.values())
    return (slope, rest) if rest >= 0 else (statistics.mean(s / rows for rows, s in slopes.items()), 0.0)
