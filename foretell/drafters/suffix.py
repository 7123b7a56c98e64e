"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): what followed the longest end of the text that occurred
before, in the request itself or in past responses.

In place of a suffix tree, whose nodes are many for each token, an index from short runs of tokens to the latest places
where they occurred; the match is then extended backwards. What follows at those places is walked like the tree's
branches: a guess is the surer the longer its match and the more places agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foretell.drafters.files import read_arrays, write_arrays
from foretell.drafters.index import Archive, Index, Past, Walk
from foretell.drafters.search import NONE, Guess, Source
from foretell.types import Seq

LENGTHS = (1, 2, 3, 4, 6, 10, 18)  # match lengths from which on a guess counts as surer
SHARES = 3  # all places agree, most do, few do
NOTHING = len(LENGTHS) * SHARES  # the first kind of a remark about NONE, by the longest match
KINDS = NOTHING + len(LENGTHS)  # of the request's own text; as many of past ones
WEIGHTS = (  # of the own text, of past ones: by length and share, then of NONE by length; see docs/drafters.md
    (
        (1.83, 1.30, 0.74),
        (1.66, 1.04, 0.21),
        (1.17, 0.17, 0.05),
        (1.58, 0.79, -0.05),
        (2.33, 0.79, -0.54),
        (2.80, -0.28, 0.05),
        (3.29, 0.76, -0.08),
        (0.69, 0.34, 0.28, 0.10, 0.65, 0.06, -0.99),
    ),
    (
        (0.00, 0.00, 0.00),
        (0.00, 0.00, 0.00),
        (1.48, 1.42, 0.52),
        (2.26, 2.28, 1.29),
        (2.67, 2.88, 1.07),
        (3.89, 2.05, 1.52),
        (3.89, -0.07, 1.52),
        (0.00, 0.00, -0.00, 0.25, 0.27, 0.18, 0.25),
    ),
)
FILE = "past.npz"
PAST = 200_000  # tokens


class SuffixSource(Source):
    """past: tokens of finished requests kept for others, 0 for none."""

    kinds = [weight for origin in WEIGHTS for line in origin for weight in line]

    def __init__(self, past: int = PAST) -> None:
        self._capacity = past
        self._saved = Archive(3, *_flat([]))  # what it began with
        self._past = Past(3, past)  # what came since
        self._own: dict[int, tuple[Index, list[int], int]] = {}  # request id -> index, its text, tokens indexed

    def reset(self) -> None:
        self._past = Past(3, self._capacity)

    def save(self, folder: Path) -> None:
        ends = self._saved.lengths.cumsum()
        texts = [*(part.tolist() for part in np.split(self._saved.tokens, ends[:-1])), *self._past.texts()]
        while sum(map(len, texts)) > self._capacity:
            del texts[0]
        tokens, lengths = _flat([text for text in texts if text])
        write_arrays(folder / FILE, tokens=tokens, lengths=lengths)
        self._begin(tokens, lengths)

    def load(self, folder: Path) -> None:
        arrays = read_arrays(folder / FILE, "tokens", "lengths")
        if arrays is None:
            return
        tokens, lengths = arrays["tokens"], arrays["lengths"]
        whole = tokens.ndim == lengths.ndim == 1 and lengths.sum() == len(tokens) and lengths.min(initial=1) > 0
        if whole and tokens.dtype == lengths.dtype == np.int32 and tokens.min(initial=0) >= 0:
            self._begin(tokens, lengths)

    def _begin(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self._saved = Archive(3, tokens, lengths)
        self.reset()

    def forget(self, seq: Seq) -> None:
        self._own.pop(seq.id, None)
        if seq.generated > 0 and not seq.sampling.private:
            self._past.add(seq.tokens)

    def view(self, seq: Seq) -> SuffixView:
        index, text, done = self._own.get(seq.id) or (Index((1, 2, 4)), seq.tokens, 0)
        index.add(text, done, len(text))
        self._own[seq.id] = (index, text, len(text))
        past: list[Index | Archive] = [] if seq.sampling.private else [self._past.index, self._saved]
        return SuffixView(text, [index], past)


def _kind(length: int, count: int, total: int) -> int:
    share = 0 if count == total else 1 if 2 * count >= total else 2
    return _bucket(length) * SHARES + share


def _bucket(length: int) -> int:
    return bisect_right(LENGTHS, length) - 1


def _flat(texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """int32 tokens of all texts in turn, and their lengths."""
    tokens = np.array([token for text in texts for token in text], dtype=np.int32)
    return tokens, np.array([len(text) for text in texts], dtype=np.int32)


class SuffixView:
    """What its own text says, and what the past says."""

    def __init__(self, text: Sequence[int], own: Sequence[Index], past: Sequence[Index | Archive]) -> None:
        self._walks = [(Walk(text, own), 0), (Walk(text, past), KINDS)]

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
