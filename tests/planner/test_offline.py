"""The arithmetic of plans, against the formulas of the literature and against slow sums."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.planner.cost import Costs
from foretell.planner.given import Machine, roofline, steps, table
from foretell.planner.offline import (
    Acceptance,
    Beside,
    Counted,
    Forecast,
    alpha_of,
    chain,
    cost_per_million,
    measured,
    total,
)

ALPHAS = st.floats(0, 1)
GAMMAS = st.floats(0, 2)


Both = tuple[Costs, Beside]


def flat(gamma: float) -> Both:
    """A forward takes 1, whatever its rows."""
    return table({1: 1.0}), steps(table({1: 1.0}), gamma)


def linear(gamma: float = 0.0, row: float = 0.1) -> Both:
    """Every row after the first adds to a forward."""
    costs = table({1: 1.0, 2: 1 + row})
    return costs, steps(costs, gamma)


def kneed(knee: float) -> Both:
    """A forward costs the same up to a number of rows and grows in proportion beyond."""
    costs = table({1: knee, knee: knee, 2 * knee: 2 * knee})
    return costs, steps(costs)


def geometric(alpha: float, length: int) -> float:
    return length + 1 if alpha == 1 else (1 - alpha ** (length + 1)) / (1 - alpha)


@given(ALPHAS, st.integers(1, 20), GAMMAS)
def test_speedup_is_that_of_the_literature(alpha: float, length: int, gamma: float) -> None:
    """Leviathan et al. 2023, theorem 3.8: (1 - alpha^(K+1)) / ((1 - alpha)(1 + K gamma))."""
    forecast = Forecast(*flat(gamma), chain([alpha], length), context=100)
    assert forecast.acceptance.tokens[length] == pytest.approx(geometric(alpha, length), rel=1e-6)
    assert forecast.speedup(length, 1) == pytest.approx(geometric(alpha, length) / (1 + length * gamma), rel=1e-6)


@given(st.lists(st.fractions(0, 1), min_size=1, max_size=5), st.integers(1, 8))
def test_tokens_are_those_of_every_outcome(alphas: list[Fraction], length: int) -> None:
    """E by enumerating how many nodes of a chain are accepted."""
    at = [alphas[min(depth, len(alphas) - 1)] for depth in range(length)]
    expected = Fraction(0)
    for accepted in range(length + 1):
        chance = Fraction(1)
        for alpha in at[:accepted]:
            chance *= alpha
        expected += (accepted + 1) * chance * (1 - at[accepted] if accepted < length else 1)
    assert chain([float(a) for a in alphas], length).tokens[-1] == pytest.approx(float(expected))


def test_plain_decoding_has_a_speedup_of_one() -> None:
    forecast = Forecast(*linear(0.3), chain([0.9], 4), context=10)
    assert all(forecast.speedup(0, batch) == 1 for batch in (1, 3, 64))


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), min_size=1, max_size=1), st.integers(1, 4)
)
def test_rounds_are_averaged_over_what_is_proposed(counts: list[list[int]], batch: int) -> None:
    """A drafter that does not always use its budget, against a sum over all that the requests may propose."""
    law = np.array(counts[0]) / sum(counts[0])
    length = len(law) - 1
    costs = Costs([1, 2, 4, 30], [2, 5, 17, 901], per_attended=0.1, per_cached=0.2, per_request=0.3)
    beside = steps(costs, gamma=0.25)
    acceptance = Acceptance([1.0] * len(law), [[1.0], *([*law] for _ in range(length))] if length else [law.tolist()])
    expected = 0.0
    for proposed in itertools.product(range(len(law)), repeat=batch):
        chance = float(np.prod(law[list(proposed)]))
        rows = batch + sum(proposed)
        expected += chance * (costs.forward(rows, 30, batch) + beside(sum(proposed), batch))
    assert Forecast(costs, beside, acceptance, context=30).round_s(length, batch) == pytest.approx(expected)


def test_the_law_of_a_sum() -> None:
    assert total(np.array([0.5, 0.5]), 3).tolist() == [1 / 8, 3 / 8, 3 / 8, 1 / 8]
    assert total(np.array([0.0, 1.0]), 5).tolist() == [0, 0, 0, 0, 0, 1]


@given(st.floats(0.01, 0.99), st.integers(1, 12))
def test_alpha_of_is_the_inverse_of_e(alpha: float, length: int) -> None:
    found = alpha_of(geometric(alpha, length), length)
    assert found is not None and found == pytest.approx(alpha, abs=1e-6)


@given(GAMMAS, st.floats(0, 0.5), st.integers(1, 12), st.integers(1, 16))
def test_break_even_is_where_the_speedup_is_one(gamma: float, row: float, length: int, batch: int) -> None:
    costs = linear(gamma, row)
    alpha = Forecast(*costs, chain([0.5], length), context=10).break_even(length, batch)
    if alpha is None:
        assert Forecast(*costs, chain([1.0], length), context=10).speedup(length, batch) < 1
    else:
        assert Forecast(*costs, chain([alpha], length), context=10).speedup(length, batch) == pytest.approx(1, rel=1e-6)


def test_break_even_of_one_token_is_gamma() -> None:
    """E = 1 + alpha against 1 + gamma."""
    assert Forecast(*flat(0.3), chain([0.5], 3), 10).break_even(1, 1) == pytest.approx(0.3)
    assert Forecast(*flat(1.2), chain([0.5], 3), 10).break_even(1, 1) is None
    assert Forecast(*flat(0.0), chain([0.5], 3), 10).break_even(3, 1) == pytest.approx(0, abs=1e-9)


def test_the_best_length_by_hand() -> None:
    """alpha 1/2, gamma 1/4: 1.5/1.25, 1.75/1.5, ... the first is best."""
    forecast = Forecast(*flat(0.25), chain([0.5], 6), context=10)
    assert forecast.best(1) == 1 and forecast.speedup(1, 1) == pytest.approx(1.2)
    assert Forecast(*flat(0.0), chain([0.5], 6), context=10).best(1) == 6
    assert Forecast(*flat(0.0), chain([0.0], 6), context=10).best(1) == 0, "nothing is gained, so nothing is drafted"
    assert Forecast(*flat(0.5), chain([0.5], 6), context=10).best(1) == 0, "a tie goes to plain decoding"


def test_where_it_stops_to_pay() -> None:
    """Reading the weights takes as long as computing 8 rows, and drafting is free: with alpha = 1/2 one node pays while
    max(8, 2 B) < 1.5 max(8, B), which is up to B = 5 (10 < 12), not B = 6 (12 = 12)."""
    forecast = Forecast(*kneed(8), chain([0.5], 1), context=10)
    assert [forecast.best(batch) for batch in (1, 4, 5, 6, 7)] == [1, 1, 1, 0, 0]
    assert forecast.stops_at() == 6 and forecast.stops_at(5) is None
    assert forecast.schedule(8) == [(1, 5, 1), (6, 8, 0)]
    assert Forecast(*flat(0.0), chain([0.5], 1), context=10).stops_at() is None


def test_a_drafter_as_slow_as_its_target_is_off() -> None:
    """Pain A1 (vLLM 15025): 135M drafts for 1.7B. It has 30 layers and the target 24, so its step takes about as long,
    and at very high acceptance drafting is slower than plain decoding: the more so, the longer the drafts."""
    slow = table({1: 0.0100, 4: 0.0101, 16: 0.0110})
    forecast = Forecast(slow, steps(slow, step_s=0.0098), chain([0.95], 8), 500)
    assert forecast.best(1) == 0 and forecast.stops_at() == 1
    gains = [forecast.speedup(length, 1) for length in forecast.lengths]
    assert gains == sorted(gains, reverse=True) and 0.7 < gains[-1] < 0.85 < gains[0] < 1
    even = table({1: 0.01})
    assert Forecast(even, steps(even, step_s=0.001), chain([0.95], 8), 500).best(1) == 8


@given(ALPHAS, ALPHAS, GAMMAS, st.integers(1, 10), st.integers(1, 8))
def test_more_acceptance_is_never_slower(one: float, other: float, gamma: float, length: int, batch: int) -> None:
    low, high = sorted((one, other))
    forecasts = [Forecast(*linear(gamma), chain([alpha], length), context=10) for alpha in (low, high)]
    assert forecasts[0].speedup(length, batch) <= forecasts[1].speedup(length, batch) + 1e-12
    assert (
        forecasts[0].speedup(forecasts[0].best(batch), batch)
        <= forecasts[1].speedup(forecasts[1].best(batch), batch) + 1e-12
    )


@given(ALPHAS, GAMMAS, GAMMAS, st.integers(1, 10), st.integers(1, 8))
def test_a_dearer_drafter_is_never_faster(alpha: float, one: float, other: float, length: int, batch: int) -> None:
    low, high = (Forecast(*linear(gamma), chain([alpha], length), context=10) for gamma in sorted((one, other)))
    assert high.speedup(length, batch) <= low.speedup(length, batch) + 1e-12
    needed = low.break_even(length, batch), high.break_even(length, batch)
    assert needed[1] is None or (needed[0] is not None and needed[0] <= needed[1] + 1e-9)


@given(ALPHAS, st.integers(1, 8), st.floats(1, 40))
def test_load_never_helps_where_reading_weights_is_shared(alpha: float, length: int, knee: float) -> None:
    forecast = Forecast(*kneed(knee), chain([alpha], length), context=10)
    gains = [forecast.speedup(forecast.best(batch), batch) for batch in (1, 2, 4, 8, 16, 32, 64)]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(gains)) and gains[-1] >= 1


def counted(budget: int, rounds: Sequence[tuple[int, Sequence[int]]]) -> Counted:
    """From each round's number of nodes and its accepted ones."""
    nodes = [node for _, path in rounds for node in path]
    sizes = [size for size, _ in rounds]
    return Counted(
        budget,
        len(rounds),
        len(nodes) + len(rounds),
        [nodes.count(node) for node in range(max(sizes))],
        [sizes.count(size) for size in range(max(sizes) + 1)],
    )


def test_one_run_is_read_off_node_by_node() -> None:
    run = counted(4, [(4, [0, 2]), (2, [1]), (4, []), (0, [])])  # nodes 0, 1, 2 are accepted once in four rounds each
    found = measured([run])
    assert found.tokens == pytest.approx([1, 1.25, 1.5, 1.75, 1.75])
    assert [list(law) for law in found.nodes] == [
        [1],
        [1 / 4, 3 / 4],
        [1 / 4, 0, 3 / 4],
        [1 / 4, 0, 1 / 4, 2 / 4],
        [1 / 4, 0, 1 / 4, 0, 2 / 4],
    ]


def test_budgets_that_were_run_are_what_they_were() -> None:
    """And between them E rises with the acceptance of the larger one's nodes."""
    small = counted(1, [(1, [0]), (1, [])])  # 3 tokens in 2 rounds
    large = counted(4, [(4, [0, 1, 3]), (4, [1]), (4, []), (4, [0, 3])])  # 10 tokens in 4: nodes 0, 1, 3 twice each
    found = measured([large, small])
    assert found.tokens == pytest.approx([1, 1.5, 2.0, 2.0, 2.5])
    assert list(found.nodes[1]) == [0, 1] and list(found.nodes[2]) == [0, 0, 1]
    nothing = measured([small, counted(3, [(3, []), (3, [])])])
    assert nothing.tokens == pytest.approx([1, 1.5, 1.25, 1.0]), "no node tells how E goes on: a straight line"


@pytest.mark.parametrize("alphas", [[], [1.1], [0.5, -0.1], [float("nan")]])
def test_what_is_no_chance_is_refused(alphas: list[float]) -> None:
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1"):
        chain(alphas, 4)


def test_price() -> None:
    assert cost_per_million(3.6, 1000) == pytest.approx(1.0)  # 3.6 an hour is a thousandth a second


def test_a_roofline_is_bound_by_what_takes_longer() -> None:
    machine = Machine(weights=100.0, bandwidth=50.0, parameters=10.0, flops=100.0, kv=5.0)
    forward = roofline(machine).forward
    assert forward(1, 0, 1) == 2 and forward(10, 0, 1) == 2 and forward(20, 0, 1) == 4, "0.2 a row, 2 for the weights"
    assert forward(500, 0, 1) == pytest.approx(100) and forward(15, 0, 1) == pytest.approx(3)
    assert forward(1, 30, 1) == 2 + 30 * 5 / 50
    assert forward(8, 30, 2) == forward(2, 30, 2) == 2 + 2 * 30 * 5 / 50, "rows of a request share its keys"
    assert roofline(Machine(100.0, 50.0, 10.0)).forward(1000, 0, 1) == 2
    computing = roofline(Machine(1.0, 50.0, 10.0, 100.0)).forward
    assert [computing(rows, 0, 1) for rows in (1, 2, 10)] == pytest.approx([0.2, 0.4, 2.0]), "bound from one row on"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: table({}),
        lambda: table({0: 1.0}),
        lambda: table({1: 0.0}),
        lambda: Machine(0.0, 1.0, 1.0),
        lambda: Machine(1.0, 1.0, 1.0, kv=-1.0),
        lambda: steps(table({1: 1.0}), -0.1),
        lambda: steps(table({1: 1.0}), step_s=-0.1),
    ],
)
def test_impossible_costs_are_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError):
        wrong()


def test_drafting_goes_by_steps() -> None:
    """A step drafts a node for every request: so many steps as each has nodes."""
    costs = table({1: 10.0, 4: 16.0})
    assert steps(costs, gamma=0.5)(12, 4) == 3 * 0.5 * 16
    assert steps(costs, step_s=2.0)(12, 4) == 6
