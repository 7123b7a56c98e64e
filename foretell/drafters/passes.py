"""Drafting with a model whose keys and values lie in a plane of the target's slots: shared by all that have one.

What the target commits, preempts or reuses is committed, preempted and reused for the draft too. What the draft has not
computed yet - a prompt, tokens of rounds without drafts, the last token after full acceptance - it catches up with at
the next round; there is no special case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.drafters.base import Drafter
from foretell.drafters.grow import Forest, Growth
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.types import Drafts, Draw, Rows, Seq

CHUNK = 256  # rows of one catching-up pass: bounds the memory of a long prompt


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of one request in one pass of the draft."""

    seq: Seq
    context: int
    trail: Sequence[int]
    tokens: Sequence[int]
    slots: Sequence[int]


class PassDrafter(Drafter):
    """model: attached to `plane`. vocab_size: of the target. vocabulary: ids below it may be proposed. width: chains
    that start at the root, 1 being a single chain."""

    layers: Sequence[int] | None = None  # of the model, run for a draft; None: all

    def __init__(
        self, model: Target, plane: str, vocab_size: int, *, vocabulary: int | None = None, width: int = 1
    ) -> None:
        if width < 1:
            raise ValueError(f"width must be at least 1, not {width}")
        self.model, self.plane, self.vocab_size = model, plane, vocab_size
        self.vocabulary = min(vocabulary or vocab_size, vocab_size, model.vocab_size)
        self.width = min(width, self.vocabulary)
        self.chains = self.width == 1
        self.rows = 0  # computed so far
        self._cache: Cache
        self._done: dict[int, int] = {}  # request id -> leading committed tokens the draft has computed

    def attach(self, cache: Cache) -> None:
        self._cache = cache

    def admit(self, seq: Seq) -> None:
        self._done[seq.id] = 0

    def forget(self, seq: Seq) -> None:
        self._done.pop(seq.id, None)

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        forest = Forest([self._plant(seq, n) for seq, n in zip(seqs, budget, strict=True)], self.width)
        logits = self._catch_up(forest.active)
        while forest.active:
            forest.extend(logits, draw)
            logits = self._level(forest.active)
        return forest.drafts()

    def _plant(self, seq: Seq, budget: int) -> Growth:
        reserved, tail = self._cache.reserved(seq), len(seq.tokens) - seq.cached
        limit = min(budget, self.model.max_context - len(seq.tokens))  # it may know fewer positions than the target
        return Growth(seq, limit, reserved[:tail], reserved[tail:])

    def _catch_up(self, grown: Sequence[Growth]) -> Tensor:
        """Compute what the draft lacks of each text, root included -> [len(grown), V], logits at the roots."""
        logits = torch.empty(len(grown), self.vocab_size, dtype=torch.float64)
        for parts, reached in self._stretches(grown, [len(g.seq.tokens) for g in grown]):
            logits[list(reached)] = self._forward(parts, list(reached.values())).double()
        return logits

    def _stretches(self, grown: Sequence[Growth], ends: Sequence[int]) -> Iterator[tuple[list[Part], dict[int, int]]]:
        """What the plane lacks of each text up to its end, in passes of at most CHUNK rows; beside the parts of a pass,
        for each text that comes to its end in it, the row of its last token."""
        at = [self._computed(g.seq) for g in grown]
        while any(start < end for start, end in zip(at, ends, strict=True)):
            left, parts, reached = CHUNK, [], {}
            for i, g in enumerate(grown):
                end = min(ends[i], at[i] + left)
                if end > at[i]:
                    parts.append(self._part(g, at[i], end))
                    left -= end - at[i]
                    at[i] = end
                    if end == ends[i]:
                        reached[i] = CHUNK - left - 1
            yield parts, reached

    def _computed(self, seq: Seq) -> int:
        """How many leading tokens the draft has computed: it goes on from the first it has not."""
        done = self._done[seq.id]
        filled = self._cache.planes[self.plane].filled[self._cache.committed(seq, done, seq.cached)]
        done += len(filled) if filled.all() else int(filled.argmin())
        self._done[seq.id] = done
        return done

    def _part(self, g: Growth, start: int, end: int) -> Part:
        """Tokens start..end of the text: committed ones, then those of the tail, which the slot table lacks."""
        seq, cached = g.seq, g.seq.cached
        committed = self._cache.committed(seq, start, min(end, cached)).tolist() if start < cached else []
        beyond = g.tail[max(0, start - cached) : max(0, end - cached)]
        trail = g.tail[: max(0, start - cached)]
        return Part(seq, min(start, cached), trail, seq.tokens[start:end], [*committed, *beyond])

    def _level(self, grown: Sequence[Growth]) -> Tensor:
        """Compute every frontier node -> [M, V], logits in the order of the trees."""
        parts = [
            Part(g.seq, g.seq.cached, g.trail(node), [g.tokens[node]], [g.slots[node]])
            for g in grown
            for node in g.frontier
        ]
        return self._forward(parts, list(range(len(parts))))

    def _forward(self, parts: Sequence[Part], want: list[int]) -> Tensor:
        if not parts:
            return torch.empty(0, self.vocab_size)
        rows = part_rows(parts, want)
        self.rows += rows.tokens.numel()
        logits = self.model.forward(rows, self._cache, layers=self.layers).logits[:, : self.vocab_size]
        if logits.shape[1] < self.vocab_size:
            logits = torch.nn.functional.pad(logits, (0, self.vocab_size - logits.shape[1]))
        logits[:, self.vocabulary :] = float("-inf")  # the padding of either vocabulary is never proposed
        return logits


def part_rows(parts: Sequence[Part], want: list[int]) -> Rows:
    """Each part as a request of its own; want: rows whose logits are needed."""
    indptr, trail_indptr = [0], [0]
    tokens: list[int] = []
    parents: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    trail: list[int] = []
    for part in parts:
        first = part.context + len(part.trail)
        tokens += part.tokens
        parents += range(-1, len(part.tokens) - 1)
        slots += part.slots
        positions += range(first, first + len(part.tokens))
        trail += part.trail
        trail_indptr += [len(trail)] * len(part.tokens)  # only the first row of a part looks at it
        indptr.append(len(tokens))
    return Rows(
        indptr=torch.tensor(indptr, dtype=torch.int32),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        parents=torch.tensor(parents, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int64),
        want=torch.tensor(want, dtype=torch.int64),
        tables=torch.tensor([part.seq.table for part in parts], dtype=torch.int32),
        context=torch.tensor([part.context for part in parts], dtype=torch.int32),
        trail_indptr=torch.tensor(trail_indptr, dtype=torch.int64),
        trail=torch.tensor(trail, dtype=torch.int32),
    )
