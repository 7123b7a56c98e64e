"""Token recycling (Luo et al. 2024, arXiv 2408.08696): what the target last held likeliest after each token.

The eight likeliest successors of every token, as last seen, whatever the text before it, and of every pair of tokens:
from every row that the target verifies, kept or not, across requests. It can start warm, without any data: the target
is run once over its whole vocabulary, each token by itself.

How likely the target held a successor goes with it: a guess is the surer the likelier its successor was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foretell.drafters.base import Progress
from foretell.drafters.files import read_arrays, write_arrays
from foretell.drafters.search import Guess, Source
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.models.top import top_tokens
from foretell.types import Rows, Sampling, Seen, Seq

WIDTH = 8  # successors kept of each key
BATCH = 128  # tokens of one pass of the warm start
PAIRS = 1 << 17  # pairs of tokens kept
FILE = "successors.npz"

# The share of the eight that a successor has, from which on its kind is surer.
SHARES = np.array([0.01, 0.05, 0.13, 0.3, 0.5, 0.75, 0.9])
LEVELS = len(SHARES) + 1
KINDS = WIDTH * LEVELS + LEVELS  # of a successor by rank and share; of "none of these" by the first one's share
LEARNT, WARM, PAIR = 0, KINDS, 2 * KINDS  # first kind of what was seen in use, in the warm start, after both tokens


class RecyclingSource(Source):
    kinds = 3 * (0.0,) * KINDS

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.known = Successors(vocab_size)
        self._saved = self.known.copy()

    def warm(self, target: Target, cache: Cache, progress: Progress) -> None:
        self.known = Successors(self.vocab_size)
        self.known.of_token[:] = warm_successors(target, cache, progress)
        self._saved = self.known.copy()

    def reset(self) -> None:
        self.known = self._saved.copy()

    def save(self, folder: Path) -> None:
        self.known.save(folder / FILE)
        self._saved = self.known.copy()

    def load(self, folder: Path) -> None:
        loaded = Successors.load(folder / FILE, self.vocab_size)
        if loaded is not None:
            self.known, self._saved = loaded, loaded.copy()

    def observe(self, seen: Seen) -> None:
        rows = seen.rows
        ends, parents, want = rows.indptr.tolist(), rows.parents.tolist(), rows.want.tolist()
        tokens, positions = rows.tokens.tolist(), rows.positions.tolist()
        chosen: list[int] = []  # of want
        keys: list[tuple[int, int]] = []  # the token before it (-1: none), and the row's own
        for b, seq in enumerate(seen.seqs):
            if seq.sampling.private:
                continue
            for i in seen.judged[b]:  # the text before a rider may be anything
                row = want[i]
                if parents[row] >= 0:
                    before = tokens[ends[b] + parents[row]]
                else:
                    before = seq.tokens[positions[row] - 1] if positions[row] else -1
                chosen.append(i)
                keys.append((before, tokens[row]))
        if chosen:
            self.known.put(keys, successors(seen.logits[chosen]))

    def view(self, seq: Seq) -> RecyclingView:
        return RecyclingView(self.known, seq.tokens[-2:])


class RecyclingView:
    def __init__(self, known: Successors, end: Sequence[int]) -> None:
        self._known, self._end = known, end

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        last = path[-1] if path else self._end[-1]
        before = [*self._end, *path][-2] if len(self._end) + len(path) > 1 else -1
        return self._known.after(before, last)


class Successors:
    """What may follow each token, and each pair of them: lines of remarks, the first of which is about NONE."""

    def __init__(self, vocab_size: int) -> None:
        self.of_token = _lines(vocab_size)
        self.of_pair = _lines(0)
        self._place: dict[tuple[int, int], int] = {}  # pair -> its line of `of_pair`
        self._pairs: list[tuple[int, int]] = []  # the other way
        self._oldest = 0  # the line that is written over next, once there are PAIRS of them

    def copy(self) -> Successors:
        other = Successors(0)
        other.of_token, other.of_pair = self.of_token.copy(), self.of_pair.copy()
        other._place, other._pairs, other._oldest = dict(self._place), list(self._pairs), self._oldest
        return other

    def after(self, before: int, last: int) -> list[Guess]:
        """What is known to follow the last token, and both."""
        tokens, kinds = self.of_token[last].tolist()
        place = self._place.get((before, last))
        if place is not None:
            more, theirs = self.of_pair[place].tolist()
            tokens, kinds = tokens + more, kinds + theirs
        return [guess for guess in zip(tokens, kinds, strict=True) if guess[1] >= 0]

    def put(self, keys: Sequence[tuple[int, int]], lines: np.ndarray) -> None:
        """keys: [M] pairs, -1 before the first token of a text; lines: [M, 2, WIDTH+1], of kinds LEARNT."""
        self.of_token[[last for _, last in keys]] = lines
        for pair, line in zip(keys, _of_kind(lines, PAIR), strict=True):
            place = self._line(pair)  # which may make room for it
            self.of_pair[place] = line

    def _line(self, pair: tuple[int, int]) -> int:
        """Where the pair's line is, or from now on will be."""
        place = self._place.get(pair)
        if place is None:
            if len(self._pairs) < PAIRS:
                place = len(self._pairs)
                self._pairs.append(pair)
                if place == len(self.of_pair):
                    self.of_pair = np.concatenate((self.of_pair, _lines(max(1024, place))))
            else:
                place, self._oldest = self._oldest, (self._oldest + 1) % PAIRS
                del self._place[self._pairs[place]]
                self._pairs[place] = pair
            self._place[pair] = place
        return place

    def save(self, path: Path) -> None:
        pairs = np.array(self._pairs, dtype=np.int32).reshape(-1, 2)
        write_arrays(path, of_token=self.of_token, of_pair=self.of_pair[: len(pairs)], pairs=pairs)

    @staticmethod
    def load(path: Path, vocab_size: int) -> Successors | None:
        """What was saved there, if it is whole and of this vocabulary."""
        arrays = read_arrays(path, "of_token", "of_pair", "pairs")
        if arrays is None:
            return None
        of_token, of_pair, pairs = arrays.values()
        known = Successors(0)
        known.of_token, known.of_pair = of_token, of_pair
        shapes = of_token.shape == (vocab_size, 2, WIDTH + 1) and of_pair.shape == (len(pairs), 2, WIDTH + 1)
        if not shapes or not len(pairs) <= PAIRS or not (_fit(of_token, vocab_size) and _fit(of_pair, vocab_size)):
            return None
        known._pairs = [(before, last) for before, last in pairs.tolist()]
        known._place = {pair: place for place, pair in enumerate(known._pairs)}
        return known


def _lines(count: int) -> np.ndarray:
    """int32 [count, 2, WIDTH+1] of nothing known: tokens, and under them kinds."""
    return np.full((count, 2, WIDTH + 1), -1, dtype=np.int32)


def _of_kind(lines: np.ndarray, first: int) -> np.ndarray:
    """The same lines, of LEARNT kinds, as those of another origin."""
    moved = lines.copy()
    moved[:, 1] = np.where(lines[:, 1] >= 0, lines[:, 1] + first, -1)
    return moved


def _fit(lines: np.ndarray, vocab_size: int) -> bool:
    in_range = -1 <= lines.min(initial=-1) and lines[:, 0].max(initial=-1) < vocab_size
    return lines.dtype == np.int32 and bool(in_range) and lines[:, 1].max(initial=-1) < 3 * KINDS


def successors(logits: Tensor) -> np.ndarray:
    """logits: [M, V] -> int32 [M, 2, WIDTH+1], the likeliest tokens of each row with their kinds, of LEARNT."""
    lines = _lines(len(logits))
    top = top_tokens(logits, WIDTH)
    found = torch.gather(logits, 1, torch.from_numpy(top).long())
    levels = np.digitize(torch.softmax(found.float(), dim=-1).numpy(), SHARES)
    width = top.shape[1]  # less than WIDTH only in a tiny vocabulary
    lines[:, 0, 1 : width + 1] = top
    lines[:, 1, 1 : width + 1] = np.arange(width) * LEVELS + levels
    lines[:, 1, 0] = WIDTH * LEVELS + levels[:, 0]
    return lines


@torch.inference_mode()
def warm_successors(target: Target, cache: Cache, progress: Progress = lambda done, total: None) -> np.ndarray:
    """int32 [V, 2, WIDTH+1]: the likeliest successors of each token, after token 0 and nothing else."""
    lines = _lines(target.vocab_size)
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
            lines[start : tokens.stop] = successors(target.forward(rows, cache).logits)
            progress(tokens.stop, target.vocab_size)
    finally:
        cache.release(seq)
    return _of_kind(lines, WARM)
