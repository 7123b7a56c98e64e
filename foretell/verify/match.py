"""Rule `match`, the default: the target draws its own token, a node stays if it is that token.

At a row the target takes argmax(log p + g), g Gumbel noise keyed by seed and absolute position alone; temperature 0 is
the same with g = 0. The text is then a function of the target's logits and the seed: no drafter, draft length, batch or
load can change it. A drafter that adds the same g to its own logits guesses the target's draw and not only its mode:
P(equal) >= (1 - TV) / (1 + TV) (Daliri et al. 2024, arXiv 2408.07978). No q is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from foretell.sampling.noise import Array, Purpose, gumbel
from foretell.types import Drafts, Keys, Law, Picks, Verdict
from foretell.verify.rule import ROOT, Tree, Walk, drive, pick, plant

NOISE_BYTES = 64 << 20


class Match:
    """See the module. Its only state is a bounded store of noise already made, which changes time and nothing else."""

    lossless = True
    trees = True
    laws = False

    def __init__(self, noise_bytes: int = NOISE_BYTES) -> None:
        self.noise_bytes = noise_bytes
        self.made: OrderedDict[tuple[int, int], Array] = OrderedDict()
        self.bytes = 0

    def draw(self, logits: Tensor, keys: Keys, k: int) -> Picks:
        """The k largest of log q + g, with the g the target will use there: coupled, not independent, guesses."""
        return pick(logits, keys, k, lambda seed, position, _, n: self.noise(seed, position, n), keep=False)

    def verify(self, law: Law, drafts: Drafts, keys: Keys) -> Verdict:
        walks = [
            follow(tree, self.chooser(seed, position, temperature))
            for tree, seed, position, temperature in zip(
                plant(drafts), keys.seed, keys.position, keys.temperature, strict=True
            )
        ]
        return drive(walks, law, drafts)

    def chooser(self, seed: int, position: int, temperature: float) -> Callable[[int, Array], int]:
        """(depth, log p [V]) -> the target's token."""

        def choose(depth: int, logp: Array) -> int:
            if temperature == 0:
                return int(logp.argmax())
            return int((logp + self.noise(seed, position + depth, logp.size)).argmax())

        return choose

    def noise(self, seed: int, position: int, n: int) -> Array:
        """float64 [n], Gumbel noise of the position: made once for draft and target while the store holds it."""
        key = (seed, position)
        made = self.made.get(key)
        if made is None or made.size < n:
            self.bytes -= 0 if made is None else made.nbytes
            made = self.made[key] = gumbel(seed, Purpose.TARGET, position, 0, n)
            self.bytes += made.nbytes
            while self.bytes > self.noise_bytes:
                self.bytes -= self.made.popitem(last=False)[1].nbytes
        else:
            self.made.move_to_end(key)
        return made[:n]


def follow(tree: Tree, choose: Callable[[int, Array], int]) -> Walk:
    """Down the tree along the target's own tokens; the first that is no child ends the round."""
    path: list[int] = []
    node = ROOT
    while True:
        token = choose(len(path), (yield node))
        child = next((c for c in tree.children[node] if tree.tokens[c] == token), None)
        if child is None:
            return path, token
        path.append(child)
        node = child
