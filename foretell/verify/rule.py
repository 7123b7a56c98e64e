"""What the rules share: the interface, the walk over a forest, and the draw of the rules that keep q.

A rule is written once per request as a *walk*: a generator that yields the node whose row it must see (-1: the root),
is sent that row of the target's law, and returns (accepted nodes, next token). `drive` runs the walks of a batch side
by side, one call of the law per level, so only rows on accepted paths are ever shaped. A walk makes its random
decisions through `Coins` and computes with numpy arrays of any number type: the tests run the same walks on Fractions,
with coins that enumerate every outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from foretell.sampling.noise import Array, Purpose, gumbel, uniform
from foretell.sampling.shape import best_ids, soften, softmax, widen
from foretell.types import Drafts, Keys, Law, Picks, Verdict

Walk = Generator[int, Array, tuple[list[int], int]]
ROOT = -1


class Rule(Protocol):
    """Both ends of the randomness: how drafts are drawn and how they are verified. Holds no state that shows."""

    lossless: bool
    trees: bool  # it verifies more than chains
    laws: bool  # its draw keeps q, float64 [V] for each node that is not certain
    noise_bytes: int  # of noise kept between steps, at most

    def draw(self, logits: Tensor, keys: Keys, k: int) -> Picks:
        """`types.Draw`. At most one draw for a node in a round: a second would repeat the noise of the first."""
        ...

    def verify(self, law: Law, drafts: Drafts, keys: Keys) -> Verdict:
        """keys: [B], of the token chosen at each request's root; a node at depth d (root 0) chooses position + d."""
        ...


@dataclass(frozen=True, slots=True)
class Tree:
    """One request's drafts, n nodes, as a walk reads them."""

    tokens: Sequence[int]  # [n]
    children: Sequence[Sequence[int]]  # [n+1]  of each node, in their order; the last entry, index -1, is the root's
    row: Sequence[int]  # [n]  which law; -1: a point mass
    laws: Sequence[Array]  # [M] of [V]  q
    distinct: bool  # nodes of one parent and one law were drawn without replacement


class Coins(Protocol):
    """One request's random decisions of one round, all independent."""

    def accept(self, depth: int, number: int, chance: Any) -> bool:
        """True with probability min(1, chance); number tells the siblings at one depth apart."""
        ...

    def choose(self, depth: int, weights: Array, own: bool) -> int:
        """A token drawn in proportion to weights [V]; own: they are the target's law itself, not a residual."""
        ...


@dataclass(frozen=True, slots=True)
class KeyedCoins:
    """`Coins` from noise keyed by seed, position and round.

    A walk is at one node of each depth, so (position, number) names a decision. The target's own token uses the very
    noise of plain decoding, which nothing else under these rules reads: with no drafts the tokens are those of `match`.
    """

    seed: int
    position: int
    round: int
    temperature: float

    def accept(self, depth: int, number: int, chance: float) -> bool:
        u = uniform(self.seed, Purpose.ACCEPT, self.position + depth, self.round, number + 1)[number]
        return bool(u < chance)

    def choose(self, depth: int, weights: Array, own: bool) -> int:
        if self.temperature == 0:
            return int(weights.argmax())
        purpose, round = (Purpose.TARGET, 0) if own else (Purpose.RESIDUAL, self.round)
        noise = gumbel(self.seed, purpose, self.position + depth, round, weights.size)
        alive = np.flatnonzero(weights)
        return int(alive[(np.log(weights[alive]) + noise[alive]).argmax()])


def keyed_coins(keys: Keys) -> list[KeyedCoins]:
    """One per request."""
    return [KeyedCoins(*key) for key in zip(keys.seed, keys.position, keys.round, keys.temperature, strict=True)]


def plant(drafts: Drafts) -> list[Tree]:
    """The forest as one `Tree` per request."""
    drawn = drafts.drawn
    laws: list[Array] = [] if drawn is None else list(drawn.q.numpy(force=True))
    rows = [-1] * drafts.tokens.numel() if drawn is None else drawn.row.tolist()
    ends = drafts.indptr.tolist()
    trees = []
    for (tokens, parents), start, end in zip(drafts.trees(), ends, ends[1:], strict=False):
        children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
        for node, parent in enumerate(parents):
            children[parent].append(node)
        trees.append(Tree(tokens, children, rows[start:end], laws, drawn is not None and drawn.distinct))
    return trees


def drive(walks: Sequence[Walk], law: Law, drafts: Drafts) -> Verdict:
    """Run each request's walk to its end; one call of the law for all that still go."""
    roots = [start + b for b, start in enumerate(drafts.indptr.tolist()[:-1])]
    accepted: list[list[int]] = [[] for _ in walks]
    next_token = [0] * len(walks)
    wanted = {b: next(walk) for b, walk in enumerate(walks)}
    while wanted:
        rows: Array = law([roots[b] + 1 + node for b, node in wanted.items()]).numpy(force=True)
        going = {}
        for b, row in zip(wanted, rows, strict=True):
            try:
                going[b] = walks[b].send(row)
            except StopIteration as end:
                accepted[b], next_token[b] = end.value
        wanted = going
    return Verdict(accepted, next_token)


def probabilities(law: Law) -> Law:
    """The same law with rows that sum to 1 in place of logarithms."""

    def normalised(rows: Sequence[int]) -> Tensor:
        logp: Array = law(rows).numpy(force=True)
        return torch.from_numpy(np.stack([softmax(row - row.max()) for row in logp]))

    return normalised


def without(weights: Array, tokens: Sequence[int]) -> Array:
    """weights [V] with the tokens' own set to 0."""
    rest = weights.copy()
    rest[list(tokens)] = 0
    return rest


def excess(p: Array, q: Array | None, token: int) -> Array:
    """max(0, p - q), [V], not normalised; q None: the point mass at token, of which p is nowhere in excess there."""
    return without(p, [token]) if q is None else np.maximum(p - q, 0)


def sample(logits: Tensor, keys: Keys, k: int) -> Picks:
    """`Draw` of the rules that keep q: k draws without replacement from softmax(logits / temperature), in their order.

    The k largest of log q + g, larger first, are k such draws (Gumbel top-k: Kool et al. 2019, arXiv 1903.06059). g is
    keyed by purpose, position and round, so nodes of one depth of a tree share it, as do requests of equal seed. That
    keeps the law of either: a walk reads the draws below one node of each depth, chosen by shallower draws and coins of
    which g is independent; given that node its draws have law q, however they go with draws that the walk never reads.

    Temperature 0 is a point mass, its first draw the best token; when a law has no mass left the draws that follow are
    certain, and `ratio` takes them so. q is None only if every row has temperature 0.
    """

    def noise(seed: int, position: int, round: int, n: int) -> Array:
        return gumbel(seed, Purpose.DRAFT, position, round, n)

    return pick(logits, keys, k, noise, keep=any(temperature > 0 for temperature in keys.temperature))


def pick(logits: Tensor, keys: Keys, k: int, noise: Callable[[int, int, int, int], Array], keep: bool) -> Picks:
    """The k best of log q + noise(seed, position, round, V), of the logits at temperature 0; keep: with q."""
    m, n = logits.shape
    if k > n:
        raise ValueError(f"{k} different tokens cannot be drawn from a vocabulary of {n}")
    x = np.empty(n)
    tokens, score = np.empty((m, k), dtype=np.int64), np.empty((m, k))
    q = np.zeros((m, n)) if keep else None
    keyed = zip(keys.seed, keys.position, keys.round, keys.temperature, strict=True)
    for i, (seed, position, round, temperature) in enumerate(keyed):
        widen(logits[i], x)
        soften(x, temperature or 1.0)
        mass = np.exp(x)
        total = mass.sum()
        if temperature == 0:
            tokens[i] = best_ids(x, k)
            if q is not None:
                q[i, tokens[i, 0]] = 1.0
        else:
            noisy = x + noise(seed, position, round, n)
            if q is not None:
                q[i] = mass / total
                noisy[q[i] == 0] = -np.inf  # rounded to 0: q as it stands is what is drawn from
            tokens[i] = best_ids(noisy, k)
        score[i] = x[tokens[i]] - np.log(total)
    return Picks(torch.from_numpy(tokens), torch.from_numpy(score), None if q is None else torch.from_numpy(q))
