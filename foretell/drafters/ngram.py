"""Prompt lookup (Saxena 2023): what followed the last tokens when they occurred before in the same text.

The longest matching n-gram wins, its latest earlier occurrence is copied. Each request keeps an index from n-gram to
where it last ended, so a round costs the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretell.drafters.base import Drafter
from foretell.drafters.search import Guess, Source
from foretell.types import Drafts, Draw, Seq

Ends = dict[tuple[int, ...], int]  # n-gram -> position after its latest occurrence


class Lookup:
    """For each request, where its n-grams of min_ngram to max_ngram tokens last ended."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram must be at least 1 and at most max_ngram, not {min_ngram} and {max_ngram}")
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.known: dict[int, tuple[Ends, int]] = {}  # request id -> ends, tokens indexed

    def ends(self, seq: Seq) -> Ends:
        """Of all n-grams that something follows: every one but the last of the text."""
        tokens = seq.tokens
        ends, done = self.known.get(seq.id, ({}, 0))
        for end in range(max(done, 1), len(tokens)):
            for n in self.sizes:
                if n <= end:
                    ends[tuple(tokens[end - n : end])] = end
        self.known[seq.id] = (ends, len(tokens))
        return ends

    def find(self, ends: Ends, context: Sequence[int]) -> tuple[int, int] | None:
        """Where the longest known end of the context occurred, and its length."""
        for n in self.sizes:
            if n <= len(context):
                end = ends.get(tuple(context[-n:]))
                if end is not None:
                    return end, n
        return None


class NgramDrafter(Drafter):
    """A chain. max_ngram, min_ngram: lengths looked up, longest first (vLLM: prompt_lookup_max and _min)."""

    chains = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self._lookup = Lookup(max_ngram, min_ngram)

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        return Drafts.chains([self._chain(seq, n) if n else [] for seq, n in zip(seqs, budget, strict=True)])

    def forget(self, seq: Seq) -> None:
        self._lookup.known.pop(seq.id, None)

    def _chain(self, seq: Seq, length: int) -> list[int]:
        tokens = seq.tokens
        found = self._lookup.find(self._lookup.ends(seq), tokens[-self._lookup.sizes[0] :])
        if found is None:
            return []
        chain: list[int] = []
        for i in range(found[0], found[0] + length):  # past the end it goes on with its own copy: a period repeats
            chain.append(tokens[i] if i < len(tokens) else chain[i - len(tokens)])
        return chain


class NgramSource(Source):
    """The same lookup about every node of a tree, its path included."""

    kinds = (-0.15, 0.94, 1.90)  # by length of the n-gram

    def __init__(self) -> None:
        self._lookup = Lookup(len(self.kinds), 1)

    def forget(self, seq: Seq) -> None:
        self._lookup.known.pop(seq.id, None)

    def view(self, seq: Seq) -> NgramView:
        return NgramView(self._lookup, seq)


class NgramView:
    def __init__(self, lookup: Lookup, seq: Seq) -> None:
        self._lookup, self._tokens, self._ends = lookup, seq.tokens, lookup.ends(seq)

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        found = self._lookup.find(self._ends, [*self._tokens[-self._lookup.sizes[0] :], *path])
        return () if found is None else ((self._tokens[found[0]], found[1] - 1),)
