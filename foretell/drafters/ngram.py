"""Prompt lookup (Saxena 2023): what followed the last tokens when they occurred before in the same text.

The longest matching n-gram wins, its latest earlier occurrence is copied. Each request keeps an index from n-gram to
where it last ended, so a round costs the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretell.drafters.base import Drafter
from foretell.types import Drafts, Draw, Seq

Index = dict[tuple[int, ...], int]  # n-gram -> position after its latest occurrence


class NgramDrafter(Drafter):
    """max_ngram, min_ngram: lengths of the n-grams looked up, longest first (vLLM: prompt_lookup_max and _min)."""

    draft_tokens = 4

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram must be at least 1 and at most max_ngram, not {min_ngram} and {max_ngram}")
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self._indexes: dict[int, tuple[Index, int]] = {}  # request id -> index, tokens indexed

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        return Drafts.chains([self._chain(seq, n) if n else [] for seq, n in zip(seqs, budget, strict=True)])

    def forget(self, seq: Seq) -> None:
        self._indexes.pop(seq.id, None)

    def _chain(self, seq: Seq, length: int) -> list[int]:
        tokens = seq.tokens
        index = self._extended(seq)
        for n in self.sizes:
            start = index.get(tuple(tokens[-n:])) if n < len(tokens) else None
            if start is not None:
                chain: list[int] = []
                for i in range(start, start + length):  # past the end it goes on with its own copy: a period repeats
                    chain.append(tokens[i] if i < len(tokens) else chain[i - len(tokens)])
                return chain
        return []

    def _extended(self, seq: Seq) -> Index:
        """The index over all n-grams that something follows: every one but the last of the text."""
        tokens = seq.tokens
        index, done = self._indexes.get(seq.id, ({}, 0))
        for end in range(max(done, 1), len(tokens)):
            for n in self.sizes:
                if n <= end:
                    index[tuple(tokens[end - n : end])] = end
        self._indexes[seq.id] = (index, len(tokens))
        return index
