"""Rule `block`: block verification of chains (Sun et al. 2024, arXiv 2403.10444), no shorter than `ratio` on average.

With s_0 = 1, s_i = min(1, s_{i-1} p(x_i) / q(x_i)) and S_i = sum of max(0, s_i p - q) over the next token, prefix i is
good with probability h_i = S_i / (S_i + 1 - s_i), at the end of the chain h = s. The longest good prefix is kept; the
next token comes from max(0, s p - q) there, from p at the end of the chain. A node that was not drawn is the case of q
a point mass. The end of a chain may depend on its tokens: the last one included.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foretell.types import Drafts, Keys, Law, Picks, Verdict
from foretell.verify.ratio import proposal
from foretell.verify.rule import ROOT, Coins, Tree, Walk, drive, excess, keyed_coins, plant, probabilities, sample


class Block:
    """See the module."""

    lossless = True
    trees = False
    laws = True
    noise_bytes = 0

    def draw(self, logits: Tensor, keys: Keys, k: int) -> Picks:
        if k != 1:
            raise ValueError(f"rule 'block' verifies chains, so it draws 1 token at a time, not {k}: use rule 'match'")
        return sample(logits, keys, 1)

    def verify(self, law: Law, drafts: Drafts, keys: Keys) -> Verdict:
        trees = plant(drafts)
        if any(len(children) > 1 for tree in trees for children in tree.children):
            raise ValueError("rule 'block' verifies chains; use rule 'match' or 'ratio' for trees")
        walks = [walk(tree, coins) for tree, coins in zip(trees, keyed_coins(keys), strict=True)]
        return drive(walks, probabilities(law), drafts)


def walk(tree: Tree, coins: Coins) -> Walk:
    """Down the chain while s > 0, remembering the longest good prefix; is sent p [V]."""
    path: list[int] = []
    share: Any = 1  # s
    p = yield ROOT
    kept, weights = 0, p
    while children := tree.children[path[-1] if path else ROOT]:
        token = tree.tokens[children[0]]
        q = proposal(tree, (), children[0])
        left = excess(share * p, q, token)
        total = left.sum()
        # the empty prefix is always good; where nothing is left its weights stay p: only rounding can ask for them
        if total > 0 and (not path or coins.accept(len(path), 0, total / (total + (1 - share)))):
            kept, weights = len(path), left
        share = min(1, share * p[token] / (1 if q is None else q[token]))
        if share == 0:
            break
        path.append(children[0])
        p = yield children[0]
    else:
        if not path or coins.accept(len(path), 0, share):
            return path, coins.choose(len(path), p, own=True)
    return path[:kept], coins.choose(kept, weights, own=False)
