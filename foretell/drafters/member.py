"""Any drafter as a source of a mixture: its tree is what it guesses.

Its nodes become guesses of the search, which takes those it finds worth their place, so they count as certain guesses
(point masses) whatever they were drawn from: exact under every rule, since what they were drawn with has nothing to do
with how they are verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretell.drafters.base import Drafter, Progress
from foretell.drafters.search import Guess, Source
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.types import Draw, Seen, Seq

NODES = 4  # it may propose: each costs it a pass, and the others fill the rest of the tree
DEPTHS = 4  # kinds of nodes by their depth, the deepest together


class MemberSource(Source):
    """kinds: by depth, of a node's first child, then of its others."""

    kinds = (1.4, 1.6, 1.7, 1.8, -0.5, -0.5, -0.5, -0.5)

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._cache: Cache
        self._trees: dict[int, dict[tuple[int, ...], list[Guess]]] = {}  # request id -> guesses by path

    def attach(self, cache: Cache) -> None:
        self._cache = cache
        self.drafter.attach(cache)

    def warm(self, target: Target, cache: Cache, progress: Progress) -> None:
        self.drafter.warm(target, cache, progress)

    def reset(self) -> None:
        self.drafter.reset()

    def observe(self, seen: Seen) -> None:
        self.drafter.observe(seen)

    def admit(self, seq: Seq) -> None:
        self.drafter.admit(seq)

    def forget(self, seq: Seq) -> None:
        self._trees.pop(seq.id, None)
        self.drafter.forget(seq)

    def prepare(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> None:
        drafts = self.drafter.propose(seqs, [min(n, NODES) for n in budget], draw)
        for seq, (tokens, parents) in zip(seqs, drafts.trees(), strict=True):
            self._trees[seq.id] = _by_path(tokens, parents)
            self._cache.unwrite(seq, len(seq.tokens) - seq.cached)  # other nodes will have these slots

    def view(self, seq: Seq) -> MemberView:
        return MemberView(self._trees.get(seq.id, {}))


class MemberView:
    def __init__(self, guesses: dict[tuple[int, ...], list[Guess]]) -> None:
        self._guesses = guesses

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        return self._guesses.get(path, ())


def _by_path(tokens: Sequence[int], parents: Sequence[int]) -> dict[tuple[int, ...], list[Guess]]:
    """What a tree says may follow each of its paths."""
    paths: list[tuple[int, ...]] = []
    guesses: dict[tuple[int, ...], list[Guess]] = {}
    for token, parent in zip(tokens, parents, strict=True):
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, token))
        beside = guesses.setdefault(above, [])
        beside.append((token, min(len(above), DEPTHS - 1) + (DEPTHS if beside else 0)))
    return guesses
