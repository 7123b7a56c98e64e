"""The same number of draft nodes in every round, within what the request and its end allow."""

from __future__ import annotations

import pytest
import torch

from foretell.planner.fixed import FixedPlanner
from foretell.types import Sampling, Seq


def make(generated: int = 1, *, prompt: int = 5, most: int = 100, asked: int | None = None) -> Seq:
    tokens = [1] * (prompt + generated)
    return Seq(0, tokens, prompt, Sampling(max_tokens=most, draft_tokens=asked), 0)


@pytest.mark.parametrize(("asked", "expected"), [(None, 6), (0, 0), (2, 2), (6, 6), (50, 6)])
def test_a_request_may_ask_for_fewer(asked: int | None, expected: int) -> None:
    """Pain L59: 0 and K of one request are honoured, and never more than the engine's own number."""
    planner = FixedPlanner(6, 4096)
    assert planner.budgets([make(asked=asked), make()], 1) == [expected, 6], "its neighbour is unaffected"


@pytest.mark.parametrize("generated", range(10))
def test_no_node_lies_beyond_max_tokens(generated: int) -> None:
    """A round adds its accepted nodes and one token of the target's own."""
    assert FixedPlanner(4, 4096).budgets([make(generated, most=10)], 1) == [min(4, 10 - generated - 1)]


@pytest.mark.parametrize("length", range(24, 32))
def test_no_node_lies_beyond_the_context(length: int) -> None:
    planner = FixedPlanner(4, 32)
    assert planner.budgets([make(0, prompt=length)], 1) == [min(4, 32 - length - 1)]
    assert planner.budgets([make(length - 5)], 1) == [min(4, 32 - length - 1)]


def test_never_negative() -> None:
    assert FixedPlanner(4, 8).budgets([make(10, most=10), make(9), make(0, prompt=8)], 1) == [0, 0, 0]


def test_a_plan_is_no_matter_of_tensors() -> None:
    assert all(isinstance(n, int) and not isinstance(n, torch.Tensor) for n in FixedPlanner(3, 64).budgets([make()], 1))
