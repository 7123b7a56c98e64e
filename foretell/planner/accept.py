"""How likely nodes are accepted, as far as the past tells: of drafters that say it themselves, and of others.

Both are counted for every request, with what all requests showed as a prior, so that a new request starts from what is
usual and an odd one is known as such after a few rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

DECAY = 0.97  # what a round weighs in the next one: some thirty rounds are remembered
TRUST = 6.0  # accepted nodes that the shared figures count for in one request
BELIEF = 6.0  # and that a drafter's own word counts for


class Scale:
    """For drafters that give each node a chance: how much truer or bolder than the truth these chances are."""

    def __init__(self) -> None:
        self.said = self.came = 0.0  # of all requests, decayed

    @property
    def factor(self) -> float:
        return (self.came + BELIEF) / (self.said + BELIEF)

    def of(self, own: Scale | None) -> float:
        """The factor of one request."""
        if own is None:
            return self.factor
        return (own.came + TRUST * self.factor) / (own.said + TRUST)

    def see(self, said: float, came: float, decay: float = DECAY) -> None:
        """said: sum of the chances of the nodes of a round; came: how many were accepted."""
        self.said = decay * self.said + said
        self.came = decay * self.came + came


class Depths:
    """For all others: of the nodes with one index in their trees, how many are accepted. A chain's index is depth."""

    FIRST = 0.6  # believed of the first node before anything was seen, and of each further one if the one before came

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._came: list[float] = []

    def see(self, nodes: int, accepted: Sequence[int], decay: float = DECAY) -> None:
        """One round: so many nodes were drafted, and those with these indices accepted."""
        grow = max(0, nodes - len(self._tried))
        self._tried += [0.0] * grow
        self._came += [0.0] * grow
        for i in range(nodes):
            self._tried[i] = decay * self._tried[i] + 1
            self._came[i] = decay * self._came[i] + (i in accepted)

    def chances(self, count: int, own: Depths | None = None) -> list[float]:
        """Of the nodes 0 .. count - 1, in one request; never rising."""
        chances: list[float] = []
        ratio, before = self.FIRST, 1.0
        for i in range(count):
            guess = before * ratio
            chance = self._mixed(i, guess, 2.0)
            if own is not None:
                chance = own._mixed(i, chance, TRUST)
            chance = min(chance, before)
            if i < len(self._tried) and self._tried[i] > 1:
                ratio = chance / before if before > 0 else 0.0
            chances.append(chance)
            before = chance
        return chances

    def _mixed(self, i: int, prior: float, weight: float) -> float:
        if i >= len(self._tried):
            return prior
        return (self._came[i] + weight * prior) / (self._tried[i] + weight)
