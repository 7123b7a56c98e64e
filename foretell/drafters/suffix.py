"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): what followed the longest end of the text that occurred
before, in the request itself or in past responses.

In place of a suffix tree, whose nodes are many for each token, an index from short runs of tokens to the latest places
where they occurred; the match is then extended backwards. What follows at those places is walked like the tree's
branches: a guess is the surer the longer its match and the more places agree.
"""

from __future__ import annotations

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
KINDS = NOTHING + len(LENGTHS)  # of the request's own text; as many of past ones
WEIGHTS = (  # of the own text, of past ones: by length and share, then of NONE by length; see docs/drafters.md
    (
        1.67,
        1.18,
        0.65,
        1.65,
        1.04,
        0.27,
        1.17,
        -0.15,
        0.25,
        1.55,
        0.62,
        0.09,
        2.26,
        0.48,
        -0.61,
        2.69,
        -0.30,
        0.06,
        3.26,
        0.62,
        -0.14,
        *(0.66, 0.31, 0.23, 0.07, 0.53, 0.07, -1.07),
    ),
    (
        0.00,
        0.00,
        0.00,
        0.00,
        0.00,
        0.00,
        1.42,
        0.78,
        0.57,
        2.00,
        1.69,
        1.41,
        2.44,
        2.76,
        1.60,
        3.71,
        2.59,
        0.24,
        2.00,
        -0.03,
        0.24,
        *(0.00, 0.00, -0.07, 0.11, 0.38, -0.16, -0.23),
    ),
)
FILE = "past.npz"


class SuffixSource(Source):
    """past: tokens of finished requests kept for others, 0 for none."""

    kinds = (*WEIGHTS[0], *WEIGHTS[1])

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
        return SuffixView(text, index, past.index)


def _kind(length: int, count: int, total: int) -> int:
    share = 0 if count == total else 1 if 2 * count >= total else 2
    return _bucket(length) * SHARES + share


def _bucket(length: int) -> int:
    return sum(length >= start for start in LENGTHS) - 1


class SuffixView:
    """What its own text says, and what the past says."""

    def __init__(self, text: Sequence[int], own: Index, past: Index) -> None:
        self._walks = [(Walk(text, [own]), 0), (Walk(text, [past]), KINDS)]

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        guesses: list[Guess] = []
        for walk, first in self._walks:
            matches = walk.at(path)
            if not matches:
                continue
            longest: dict[int, int] = {}
            counts: dict[int, int] = {}
            for text, at, length in matches:
                token = text[at]
                longest[token] = max(longest.get(token, 0), length)
                counts[token] = counts.get(token, 0) + 1
            total = len(matches)
            guesses += [(token, first + _kind(n, counts[token], total)) for token, n in longest.items()]
            guesses.append((NONE, first + NOTHING + _bucket(max(longest.values()))))
        return guesses
