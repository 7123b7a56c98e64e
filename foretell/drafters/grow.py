"""Trees that grow level by level from a draft's logits: shared by every drafter that has some.

The shape is fixed before anything is drawn - `width` children of the root, one of every other node - so nodes stay
whatever their values: exact under every rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.types import Drafts, Draw, Drawn, Keys, Seq

ROOT = -1


@dataclass(slots=True)
class Growth:
    """One request's tree while it grows to at most `limit` nodes."""

    seq: Seq
    limit: int
    tail: Sequence[int]  # slots of the tokens beyond seq.cached, the root's last
    slots: Sequence[int]  # slots for the nodes
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: list[int] = field(default_factory=list)  # row of q each node was drawn from; -1: a point mass
    frontier: list[int] = field(default_factory=lambda: [ROOT])  # nodes to grow from
    depth: int = 0  # of the frontier

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.limit

    def trail(self, node: int) -> list[int]:
        """Slots between the committed tokens and the node, its own excluded."""
        path = []
        node = self.parents[node]
        while node != ROOT:
            path.append(self.slots[node])
            node = self.parents[node]
        return [*self.tail, *reversed(path)]


class Forest:
    """The trees of a batch, all at the same depth, and the laws they were drawn from."""

    def __init__(self, grown: Sequence[Growth], width: int) -> None:
        self.grown, self.width = grown, width
        self._laws: list[Tensor] = []

    @property
    def active(self) -> list[Growth]:
        return [g for g in self.grown if not g.full]

    def extend(self, logits: Tensor, draw: Draw) -> None:
        """logits: [M, V], at the frontier nodes of the active trees in turn: the next level of all of them."""
        owners = [(g, node) for g in self.active for node in g.frontier]
        keys = Keys(
            seed=[g.seq.seed for g, _ in owners],
            position=[len(g.seq.tokens) + g.depth for g, _ in owners],
            round=[g.seq.rounds for g, _ in owners],
            temperature=[g.seq.sampling.temperature for g, _ in owners],
        )
        picks = draw(logits, keys, self.width if owners[0][1] == ROOT else 1)
        base = sum(len(q) for q in self._laws)
        if picks.q is not None:
            self._laws.append(picks.q)
        for g in self.active:
            g.frontier, g.depth = [], g.depth + 1
        for i, ((g, node), tokens) in enumerate(zip(owners, picks.tokens.tolist(), strict=True)):
            for token in tokens[: g.limit - len(g.tokens)]:
                g.frontier.append(len(g.tokens))
                g.tokens.append(token)
                g.parents.append(node)
                g.laws.append(-1 if picks.q is None else base + i)

    def drafts(self) -> Drafts:
        trees = [(g.tokens, g.parents) for g in self.grown]
        if not self._laws:
            return Drafts.pack(trees)
        row = torch.tensor([law for g in self.grown for law in g.laws], dtype=torch.int32)
        return Drafts.pack(trees, Drawn(torch.cat(self._laws), row, distinct=True))
