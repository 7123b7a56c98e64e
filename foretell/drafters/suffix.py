"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): what followed the longest end of the text that occurred
before, in the request itself or in past responses.

In place of a suffix tree, whose nodes are many for each token, an index from short runs of tokens to the latest places
where they occurred; the match is then extended backwards. What follows at those places is walked like the tree's
branches: a guess is the surer the longer its match and the more places agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foretell.drafters.files import read_arrays, write_arrays
from foretell.drafters.index import Index, Past, Walk
from foretell.drafters.search import NONE, Guess, Source
from foretell.types import Seq

LENGTHS = (1, 2, 3, 4, 6, 10, 18)  # match lengths from which on a guess counts as surer
SHARES = 3  # all places agree, most do, few do
NOTHING = len(LENGTHS) * SHARES  # the first kind of a remark about NONE, by the longest match
FILE = "past.npz"


class SuffixSource(Source):
    """past: tokens of finished requests kept for others, 0 for none."""

    kinds = tuple(
        math.log(max(0.02, base * share)) - math.log(1 - base * share)
        for base in (0.2, 0.4, 0.55, 0.65, 0.75, 0.85, 0.9)
        for share in (1.0, 0.7, 0.25)
    ) + (0.0,) * len(LENGTHS)

    def __init__(self, past: int = 200_000) -> None:
        self._past, self._alone = Past(3, past), Past(3, 0)
        self._saved: list[list[int]] = []
        self._own: dict[int, tuple[Index, list[int], int]] = {}  # request id -> index, its text, tokens indexed

    def reset(self) -> None:
        self._past = Past(3, self._past.capacity)
        for text in self._saved:
            self._past.add(text)

    def save(self, folder: Path) -> None:
        self._saved = self._past.texts()
        lengths = np.array([len(text) for text in self._saved], dtype=np.int32)
        tokens = np.array([token for text in self._saved for token in text], dtype=np.int32)
        write_arrays(folder / FILE, lengths=lengths, tokens=tokens)

    def load(self, folder: Path) -> None:
        arrays = read_arrays(folder / FILE, "lengths", "tokens")
        if arrays is not None and arrays["lengths"].sum() == len(arrays["tokens"]):
            tokens = arrays["tokens"].tolist()
            ends = arrays["lengths"].cumsum().tolist()
            self._saved = [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            self.reset()

    def forget(self, seq: Seq) -> None:
        index, _, _ = self._own.pop(seq.id, (None, [], 0))
        if index is not None and seq.generated > 0 and not seq.sampling.private:
            self._past.add(list(seq.tokens))

    def view(self, seq: Seq) -> SuffixView:
        index, text, done = self._own.get(seq.id) or (Index((1, 2, 4)), seq.tokens, 0)
        index.add(text, done, len(text))
        self._own[seq.id] = (index, text, len(text))
        past = self._alone if seq.sampling.private else self._past
        return SuffixView(text, [index, past.index])


def _kind(length: int, count: int, total: int) -> int:
    share = 0 if count == total else 1 if 2 * count >= total else 2
    return _bucket(length) * SHARES + share


def _bucket(length: int) -> int:
    return sum(length >= start for start in LENGTHS) - 1


class SuffixView:
    def __init__(self, text: Sequence[int], indexes: Sequence[Index]) -> None:
        self._walk = Walk(text, indexes)

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        matches = self._walk.at(path)
        if not matches:
            return ()
        total = len(matches)
        longest: dict[int, int] = {}
        counts: dict[int, int] = {}
        for text, at, length in matches:
            token = text[at]
            longest[token] = max(longest.get(token, 0), length)
            counts[token] = counts.get(token, 0) + 1
        guesses = [(token, _kind(length, counts[token], total)) for token, length in longest.items()]
        return [*guesses, (NONE, NOTHING + _bucket(max(longest.values())))]
