"""One tree from one or many sources of guesses: the nodes that the target most likely reaches, whoever guessed them.

A source says what may follow a text; the search asks it about every node it opens and takes the likeliest next node of
all until the budget is spent (best-first, as in OPT-Tree, arXiv 2406.17276). A node's worth is the product along its
path of the chances that the target takes each token. What a guess is worth is measured, not believed: every source
sorts its guesses into kinds, and what a kind counts for is learnt from what came true.

Under rule `match` a drafter may choose nodes by any means. Under `ratio` and `block` these nodes are point masses, none
was drawn: exact too.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from foretell.drafters.base import Drafter, Progress
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.types import Drafts, Draw, Seen, Seq

PATIENCE, LATEST, STEP = 24, 100, 4.0  # guesses that a prior counts for, those that count at most, size of a step
RECENT = (8, 32, 128)  # tokens ago, up to which one counts as of the first, second and third kind
LEAST = 0.002  # chance below which a guess is not worth its place in the search
OPEN = 1.5  # times the price of a node that a node must be worth before it is asked what may follow: asking takes time

ROOT = -1
NONE = -1  # the token of a remark about all that was guessed: "none of these" comes
Guess = tuple[int, int]  # token, kind


class View(Protocol):
    """A source's knowledge about one text."""

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        """What may follow the text and then `path`; asked for a node after its parent. Several remarks may be about
        one token, and those about NONE say how likely all others are wrong."""
        ...


class Source:
    """Something that guesses. kinds: what each kind of its remarks adds at first to the score of a token, in log-odds:
    0 is as likely as not, were nothing else said."""

    kinds: Sequence[float] = ()
    predicts: bool = False  # it uses `Seq.prediction`
    rows: int = 0  # riders it would like in every round

    def riders(self, seq: Seq, room: int) -> tuple[list[int], list[int]]:
        """Rows to compute beside the tree, tokens and parents among themselves (-1 is the root). `room`: for riders
        and nodes together. `observe` finds their logits under `Seen.riders`, which are this source's own there."""
        return [], []

    def attach(self, cache: Cache) -> None:
        """Called once before anything else."""

    def prepare(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> None:
        """All that are drafted for in this round, with room for so many nodes each; asked before `view`."""

    def view(self, seq: Seq) -> View:
        """What it knows about the text as it stands."""
        raise NotImplementedError

    def warm(self, target: Target, cache: Cache, progress: Progress) -> None:
        """Learn what can be learnt from the target alone, before any request."""

    def reset(self) -> None:
        """Drop what was learnt from requests since `warm`, `load` or `save`."""

    def save(self, folder: Path) -> None:
        """Write down what was learnt so far."""

    def load(self, folder: Path) -> None:
        """Go on with what was saved there, if there is anything that fits."""

    def observe(self, seen: Seen) -> None:
        """Learn from what the target computed."""

    def admit(self, seq: Seq) -> None:
        """The request starts, or comes back after `forget`."""

    def forget(self, seq: Seq) -> None:
        """The request ended or lost its place: drop what is about it."""


def shifted(parents: Sequence[int], by: int) -> list[int]:
    """The same parents when so many entries come before; the root stays the root."""
    return [parent if parent == ROOT else parent + by for parent in parents]


class Chances:
    """How likely each guessed token comes next: a conditional logit over what was said, learnt while it runs.

    Every kind of remark has a weight. A token's score is the sum of the weights of what was said about it, "none of
    these" is one of the tokens, and chances are the softmax of the scores: a source that is sure of one token makes the
    others less likely. After every round the weights take a step along the gradient of the log-likelihood of what came.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self.weights = list(priors)
        self._seen = [0] * len(self.weights)

    def of(self, said: Sequence[Guess]) -> dict[int, float]:
        """The chance of each token of `said`, NONE among them."""
        weights, exp = self.weights, math.exp
        scores = {NONE: 0.0}
        score_of = scores.get
        for token, kind in said:
            scores[token] = score_of(token, 0.0) + weights[kind]
        odds = {token: exp(score) for token, score in scores.items()}
        total = sum(odds.values())
        return {token: share / total for token, share in odds.items()}

    def learn(self, said: Sequence[Guess], came: int) -> None:
        chances = self.of(said)
        if came not in chances:
            came = NONE
        for token, kind in said:
            self._seen[kind] = seen = min(self._seen[kind] + 1, LATEST)
            self.weights[kind] += STEP / (PATIENCE + seen) * ((token == came) - chances[token])


class Recent:
    """Which tokens occurred lately in a text: those are likelier to occur again, whoever guesses them."""

    kinds = (1.28, 1.43, 1.17, 0.79)

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # token -> its latest position
        self._length = 0

    def read(self, tokens: Sequence[int]) -> None:
        self._last.update((tokens[i], i) for i in range(self._length, len(tokens)))
        self._length = len(tokens)

    def remarks(self, tokens: Iterable[int], first: int) -> list[Guess]:
        """One about each of the tokens that occurred; first: the kind of the latest ones."""
        last, length = self._last, self._length
        return [(token, first + bisect_right(RECENT, length - last[token])) for token in tokens if token in last]


@dataclass(slots=True)
class Tree:
    """One request's tree, and what was said below each of its nodes."""

    length: int  # of the text then
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    worth: list[float] = field(default_factory=list)  # chance that the target takes the node
    said: list[Sequence[Guess]] = field(default_factory=list)  # below each node that was opened, the root first

    def below(self, node: int, token: int) -> int | None:
        """The child of the node that holds the token."""
        found = (n for n in range(node + 1, len(self.tokens)) if self.parents[n] == node and self.tokens[n] == token)
        return next(found, None)


class SearchDrafter(Drafter):
    """A drafter of one or several sources, by their names, in one tree within one budget. width: children of a node at
    most."""

    def __init__(self, sources: Mapping[str, Source], *, width: int | None = None) -> None:
        if not sources or (width is not None and width < 1):
            raise ValueError("a search needs at least one source and a width of at least 1")
        self.sources, self.width = dict(sources), width
        self.chains = width == 1
        self.predicts = any(source.predicts for source in sources.values())
        self._priors = [weight for source in sources.values() for weight in source.kinds] + [*Recent.kinds]
        self._owner = [name for name, source in sources.items() for _ in source.kinds]  # of each kind
        self._first = list(accumulate((len(source.kinds) for source in sources.values()), initial=0))  # kind of each
        self._recent: dict[int, Recent] = {}  # request id
        self._chances = Chances(self._priors)
        rows = sum(source.rows for source in sources.values())
        self.draft_tokens += rows
        self.scored = rows == 0
        self._riders: dict[int, list[int]] = {}  # request id -> where each source's riders end among this round's
        self._trees: dict[int, Tree] = {}  # request id -> its last tree
        self._shares: dict[int, dict[str, tuple[int, int]]] = {}  # request id -> see `shares`

    def attach(self, cache: Cache) -> None:
        for source in self.sources.values():
            source.attach(cache)

    def warm(self, target: Target, cache: Cache, progress: Progress) -> None:
        for source in self.sources.values():
            source.warm(target, cache, progress)

    def reset(self) -> None:
        self._chances = Chances(self._priors)
        for source in self.sources.values():
            source.reset()

    def save(self, folder: Path) -> None:
        for source in self.sources.values():
            source.save(folder)

    def load(self, folder: Path) -> None:
        for source in self.sources.values():
            source.load(folder)

    def admit(self, seq: Seq) -> None:
        for source in self.sources.values():
            source.admit(seq)

    def forget(self, seq: Seq) -> None:
        self._trees.pop(seq.id, None)
        self._shares.pop(seq.id, None)
        self._recent.pop(seq.id, None)
        self._riders.pop(seq.id, None)
        for source in self.sources.values():
            source.forget(seq)

    def shares(self, seq: Seq) -> Mapping[str, tuple[int, int]]:
        return self._shares.get(seq.id, {})

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        if not any(budget):
            return Drafts.chains([[] for _ in seqs])
        ridden = [self._ride(seq, n) for seq, n in zip(seqs, budget, strict=True)]
        counts = [len(tokens) for tokens, _ in ridden]
        room = [n - riders for n, riders in zip(budget, counts, strict=True)]
        for source in self.sources.values():
            source.prepare(seqs, room, draw)
        trees = [self._grow(seq, n) for seq, n in zip(seqs, room, strict=True)]
        packed = [
            (tree.tokens + tokens, tree.parents + shifted(parents, len(tree.tokens)))
            for tree, (tokens, parents) in zip(trees, ridden, strict=True)
        ]
        worth = [w for tree in trees for w in tree.worth] if self.scored else None
        return Drafts.pack(packed, riders=counts, worth=worth)

    def observe(self, seen: Seen) -> None:
        for seq, judged in zip(seen.seqs, seen.judged, strict=True):
            tree = self._trees.pop(seq.id, None)
            if tree is not None:
                self._learn(tree, seq, len(judged) - 1)
        nobody = [0] * (len(self.sources) + 1)
        ends_of = [self._riders.pop(seq.id, nobody) for seq in seen.seqs]
        ridden = any(map(len, seen.riders))
        for i, source in enumerate(self.sources.values()):
            own = [lines[ends[i] : ends[i + 1]] for lines, ends in zip(seen.riders, ends_of, strict=True)]
            source.observe(replace(seen, riders=own) if ridden else seen)

    def _ride(self, seq: Seq, budget: int) -> tuple[list[int], list[int]]:
        """The riders of all sources."""
        tokens: list[int] = []
        parents: list[int] = []
        ends = [0]
        for source in self.sources.values():
            more, among = source.riders(seq, budget - len(tokens))
            parents += shifted(among, len(tokens))
            tokens += more
            ends.append(len(tokens))
        self._riders[seq.id] = ends
        return tokens, parents

    def _grow(self, seq: Seq, budget: int) -> Tree:
        tree = Tree(len(seq.tokens))
        if budget == 0:
            return tree
        views = [(source.view(seq), first) for source, first in zip(self.sources.values(), self._first, strict=False)]
        recent = self._recent.setdefault(seq.id, Recent())
        recent.read(seq.tokens)
        heap: list[tuple[float, int, int, int, tuple[int, ...]]] = []  # -worth, order, parent, token, path
        order = 0
        node, worth = ROOT, 1.0
        path: tuple[int, ...] = ()
        while True:
            said: list[Guess] = []
            count = len(tree.tokens)
            if count >= len(self.prices) or worth > OPEN * self.prices[count]:
                said = [(token, first + kind) for view, first in views for token, kind in view.guesses(path)]
                said += recent.remarks({token for token, _ in said}, self._first[-1])
            tree.said.append(said)
            for token, chance in self._children(said):
                heapq.heappush(heap, (-worth * chance, order, node, token, path))
                order += 1
            if not heap:
                break
            negative, _, parent, token, path = heapq.heappop(heap)
            if len(tree.tokens) < len(self.prices) and -negative < self.prices[len(tree.tokens)]:
                break
            node, worth, path = len(tree.tokens), -negative, (*path, token)
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.worth.append(worth)
            if len(tree.tokens) == budget:
                break
        self._trees[seq.id] = tree
        return tree

    def _children(self, said: Sequence[Guess]) -> list[tuple[int, float]]:
        """(token, chance) of what may follow."""
        if not said:
            return []
        chances = self._chances.of(said)
        children = [(token, chance) for token, chance in chances.items() if chance > LEAST and token != NONE]
        return children if self.width is None else heapq.nlargest(self.width, children, key=lambda child: child[1])

    def _learn(self, tree: Tree, seq: Seq, verified: int) -> None:
        """Every guess below a node on the target's path came true or did not, verified or not. verified: how many of
        the tree's nodes were."""
        shares = self._shares.setdefault(seq.id, {})
        for parent, token in zip(tree.parents[:verified], tree.tokens[:verified], strict=True):
            for name in self._members(tree, parent, token):
                drafted, accepted = shares.get(name, (0, 0))
                shares[name] = drafted + 1, accepted
        node: int | None = ROOT
        for token in seq.tokens[tree.length :]:
            if node is None or node + 1 >= len(tree.said):
                return
            if not seq.sampling.private:
                self._chances.learn(tree.said[node + 1], token)
            child = tree.below(node, token)
            if child is not None and child < verified:
                for name in self._members(tree, node, token):
                    drafted, accepted = shares[name]
                    shares[name] = drafted, accepted + 1
            node = child

    def _members(self, tree: Tree, parent: int, token: int) -> set[str]:
        """The sources that guessed the token below the node."""
        remarks = (kind for guess, kind in tree.said[parent + 1] if guess == token)
        return {self._owner[kind] for kind in remarks if kind < len(self._owner)}
