"""Token recycling (Luo et al. 2024, arXiv 2408.08696): what the target last held likeliest after each token.

A matrix of every token's eight likeliest successors, as last seen, whatever the text before it: from every row that the
target verifies, kept or not, across requests. It can start warm: the target run once over its whole vocabulary, each
token by itself, without any data; saved beside the model's other files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from foretell.drafters.base import Progress
from foretell.drafters.search import Guess, Source
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.models.top import top_tokens
from foretell.types import Rows, Sampling, Seen, Seq

WIDTH = 8  # successors kept of each token
BATCH = 128  # tokens of one pass of the warm start


class RecyclingSource(Source):
    """saved: where the warm matrix of this model is kept; it is used if it is there, else nothing is known at first."""

    kinds = (0.34, 0.09, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01)  # by rank

    def __init__(self, vocab_size: int, saved: Path | None = None) -> None:
        loaded = load_matrix(saved, vocab_size) if saved else None
        self.matrix = empty_matrix(vocab_size) if loaded is None else loaded  # int32 [V, WIDTH], -1 is unknown
        self._start = self.matrix.copy()
        self._saved = saved

    def warm(self, target: Target, cache: Cache, progress: Progress) -> None:
        self._start = warm_matrix(target, cache, progress)
        self.reset()
        if self._saved:
            save_matrix(self._saved, self._start)

    def reset(self) -> None:
        self.matrix = self._start.copy()

    def observe(self, seen: Seen) -> None:
        judged = sum(map(len, seen.judged))  # the text before a rider may be anything
        if judged:
            tokens = seen.rows.tokens[seen.rows.want[:judged]].numpy()
            self.matrix[tokens] = top_tokens(seen.logits[:judged], WIDTH)

    def view(self, seq: Seq) -> RecyclingView:
        return RecyclingView(self.matrix, seq.tokens[-1])


class RecyclingView:
    def __init__(self, matrix: np.ndarray, root: int) -> None:
        self._matrix, self._root = matrix, root

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        line = self._matrix[path[-1] if path else self._root].tolist()
        return [(token, rank) for rank, token in enumerate(line) if token >= 0]


def empty_matrix(vocab_size: int) -> np.ndarray:
    return np.full((vocab_size, WIDTH), -1, dtype=np.int32)


@torch.inference_mode()
def warm_matrix(target: Target, cache: Cache, progress: Progress = lambda done, total: None) -> np.ndarray:
    """int32 [V, WIDTH]: the likeliest successors of each token, after token 0 and nothing else."""
    matrix = empty_matrix(target.vocab_size)
    size = min(BATCH, cache.available - 1)
    seq = Seq(-1, [0, 0], 2, Sampling(), 0)
    if not cache.admit(seq):
        raise ValueError("the warm start needs an idle engine: all places are taken")
    try:
        for start in range(0, target.vocab_size, size):
            tokens = range(start, min(start + size, target.vocab_size))
            cache.reserve(seq, len(tokens) + 1)
            parents = [-1, *[0] * len(tokens)]  # token 0, and the others as its children
            rows = Rows.of(seq, [0, *tokens], parents, cache.reserved(seq), range(1, len(tokens) + 1))
            matrix[start : tokens.stop] = top_tokens(target.forward(rows, cache).logits, WIDTH)
            progress(tokens.stop, target.vocab_size)
    finally:
        cache.release(seq)
    return matrix


def load_matrix(path: Path, vocab_size: int) -> np.ndarray | None:
    """The matrix saved there, if it is whole and of this vocabulary."""
    try:
        matrix = np.load(path, allow_pickle=False)
    except (OSError, ValueError):
        return None
    fits = matrix.shape == (vocab_size, WIDTH) and matrix.dtype == np.int32 and matrix.max(initial=-1) < vocab_size
    return matrix if fits else None


def save_matrix(path: Path, matrix: np.ndarray) -> None:
    """Written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fresh = Path(scratch) / path.name
        with fresh.open("wb") as file:
            np.save(file, matrix)
        os.replace(fresh, path)
