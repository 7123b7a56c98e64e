"""The table of costs: what it says between and beyond the measured points, and how it is told from them."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.planner.cost import Costs, Point, fit, interpolated


def test_straight_lines_between_points() -> None:
    at = [interpolated([1, 4, 8], [10.0, 20.0, 16.0], x) for x in (0, 1, 2.5, 4, 6, 8, 100)]
    assert at == [10, 10, 15, 20, 18, 16, 16], "falling, it stays where it ends"
    assert interpolated([1, 3], [1.0, 2.0], 7) == 4 and interpolated([2], [5.0], 99) == 5


def test_a_forward_by_its_parts() -> None:
    costs = Costs([1, 5], [10.0, 14.0], per_attended=0.5, per_cached=0.25, per_request=2.0)
    assert costs.forward(3) == 12 and costs.forward(0) == 0
    assert costs.forward(3, 100) == 12 + 3 * 50 + 25
    assert costs.forward(3, 100, 3) == 12 + 3 * 50 + 3 * 25 + 2 * 2
    assert costs.scaled({1: 1.5}).forward(3, 100, 3) == 1.5 * costs.forward(3, 100, 3)


def test_a_slower_machine() -> None:
    costs = Costs([1, 3, 5, 9], [10.0, 12.0, 14.0, 18.0], per_attended=0.5).scaled({5: 2.0, 1: 1.5})
    assert [costs.forward(n) for n in (1, 3, 5, 9)] == [15, 1.75 * 12, 28, 36]
    assert costs.forward(1, 100) == 15 + 75


def test_the_parts_are_told_from_measured_forwards() -> None:
    true = Costs([1, 4, 16], [10.0, 11.0, 20.0], per_attended=0.01, per_cached=0.02, per_request=0.5)
    points: list[Point] = [(1, 16, 1), (4, 16, 1), (16, 16, 1), (1, 700, 1), (16, 700, 1), (4, 16, 4)]
    found = fit({point: true.forward(*point) for point in points})
    for point in [*points, (7, 300, 1), (32, 50, 8)]:
        assert found.forward(*point) == pytest.approx(true.forward(*point))


@pytest.mark.parametrize(
    ("longer", "attended", "cached"),
    [
        ({}, 0.0, 0.0),  # nothing tells what context costs
        ({(4, 116, 1): 14.0}, 0.01, 0.0),  # a single number of rows does not tell the two apart
        ({(1, 116, 1): 13.0, (4, 116, 1): 12.0}, 0.0, 0.025),  # more for fewer rows: noise, so their mean
        ({(1, 116, 1): 10.5, (4, 116, 1): 18.0}, 0.0125, 0.0),  # would be negative for no rows
    ],
)
def test_what_context_costs_is_never_negative(longer: dict[Point, float], attended: float, cached: float) -> None:
    found = fit({(1, 16, 1): 10.0, (4, 16, 1): 10.0, **longer})
    assert (found.per_attended, found.per_cached) == pytest.approx((attended, cached))


def test_fewer_rows_never_cost_more() -> None:
    assert list(fit({(1, 0, 1): 12.0, (2, 0, 1): 11.0, (4, 0, 1): 15.0}).seconds) == [11, 11, 15]
    with pytest.raises(ValueError, match="no forward of one request"):
        fit({(4, 0, 4): 1.0})


def test_what_is_kept_comes_back() -> None:
    costs = Costs([1, 5], [0.01, 0.02], 1e-7, 1e-6, 1e-3)
    assert Costs.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": None}, "incomplete"),
        ({"rows": [], "seconds": []}, "incomplete"),
        ({"seconds": [0.01]}, "incomplete"),
        ({"per_request": "0"}, "no numbers"),
        ({"per_cached": True}, "no numbers"),
        ({"per_attended": float("nan")}, "no numbers"),
        ({"rows": [5, 1]}, "out of order"),
        ({"seconds": [0.0, 0.02]}, "out of order"),
    ],
)
def test_what_is_no_table_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Costs.from_json(Costs([1, 5], [0.01, 0.02]).to_json() | change)
