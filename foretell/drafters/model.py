"""An independent draft model with the target's vocabulary (Leviathan et al. 2023; Chen et al. 2023).

Its keys and values lie in a plane of its own over the target's slots, so what the target commits, preempts or reuses is
committed, preempted and reused for the draft too. What the draft has not computed yet - a prompt, tokens of rounds
without drafts, the last token after full acceptance - it catches up with at the next round; there is no special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.drafters.base import Drafter
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.types import Draw, Drafts, Drawn, Keys, Rows, Seq

CHUNK = 256  # rows of one catching-up pass: bounds the memory of a long prompt
PLANE = "draft"


@dataclass(slots=True)
class Growth:
    """One request's tree while it grows."""

    seq: Seq
    limit: int
    tail: Sequence[int]  # slots of the tokens beyond seq.cached, the root's last
    slots: Sequence[int]  # slots for the nodes
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: list[int] = field(default_factory=list)  # row of q each node was drawn from; -1: point mass
    frontier: list[int] = field(default_factory=lambda: [-1])  # nodes to grow from; -1 is the root

    def trail(self, node: int) -> list[int]:
        """Slots between the committed tokens and the node, the node excluded."""
        path = []
        node = self.parents[node]
        while node >= 0:
            path.append(self.slots[node])
            node = self.parents[node]
        return [*self.tail, *reversed(path)]

    def depth(self) -> int:
        node, depth = self.frontier[0], 0
        while node >= 0:
            node, depth = self.parents[node], depth + 1
        return depth


class ModelDrafter(Drafter):
    """width: chains that start at the root, 1 being a single chain. vocabulary: ids that may be proposed.

    The shape of the tree is fixed before anything is drawn, so nodes stay whatever their values: exact under every rule.
    """

    draft_tokens = 4

    def __init__(self, model: Target, vocab_size: int, *, vocabulary: int | None = None, width: int = 1) -> None:
        if width < 1:
            raise ValueError(f"width must be at least 1, not {width}")
        self.model, self.vocab_size, self.width = model, vocab_size, width
        self.vocabulary = min(vocabulary or vocab_size, vocab_size, model.vocab_size)
        self._cache: Cache
        self._done: dict[int, int] = {}  # request id -> leading committed tokens the draft has computed
        self.rows = 0  # rows computed so far, for the statistics

    def attach(self, cache: Cache) -> None:
        self._cache = cache
        self.model.attach(cache, PLANE)

    def admit(self, seq: Seq) -> None:
        self._done[seq.id] = 0

    def forget(self, seq: Seq) -> None:
        self._done.pop(seq.id, None)

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        grown = [self._start(seq, n) for seq, n in zip(seqs, budget, strict=True)]
        active = [g for g in grown if g.limit > 0]
        laws: list[Tensor] = []
        logits = self._catch_up(active)
        while active:
            self._extend(active, logits, draw, laws)
            active = [g for g in active if g.frontier and len(g.tokens) < g.limit]
            logits = self._level(active)
        trees = [(g.tokens, g.parents) for g in grown]
        if not laws:
            return Drafts.pack(trees)
        row = torch.tensor([law for g in grown for law in g.laws], dtype=torch.int32)
        return Drafts.pack(trees, Drawn(torch.cat(laws), row, distinct=True))

    def _start(self, seq: Seq, budget: int) -> Growth:
        reserved = self._cache.reserved(seq)
        tail = len(seq.tokens) - seq.cached
        # a node's children need its position; the draft may know fewer positions than the target
        limit = max(0, min(budget, self.model.max_context - len(seq.tokens)))
        return Growth(seq, limit, reserved[:tail], reserved[tail:])

    def _catch_up(self, grown: Sequence[Growth]) -> Tensor:
        """Compute what the draft lacks of each text, root included -> [len(grown), V] logits at the roots."""
        todo: list[tuple[Growth, int]] = []
        for g in grown:
            seq, done = g.seq, self._done[g.seq.id]
            filled = self._cache.planes[PLANE].filled[self._cache.committed(seq, done, seq.cached)]
            done += len(filled) if filled.all() else int(filled.argmin())
            self._done[seq.id] = done
            todo.append((g, done))
        result: list[Tensor | None] = [None] * len(todo)
        positions = [done for _, done in todo]
        while any(p < len(g.seq.tokens) for (g, _), p in zip(todo, positions, strict=True)):
            room, parts, wanted = CHUNK, [], []
            for i, (g, _) in enumerate(todo):
                start = positions[i]
                end = min(len(g.seq.tokens), start + room)
                if start == end:
                    continue
                committed = self._cache.committed(g.seq, start, min(end, g.seq.cached)).tolist() if start < g.seq.cached else []
                beyond = g.tail[max(0, start - g.seq.cached) : max(0, end - g.seq.cached)]
                context = min(start, g.seq.cached)
                trail = list(g.tail[: max(0, start - g.seq.cached)])
                parts.append(_Part(g.seq, context, g.seq.tokens[start:end], range(-1, end - start - 1), [*committed, *beyond], trail))
                positions[i], room = end, room - (end - start)
                if end == len(g.seq.tokens):
                    wanted.append((i, sum(len(p.tokens) for p in parts) - 1))
            logits = self._forward(parts, [row for _, row in wanted])
            for (i, _), line in zip(wanted, logits, strict=True):
                result[i] = line.clone()
        return torch.stack([line for line in result if line is not None]) if result else torch.empty(0)

    def _level(self, grown: Sequence[Growth]) -> Tensor:
        """Compute every frontier node -> logits, one row a node, in the order of the requests."""
        parts = []
        for g in grown:
            for node in g.frontier:
                parts.append(_Part(g.seq, g.seq.cached, [g.tokens[node]], [-1], [g.slots[node]], g.trail(node)))
        return self._forward(parts, list(range(len(parts)))) if parts else torch.empty(0)

    def _forward(self, parts: Sequence[_Part], want: list[int]) -> Tensor:
        self.rows += sum(len(p.tokens) for p in parts)
        logits = self.model.forward(_rows(parts, want), self._cache).logits[:, : self.vocab_size]
        if logits.shape[1] < self.vocab_size:
            logits = torch.nn.functional.pad(logits, (0, self.vocab_size - logits.shape[1]), value=float("-inf"))
        logits[:, self.vocabulary :] = float("-inf")  # padding of either vocabulary is never proposed
        return logits

    def _extend(self, grown: Sequence[Growth], logits: Tensor, draw: Draw, laws: list[Tensor]) -> None:
        """Draw the children of every frontier node: `width` at the root, one below."""
        owners = [(g, node) for g in grown for node in g.frontier]
        keys = Keys(
            seed=[g.seq.seed for g, _ in owners],
            position=[len(g.seq.tokens) + g.depth() for g, _ in owners],
            round=[g.seq.rounds for g, _ in owners],
            temperature=[g.seq.sampling.temperature for g, _ in owners],
        )
        at_root = [i for i, (_, node) in enumerate(owners) if node < 0]
        k = min(self.width, self.vocabulary) if at_root else 1
        picks = draw(logits, keys, k)
        base = sum(len(q) for q in laws)
        if picks.q is not None:
            laws.append(picks.q)
        tokens = picks.tokens.tolist()
        for g in grown:
            g.frontier = []
        for i, (g, node) in enumerate(owners):
            for token in tokens[i][: g.limit - len(g.tokens)]:
                g.frontier.append(len(g.tokens))
                g.tokens.append(token)
                g.parents.append(node)
                g.laws.append(-1 if picks.q is None else base + i)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one request in one pass of the draft."""

    seq: Seq
    context: int
    tokens: Sequence[int]
    parents: Sequence[int]
    slots: Sequence[int]
    trail: Sequence[int]


def _rows(parts: Sequence[_Part], want: list[int]) -> Rows:
    indptr, trail_indptr = [0], [0]
    tokens: list[int] = []
    parents: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    trail: list[int] = []
    for part in parts:
        first = part.context + len(part.trail)
        tokens += part.tokens
        parents += part.parents
        slots += part.slots
        positions += range(first, first + len(part.tokens))  # a chain, or a single node
        trail += part.trail
        trail_indptr += [len(trail)] * len(part.tokens)  # only the first row of a part looks at it
        indptr.append(len(tokens))
    return Rows(
        indptr=torch.tensor(indptr, dtype=torch.int32),
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        parents=torch.tensor(parents, dtype=torch.int32),
        slots=torch.tensor(slots),
        want=torch.tensor(want, dtype=torch.int64),
        tables=torch.tensor([p.seq.table for p in parts], dtype=torch.int32),
        context=torch.tensor([p.context for p in parts], dtype=torch.int32),
        trail_indptr=torch.tensor(trail_indptr),
        trail=torch.tensor(trail, dtype=torch.int32),
    )
