"""Planning ahead of a run: what drafting gains by its length and the number of requests, from costs and acceptance.

A round of n draft nodes gives E(n) tokens and takes the time of a forward over all its rows and of the drafting; plain
decoding gives one token in a forward over one row for each request. The ratio is the speed-up of Leviathan et al.
(arXiv 2211.17192, theorem 3.8) where a forward costs the same whatever its rows; otherwise it is the goodput of
SmartSpec (arXiv 2406.14066). Knows no model, no clock and no file: values in, values out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.planner.cost import Costs

# nodes in all, requests -> what proposing them takes, with all else that a round does beside its forward: of no nodes,
# it is what plain decoding spends beside its own
Beside = Callable[[float, float], float]
Chances = npt.NDArray[np.float64]
MOST = 64  # requests at once that are looked at
LEAST = 1e-12  # chances below it are left out of sums


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a budget of draft nodes comes to, by budget, from 0 on.

    tokens: E, expected tokens of a round, the target's own included. nodes: of each budget, the chances that so many
    nodes (from 0 on) are proposed: a drafter need not use its budget.
    """

    tokens: Sequence[float]
    nodes: Sequence[Sequence[float]]

    @property
    def longest(self) -> int:
        return len(self.tokens) - 1


def chain(alphas: Sequence[float], longest: int) -> Acceptance:
    """Of chains that are always as long as they may be. alphas: the chance by depth that a node is accepted if the one
    before it was, the last one at all further depths too. ValueError if one is no chance."""
    wrong = next((alpha for alpha in alphas if not 0 <= alpha <= 1), None)
    if wrong is not None or not alphas:
        raise ValueError(f"alpha must lie between 0 and 1, one number or one for each depth, not {wrong}")
    reached, tokens = 1.0, [1.0]
    for depth in range(longest):
        reached *= alphas[min(depth, len(alphas) - 1)]
        tokens.append(tokens[-1] + reached)
    return Acceptance(tokens, [[0.0] * n + [1.0] for n in range(longest + 1)])


@dataclass(frozen=True, slots=True)
class Counted:
    """Rounds of decoding with one budget: how many they were and how many tokens they gave; `Stats.accepted_by_node`;
    sizes: in how many of them so many nodes, from 0 on, were computed."""

    budget: int
    rounds: int
    tokens: int
    accepted_by_node: Sequence[int]
    sizes: Sequence[int]


def measured(runs: Sequence[Counted]) -> Acceptance:
    """From runs of the same texts with several budgets.

    E of a budget that was run is what it was. Between two of these it rises as the acceptance of the larger one's nodes
    does, taken in the drafter's own order. One large budget alone would tell of all smaller ones if rounds began at the
    same places of the text; but they begin more often where guesses come true, and the more so the fewer tokens a round
    takes along, so a reading far below a run's own budget is too low.
    """
    tokens, nodes = [1.0], [[1.0]]
    for run in sorted(runs, key=lambda run: run.budget):
        low, base = len(tokens) - 1, tokens[-1]
        rise = run.tokens / run.rounds - base
        place = [0, *np.cumsum([*run.accepted_by_node, *[0] * run.budget][: run.budget]).tolist()]
        whole = place[run.budget] - place[low]
        for n in range(low + 1, run.budget + 1):
            share = (place[n] - place[low]) / whole if whole else (n - low) / (run.budget - low)
            tokens.append(base + rise * share)
            nodes.append(_cut(run.sizes, n))
    return Acceptance(tokens, nodes)


def _cut(sizes: Sequence[int], most: int) -> list[float]:
    """Chances of the sizes, the larger ones being `most`."""
    total = sum(sizes)
    kept = [*sizes[:most], *[0] * (most - len(sizes))]
    return [count / total for count in [*kept, total - sum(kept)]]


class Forecast:
    """Speeds by draft length (nodes of a request in a round at most) and batch (requests decoding at once). costs,
    beside: in seconds or in any other unit, the same for both. context: tokens before the root, on average."""

    def __init__(self, costs: Costs, beside: Beside, acceptance: Acceptance, context: float) -> None:
        self.costs, self.beside, self.acceptance, self.context = costs, beside, acceptance, context
        self._forwards: dict[tuple[int, int], float] = {}  # by rows and batch
        self._rounds: dict[tuple[int, int], float] = {}  # by length and batch

    @property
    def lengths(self) -> range:
        """That drafting may have: from 1 on."""
        return range(1, self.acceptance.longest + 1)

    def round_s(self, length: int, batch: int) -> float:
        """Of one round of all requests; length 0 is plain decoding."""
        key = length, batch
        if key not in self._rounds:
            chances = total(np.array(self.acceptance.nodes[length]), batch)
            self._rounds[key] = sum(
                float(chances[n]) * self._round_s(n, batch) for n in map(int, np.flatnonzero(chances > LEAST))
            )
        return self._rounds[key]

    def tokens_per_second(self, length: int, batch: int) -> float:
        """Of all requests together."""
        return batch * self.acceptance.tokens[length] / self.round_s(length, batch)

    def speedup(self, length: int, batch: int) -> float:
        """Over plain decoding of as many requests."""
        return self.tokens_per_second(length, batch) / self.tokens_per_second(0, batch)

    def best(self, batch: int) -> int:
        """The length of the largest speed-up, the shortest of equals; 0 if none is faster than plain decoding."""
        return max(range(self.acceptance.longest + 1), key=lambda length: self.speedup(length, batch))

    def stops_at(self, most: int = MOST) -> int | None:
        """The smallest batch at which no length gains; None if there is none up to `most`."""
        return next((batch for batch in range(1, most + 1) if self.best(batch) == 0), None)

    def break_even(self, length: int, batch: int) -> float | None:
        """alpha, the same at all depths, at which chains of that length, always proposed whole, are as fast as plain
        decoding; None if not even alpha = 1 makes up for what they cost."""
        return alpha_of(self._round_s(length * batch, batch) / self.round_s(0, batch), length)

    def schedule(self, most: int = MOST) -> list[tuple[int, int, int]]:
        """(first batch, last batch, best length) up to `most`, neighbours of the same length together."""
        found: list[tuple[int, int, int]] = []
        for batch in range(1, most + 1):
            best = self.best(batch)
            if found and found[-1][2] == best:
                found[-1] = found[-1][0], batch, best
            else:
                found.append((batch, batch, best))
        return found

    def _round_s(self, nodes: int, batch: int) -> float:
        """Of a round in which that many nodes are proposed in all."""
        rows = batch + nodes
        if (rows, batch) not in self._forwards:
            self._forwards[rows, batch] = self.costs.forward(rows, self.context, batch)
        return self._forwards[rows, batch] + self.beside(nodes, batch)


def total(chances: Chances, count: int) -> Chances:
    """The law of the sum of `count` independent draws. chances, result: float64, of 0, 1, 2, ..."""
    result, square = np.ones(1), chances
    while count:
        if count % 2:
            result = np.convolve(result, square)
        count //= 2
        if count:
            square = np.convolve(square, square)
    return result


def alpha_of(tokens: float, length: int) -> float | None:
    """alpha, the same at all depths, at which chains of that length come to E tokens; None if no alpha does."""
    if tokens > length + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(length + 1)) < tokens else (low, middle)
    return high


def cost_per_million(price_per_hour: float, tokens_per_second: float) -> float:
    """Of a million tokens, in the price's own currency."""
    return price_per_hour / 3600 / tokens_per_second * 1e6
