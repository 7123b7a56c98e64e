"""One tree from one or many sources of guesses: the nodes that the target most likely reaches, whoever guessed them.

A source says what may follow a text; the search asks it about every node it opens and takes the likeliest next node of
all until the budget is spent (best-first, as in OPT-Tree, arXiv 2406.17276). A node's worth is the product along its
path of the chances that the target takes each token. What a guess is worth is measured, not believed: every source
sorts its guesses into kinds, and each kind's chance is the share of its guesses that came true so far.

Under rule `match` a drafter may choose nodes by any means. Under `ratio` and `block` these nodes are point masses, none
was drawn: exact too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from foretell.drafters.base import Drafter, Progress
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.types import Drafts, Draw, Seen, Seq

PATIENCE = 24.0  # guesses that a prior counts for before what was seen outweighs it

ROOT = -1
Guess = tuple[int, int]  # token, kind


class View(Protocol):
    """A source's knowledge about one text."""

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        """What may follow the text and then `path`, different tokens; asked for a node after its parent."""
        ...


class Source:
    """Something that guesses. kinds: the chance of a hit that each kind of its guesses starts with."""

    kinds: Sequence[float] = ()
    rows: int = 0  # riders it would like in every round

    def riders(self, seq: Seq, room: int) -> tuple[list[int], list[int]]:
        """Rows to compute beside the tree, tokens and parents among themselves (-1 is the root). `room`: for riders
        and nodes together. `observe` finds their logits under `Seen.riders`, which are this source's own there."""
        return [], []

    def attach(self, cache: Cache) -> None:
        """Called once before anything else."""

    def view(self, seq: Seq) -> View:
        """What it knows about the text as it stands."""
        raise NotImplementedError

    def warm(self, target: Target, cache: Cache, progress: Progress) -> None:
        """Learn what can be learnt from the target alone, before any request."""

    def reset(self) -> None:
        """Drop what was learnt from requests; what `warm` learnt stays."""

    def observe(self, seen: Seen) -> None:
        """Learn from what the target computed."""

    def admit(self, seq: Seq) -> None:
        """The request starts, or comes back after `forget`."""

    def forget(self, seq: Seq) -> None:
        """The request ended or lost its place: drop what is about it."""


def shifted(parents: Sequence[int], by: int) -> list[int]:
    """The same parents when so many entries come before; the root stays the root."""
    return [parent if parent == ROOT else parent + by for parent in parents]


class Calibration:
    """How often each kind of a source's guesses came true."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._hits = [PATIENCE * p for p in priors]
        self._tries = [PATIENCE] * len(priors)
        self.chance = list(priors)

    def learn(self, kind: int, hit: bool) -> None:
        self._hits[kind] += hit
        self._tries[kind] += 1
        self.chance[kind] = self._hits[kind] / self._tries[kind]


@dataclass(slots=True)
class Tree:
    """One request's tree, and what was guessed below each of its nodes."""

    length: int  # of the text then
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    guessed: list[list[tuple[int, Guess]]] = field(default_factory=list)  # [nodes+1]  (source, guess); the root first


class SearchDrafter(Drafter):
    """A drafter of one or several sources, in one tree within one budget. width: children of a node at most."""

    draft_tokens = 8

    def __init__(self, sources: Sequence[Source], *, width: int | None = None) -> None:
        if not sources or (width is not None and width < 1):
            raise ValueError("a search needs at least one source and a width of at least 1")
        self.sources, self.width = list(sources), width
        self.chains = width == 1
        self.draft_tokens += sum(source.rows for source in sources)
        self._shares: dict[int, list[int]] = {}  # request id -> where each source's riders end among this round's
        self._calibrations = [Calibration(source.kinds) for source in self.sources]
        self._trees: dict[int, Tree] = {}  # request id -> its last tree

    def attach(self, cache: Cache) -> None:
        for source in self.sources:
            source.attach(cache)

    def warm(self, target: Target, cache: Cache, progress: Progress) -> None:
        for source in self.sources:
            source.warm(target, cache, progress)

    def reset(self) -> None:
        self._calibrations = [Calibration(source.kinds) for source in self.sources]
        for source in self.sources:
            source.reset()

    def admit(self, seq: Seq) -> None:
        for source in self.sources:
            source.admit(seq)

    def forget(self, seq: Seq) -> None:
        self._trees.pop(seq.id, None)
        self._shares.pop(seq.id, None)
        for source in self.sources:
            source.forget(seq)

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        ridden = [self._ride(seq, n) for seq, n in zip(seqs, budget, strict=True)]
        counts = [len(tokens) for tokens, _ in ridden]
        trees = [self._grow(seq, n - riders) for seq, n, riders in zip(seqs, budget, counts, strict=True)]
        packed = [
            (tree.tokens + tokens, tree.parents + shifted(parents, len(tree.tokens)))
            for tree, (tokens, parents) in zip(trees, ridden, strict=True)
        ]
        return Drafts.pack(packed, riders=counts)

    def observe(self, seen: Seen) -> None:
        for seq in seen.seqs:
            tree = self._trees.pop(seq.id, None)
            if tree is not None:
                self._learn(tree, seq)
        nobody = [0] * (len(self.sources) + 1)
        shares = [self._shares.pop(seq.id, nobody) for seq in seen.seqs]
        for i, source in enumerate(self.sources):
            own = [lines[ends[i] : ends[i + 1]] for lines, ends in zip(seen.riders, shares, strict=True)]
            source.observe(replace(seen, riders=own))

    def _ride(self, seq: Seq, budget: int) -> tuple[list[int], list[int]]:
        """The riders of all sources."""
        tokens: list[int] = []
        parents: list[int] = []
        ends = [0]
        for source in self.sources:
            more, among = source.riders(seq, budget - len(tokens))
            parents += shifted(among, len(tokens))
            tokens += more
            ends.append(len(tokens))
        self._shares[seq.id] = ends
        return tokens, parents

    def _grow(self, seq: Seq, budget: int) -> Tree:
        tree = Tree(len(seq.tokens))
        if budget == 0:
            return tree
        views = [source.view(seq) for source in self.sources]
        heap: list[tuple[float, int, int, int, tuple[int, ...]]] = []  # -worth, order, parent, token, path
        order = 0
        node, worth = ROOT, 1.0
        path: tuple[int, ...] = ()
        while True:
            for token, chance in self._children(tree, views, path):
                heapq.heappush(heap, (-worth * chance, order, node, token, path))
                order += 1
            if not heap or len(tree.tokens) == budget:
                break
            negative, _, parent, token, path = heapq.heappop(heap)
            node, worth, path = len(tree.tokens), -negative, (*path, token)
            tree.tokens.append(token)
            tree.parents.append(parent)
        self._trees[seq.id] = tree
        return tree

    def _children(self, tree: Tree, views: Sequence[View], path: tuple[int, ...]) -> list[tuple[int, float]]:
        """(token, chance) of what may follow the path; a token that several sources guess is missed if all miss."""
        missed: dict[int, float] = {}
        said: list[tuple[int, Guess]] = []
        for i, (view, calibration) in enumerate(zip(views, self._calibrations, strict=True)):
            for guess in view.guesses(path):
                said.append((i, guess))
                missed[guess[0]] = missed.get(guess[0], 1.0) * (1.0 - calibration.chance[guess[1]])
        tree.guessed.append(said)
        children = [(token, 1.0 - miss) for token, miss in missed.items()]
        return children if self.width is None else heapq.nlargest(self.width, children, key=lambda child: child[1])

    def _learn(self, tree: Tree, seq: Seq) -> None:
        """Every guess below a node on the target's path came true or did not, drafted or not."""
        node: int | None = ROOT
        for token in seq.tokens[tree.length :]:
            if node is None:
                return
            for i, (guess, kind) in tree.guessed[node + 1]:
                self._calibrations[i].learn(kind, guess == token)
            below = (n for n, parent in enumerate(tree.parents) if parent == node and tree.tokens[n] == token)
            node = next(below, None)
