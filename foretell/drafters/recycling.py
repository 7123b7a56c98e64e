"""Token recycling (Luo et al. 2024, arXiv 2408.08696): what the target last held likeliest after each token.

The eight likeliest successors of every token, as last seen, and of every pair of tokens: from every row that the target
verifies, kept or not. What a request's own rows said comes first, then what all requests' did. It can start warm,
without any data: the target is run once over its whole vocabulary, each token by itself, and writes some texts of its
own.

How likely the target held a successor goes with it: a guess is the surer the likelier its successor was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from struct import Struct

import numpy as np
import torch

from foretell.drafters.base import Progress
from foretell.drafters.files import read_arrays, write_arrays
from foretell.drafters.search import Guess, Source
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.models.top import top_tokens
from foretell.types import Draw, Rows, Sampling, Seen, Seq

WIDTH = 8  # successors kept of each key
BATCH = 128  # tokens of one pass of the warm start
LINE = Struct(f"={2 * (WIDTH + 1)}i")  # the bytes of a line of remarks
PAIRS = 1 << 17  # pairs of tokens kept of all requests
LISTEN = 2  # requests without drafts that a step learns from, in turn: a large batch would pay more than it gains
HEARD = 64  # rounds of requests that are learnt from at once at most
OWN = 1 << 13  # tokens and pairs kept of a request's own
FILE = "successors.npz"

# The share of the eight that a successor has, from which on its kind is surer.
SHARES = np.array([0.01, 0.05, 0.13, 0.3, 0.5, 0.75, 0.9])
LEVELS = len(SHARES) + 1
KINDS = WIDTH * LEVELS + LEVELS  # of a successor by rank and share; of "none of these" by the first one's share
# The first kind of what is known of a token, and of a pair of them, from the request itself and from before.
TOKEN, PAIR, TOKEN_BEFORE, PAIR_BEFORE = 0, KINDS, 2 * KINDS, 3 * KINDS
WEIGHTS = (  # of each origin: by rank, by share, of NONE by the share of the first; see docs/drafters.md
    (
        (0.11, 0.91, 0.52, 0.41, 0.54, 0.26, 0.09, -0.07),
        (-0.26, -0.13, 0.21, 0.13, 0.38, 0.68, 0.56, 0.65),
        (2.72, 2.72, 2.72, 2.72, 2.56, 2.54, 2.57, 2.34),
    ),
    (
        (-0.17, 1.04, 0.92, 0.79, 0.33, 0.55, 0.17, 0.25),
        (-0.08, -0.19, 0.07, 0.81, 0.03, 0.24, 0.39, 0.45),
        (1.02, 1.02, 1.02, 1.02, 0.55, 0.64, 0.25, 0.29),
    ),
    (
        (0.33, 0.37, 0.40, -0.17, -0.20, 0.05, -0.33, -0.48),
        (-0.97, -0.35, -0.21, -0.28, 0.26, 0.57, 0.98, 1.28),
        (2.82, 2.82, 2.82, 2.82, 2.62, 2.70, 2.31, 1.34),
    ),
    (
        (0.56, 1.15, 0.60, 0.71, 0.51, 0.32, 0.11, 0.30),
        (-0.49, -0.09, 0.07, 0.20, 0.59, 0.98, 1.10, 1.41),
        (0.41, 0.41, 0.41, 0.41, 0.56, 0.45, 0.20, 0.06),
    ),
)

Pair = tuple[int, int]  # of tokens in a row; -1 is before the first
Heard = tuple[Seq, list[Pair], np.ndarray, np.ndarray]  # rows of a request's round, and what `top_tokens` tells of them
Own = dict[int | Pair, bytes]  # what a request's own rows said of a token or a pair: a line of kinds TOKEN


class RecyclingSource(Source):
    kinds = [w for ranks, shares, none in WEIGHTS for w in (*(r + s for r in ranks for s in shares), *none)]

    def __init__(self, vocab_size: int) -> None:
        self.known = Successors(vocab_size)
        self._saved = self.known.copy()
        self._own: dict[int, Own] = {}  # request id
        self._heard: list[Heard] = []  # what is still to be learnt
        self._turn = 0  # which of the requests without drafts is listened to next

    def warm(self, target: Target, cache: Cache, progress: Progress) -> None:
        self._catch_up()
        self.known = Successors(target.vocab_size)
        self.known.of_token[:] = warm_successors(target, cache, progress)
        self.known.fixed[:] = True

    def reset(self) -> None:
        self._heard.clear()
        self.known = self._saved.copy()

    def save(self, folder: Path) -> None:
        self._catch_up()
        self.known.save(folder / FILE)
        self._saved = self.known.copy()

    def load(self, folder: Path) -> None:
        self._catch_up()
        loaded = Successors.load(folder / FILE, len(self.known.of_token))
        if loaded is not None:
            self.known, self._saved = loaded, loaded.copy()

    def forget(self, seq: Seq) -> None:
        self._catch_up()
        self._own.pop(seq.id, None)

    def prepare(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> None:
        self._catch_up()

    def observe(self, seen: Seen) -> None:
        rows = seen.rows
        ends, parents, want = rows.indptr.tolist(), rows.parents.tolist(), rows.want.tolist()
        tokens, positions = rows.tokens.tolist(), rows.positions.tolist()
        for i in self._listened(seen.judged):
            seq, of, pairs = seen.seqs[i], seen.judged[i], []  # not the riders: the text before one may be anything
            for row in want[of.start : of.stop]:
                parent, position = parents[row], positions[row]
                before = tokens[ends[i] + parent] if parent >= 0 else seq.tokens[position - 1] if position else -1
                pairs.append((before, tokens[row]))
            self._heard.append((seq, pairs, *top_tokens(seen.logits[of.start : of.stop], WIDTH)))
        if len(self._heard) >= HEARD:
            self._catch_up()

    def _listened(self, judged: Sequence[range]) -> list[int]:
        """Which requests of a step are learnt from: those with drafts, and some of the others."""
        alone = [i for i, of in enumerate(judged) if len(of) == 1]
        if len(alone) > LISTEN:
            first = self._turn % len(alone)
            alone = (alone + alone)[first : first + LISTEN]
        self._turn += LISTEN
        return [i for i, of in enumerate(judged) if len(of) > 1 or i in alone]

    def _catch_up(self) -> None:
        """Learn what was heard: of many rounds at once where nothing was drafted meanwhile, for a fraction of the
        time that each would take alone."""
        if self._heard:
            tops, found = (np.concatenate([heard[i] for heard in self._heard]) for i in (2, 3))
            lines, start = successors(tops, found), 0
            for seq, pairs, _, _ in self._heard:
                self.learn(seq, pairs, lines[start : start + len(pairs)])
                start += len(pairs)
            self._heard.clear()

    def learn(self, seq: Seq, pairs: Sequence[Pair], lines: np.ndarray) -> None:
        """What the target said after each pair: lines [M, 2, WIDTH+1], of kinds TOKEN."""
        own = self._own.setdefault(seq.id, {})
        for pair, line in zip(pairs, lines, strict=True):
            own[pair[1]] = own[pair] = line.tobytes()
        if len(own) > OWN:
            for key in list(islice(own, len(own) - OWN)):
                del own[key]
        if not seq.sampling.private:
            self.known.put(pairs, lines)

    def view(self, seq: Seq) -> RecyclingView:
        return RecyclingView(self.known, self._own.get(seq.id, {}), seq.tokens[-2:])


class RecyclingView:
    def __init__(self, known: Successors, own: Own, end: Sequence[int]) -> None:
        self._known, self._own, self._end = known, own, end

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        last = path[-1] if path else self._end[-1]
        before = [-1, *self._end, *path][-2]
        after_token, after_pair = self._own.get(last), self._own.get((before, last))
        return (self._known.after(last) if after_token is None else _own_remarks(after_token, TOKEN)) + (
            self._known.after_pair(before, last) if after_pair is None else _own_remarks(after_pair, PAIR)
        )


class Successors:
    """What may follow each token, and each pair of them: lines of remarks, the first of which is about NONE."""

    def __init__(self, vocab_size: int) -> None:
        self.of_token = _lines(vocab_size)
        self.fixed = np.zeros(vocab_size, dtype=np.bool_)  # lines of the warm start: no text in use tells more
        self.of_pair = _lines(0)
        self._place: dict[Pair, int] = {}  # its line of `of_pair`
        self._pairs: list[Pair] = []  # the other way
        self._oldest = 0  # the line that is written over next, once there are PAIRS of them

    def copy(self) -> Successors:
        other = Successors(0)
        other.of_token, other.fixed, other.of_pair = self.of_token.copy(), self.fixed.copy(), self.of_pair.copy()
        other._place, other._pairs, other._oldest = dict(self._place), list(self._pairs), self._oldest
        return other

    def after(self, last: int) -> list[Guess]:
        return _remarks(*self.of_token[last].tolist())

    def after_pair(self, before: int, last: int) -> list[Guess]:
        place = self._place.get((before, last))
        return [] if place is None else _remarks(*self.of_pair[place].tolist())

    def put(self, pairs: Sequence[Pair], lines: np.ndarray) -> None:
        """lines: [M, 2, WIDTH+1], of kinds TOKEN."""
        last = np.array([token for _, token in pairs])
        free = ~self.fixed[last]
        self.of_token[last[free]] = _of_kind(lines[free], TOKEN_BEFORE)
        for pair, line in zip(pairs, _of_kind(lines, PAIR_BEFORE), strict=True):
            place = self._line(pair)  # which may make room for it
            self.of_pair[place] = line

    def _line(self, pair: Pair) -> int:
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
        of_pair = self.of_pair[: len(pairs)]
        write_arrays(path, of_token=self.of_token, fixed=self.fixed, of_pair=of_pair, pairs=pairs)

    @staticmethod
    def load(path: Path, vocab_size: int) -> Successors | None:
        """What was saved there, if it is whole and of this vocabulary."""
        arrays = read_arrays(path, "of_token", "fixed", "of_pair", "pairs")
        if arrays is None:
            return None
        of_token, fixed, of_pair, pairs = arrays.values()
        shapes = of_token.shape == (vocab_size, 2, WIDTH + 1) and of_pair.shape == (len(pairs), 2, WIDTH + 1)
        if not shapes or fixed.shape != (vocab_size,) or len(pairs) > PAIRS:
            return None
        if not (_fit(of_token, vocab_size) and _fit(of_pair, vocab_size)):
            return None
        known = Successors(0)
        known.of_token, known.fixed, known.of_pair = of_token, fixed.astype(np.bool_), of_pair
        known._pairs = [(before, last) for before, last in pairs.tolist()]
        known._place = {pair: place for place, pair in enumerate(known._pairs)}
        return known


def _remarks(tokens: Sequence[int], kinds: Sequence[int], first: int = 0) -> list[Guess]:
    """What is known by a line; first: where the kinds of its origin begin, if it does not count them in."""
    return [(token, first + kind) for token, kind in zip(tokens, kinds, strict=True) if kind >= 0]


def _own_remarks(raw: bytes, first: int) -> list[Guess]:
    """Of a line of kinds TOKEN, as kinds of another origin."""
    values = LINE.unpack(raw)
    return _remarks(values[: WIDTH + 1], values[WIDTH + 1 :], first)


def _lines(count: int) -> np.ndarray:
    """int32 [count, 2, WIDTH+1] of nothing known: tokens, and under them kinds."""
    return np.full((count, 2, WIDTH + 1), -1, dtype=np.int32)


def _of_kind(lines: np.ndarray, first: int) -> np.ndarray:
    """The same lines, of TOKEN kinds, as those of another origin."""
    moved = lines.copy()
    moved[:, 1] = np.where(lines[:, 1] >= 0, lines[:, 1] + first, -1)
    return moved


def _fit(lines: np.ndarray, vocab_size: int) -> bool:
    in_range = -1 <= lines.min(initial=-1) and lines[:, 0].max(initial=-1) < vocab_size
    return lines.dtype == np.int32 and bool(in_range) and lines[:, 1].max(initial=-1) < 4 * KINDS


def successors(top: np.ndarray, found: np.ndarray) -> np.ndarray:
    """What `top_tokens` tells of M rows -> int32 [M, 2, WIDTH+1], these tokens with their kinds, of TOKEN."""
    lines = _lines(len(top))
    odds = np.exp(found - found[:, :1])
    levels = SHARES.searchsorted(odds / odds.sum(1, keepdims=True), side="right")
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
            lines[start : tokens.stop] = successors(*top_tokens(target.forward(rows, cache).logits, WIDTH))
            progress(tokens.stop, target.vocab_size)
    finally:
        cache.release(seq)
    return _of_kind(lines, TOKEN_BEFORE)
