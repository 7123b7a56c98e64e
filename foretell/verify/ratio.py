"""Rule `ratio`: rejection sampling over chains and trees, recursive over siblings. Emits tokens of exactly p.

At an accepted node, with r = p at first, its children are tried in their order: x is kept with probability
min(1, r(x) / q(x)), else r becomes max(0, r - q), normalised (Leviathan et al. 2023, arXiv 2211.17192; Chen et al.
2023, arXiv 2302.01318; several children: SpecInfer, arXiv 2305.09781; without replacement: RSD, arXiv 2402.14160). If
none is kept the next token comes from r, at a leaf from p.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretell.sampling.noise import Array
from foretell.types import Drafts, Keys, Law, Picks, Verdict
from foretell.verify.rule import (
    ROOT,
    Coins,
    Tree,
    Walk,
    drive,
    excess,
    keyed_coins,
    plant,
    probabilities,
    sample,
    without,
)


class Ratio:
    """See the module."""

    lossless = True
    trees = True
    laws = True
    noise_bytes = 0

    def draw(self, logits: Tensor, keys: Keys, k: int) -> Picks:
        return sample(logits, keys, k)

    def verify(self, law: Law, drafts: Drafts, keys: Keys) -> Verdict:
        walks = [walk(tree, coins) for tree, coins in zip(plant(drafts), keyed_coins(keys), strict=True)]
        return drive(walks, probabilities(law), drafts)


def walk(tree: Tree, coins: Coins) -> Walk:
    """Down the tree, from each node to the first of its children that is kept; is sent p [V]."""
    path: list[int] = []
    node = ROOT
    while True:
        rest = yield node
        siblings = tree.children[node]
        for number, child in enumerate(siblings):
            q = proposal(tree, siblings[:number], child)
            token = tree.tokens[child]
            if coins.accept(len(path), number, rest[token] if q is None else rest[token] / q[token]):
                path.append(child)
                node = child
                break
            rest = residual(rest, q, token)
        else:
            return path, coins.choose(len(path), rest, own=not siblings)


def proposal(tree: Tree, earlier: Sequence[int], child: int) -> Array | None:
    """The law [V] that child was drawn from, given its earlier siblings; None is a point mass.

    Without replacement it is q with the siblings drawn before from the same q struck out, renormalised. Once they have
    taken all of q nothing was left to chance, and the child is a point mass.
    """
    row = tree.row[child]
    if row < 0:
        return None
    q = tree.laws[row]
    struck = [tree.tokens[s] for s in earlier if tree.row[s] == row] if tree.distinct else []
    if struck:
        q = without(q, struck)
        total = q.sum()
        if total == 0:
            return None
        q = q / total
    if not q[tree.tokens[child]] > 0:
        raise ValueError(
            f"drafted token {tree.tokens[child]} has no probability under the q it came with: "
            "hand over the q of the `draw` that made it"
        )
    return q


def residual(rest: Array, q: Array | None, token: int) -> Array:
    """[V], normalised max(0, rest - q).

    Where nothing is left, rest equals q up to rounding and the rejection was a matter of rounding too: rest stands.
    """
    left = excess(rest, q, token)
    total = left.sum()
    return left / total if total > 0 else rest
