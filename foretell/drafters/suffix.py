"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): what followed the longest end of the text that occurred
before, in the request itself or in past responses.

In place of a suffix tree, whose nodes are many for each token, an index from short runs of tokens to the latest places
where they occurred; the match is then extended backwards. What follows at those places is walked like the tree's
branches: a guess is the surer the longer its match and the more places agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretell.drafters.index import Index, Match, Past
from foretell.drafters.search import Guess, Source
from foretell.types import Seq

LENGTHS = (1, 2, 3, 4, 6, 10, 18)  # match lengths from which on a guess counts as surer
SHARES = 3  # all places agree, most do, few do


def _kind(length: int, count: int, total: int) -> int:
    bucket = sum(length >= start for start in LENGTHS) - 1
    share = 0 if count == total else 1 if 2 * count >= total else 2
    return bucket * SHARES + share


class SuffixSource(Source):
    """past: tokens of finished requests kept for others, 0 for none."""

    kinds = tuple(
        max(0.02, base * share) for base in (0.2, 0.4, 0.55, 0.65, 0.75, 0.85, 0.9) for share in (1.0, 0.7, 0.25)
    )

    def __init__(self, past: int = 200_000) -> None:
        self._capacity = past
        self._past = Past(3, past) if past else None
        self._own: dict[int, tuple[Index, list[int], int]] = {}  # request id -> index, its text, tokens indexed

    def reset(self) -> None:
        self._past = Past(3, self._capacity) if self._capacity else None

    def forget(self, seq: Seq) -> None:
        index, _, _ = self._own.pop(seq.id, (None, [], 0))
        if index is not None and self._past is not None and seq.generated > 0:
            self._past.add(list(seq.tokens))

    def view(self, seq: Seq) -> SuffixView:
        index, text, done = self._own.get(seq.id) or (Index((1, 2, 4)), seq.tokens, 0)
        index.add(text, done, len(text))
        self._own[seq.id] = (index, text, len(text))
        return SuffixView(text, [index, *([self._past.index] if self._past else [])])


class SuffixView:
    def __init__(self, text: Sequence[int], indexes: Sequence[Index]) -> None:
        self._text, self._indexes = text, indexes
        self._matches: dict[tuple[int, ...], list[Match]] = {}

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        matches = self._at(path)
        if not matches:
            return ()
        total = len(matches)
        longest: dict[int, int] = {}
        counts: dict[int, int] = {}
        for text, at, length in matches:
            token = text[at]
            longest[token] = max(longest.get(token, 0), length)
            counts[token] = counts.get(token, 0) + 1
        return [(token, _kind(length, counts[token], total)) for token, length in longest.items()]

    def _at(self, path: tuple[int, ...]) -> list[Match]:
        """The matches of text + path: those of its parent that went this way, or what a shorter match finds anew."""
        matches: list[Match] = []
        if path:
            matches = [
                (text, at + 1, length + 1)
                for text, at, length in self._matches[path[:-1]]
                if text[at] == path[-1] and at + 1 < len(text)
            ]
        if not matches:
            context = [*self._text[-24:], *path]
            for index in self._indexes:
                matches += index.find(context)
            best = max((length for _, _, length in matches), default=0)
            matches = [match for match in matches if 2 * match[2] >= best]
        self._matches[path] = matches
        return matches
