"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): the target's own n-grams, found by Jacobi iteration.

Beside every verification the target computes a window of guesses about the text further on. A column of the window is
a run of tokens; each round its last row says what the target holds likeliest next, the run moves on by that token, and
run and token together go into a pool of n-grams. Nodes come from the pool alone. No draft model, no training, no text
that repeats itself: only rows, more of them than any other drafter takes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretell.drafters.search import Guess, Source
from foretell.types import Seen, Seq

KEYS = 4096  # first tokens of n-grams that a request's pool keeps
STRIDE = 0.6180339887498949  # the golden ratio's: places of new columns spread evenly over the text
SHARES = (1.0, 0.5)  # of a chance: what was harvested last, what was before
CHANCES = (0.2, 0.45, 0.6)  # by how many tokens of the text an n-gram agrees with

Gram = tuple[int, ...]  # what follows the first token


class Pool:
    """N-grams by their first token, at most `guesses` of one key and KEYS keys; the least recently seen go first."""

    def __init__(self, guesses: int) -> None:
        self.guesses = guesses
        self.grams: OrderedDict[int, dict[Gram, None]] = OrderedDict()  # in the order they were last seen

    def add(self, first: int, rest: Gram) -> None:
        grams = self.grams.setdefault(first, {})
        self.grams.move_to_end(first)
        grams.pop(rest, None)
        grams[rest] = None
        if len(grams) > self.guesses:
            del grams[next(iter(grams))]
        if len(self.grams) > KEYS:
            self.grams.popitem(last=False)

    def after(self, context: Sequence[int]) -> list[Gram]:
        """What follows the n-grams that begin with the context, at least one token long; the latest first."""
        begun = tuple(context[1:])
        return [rest[len(begun) :] for rest in reversed(self.grams.get(context[0], {})) if rest[: len(begun)] == begun]


@dataclass(slots=True)
class Window:
    """One request's columns. Column i holds the tokens guessed at positions base + i and after."""

    pool: Pool
    base: int = 0
    columns: list[list[int]] = field(default_factory=list)
    riding: int = 0  # of them, in the rows of this round
    filled: int = 0  # columns taken from the text so far


class LookaheadSource(Source):
    """window: columns (the paper's W). level: length of the n-grams (N). guesses: kept of each first token (G).
    prompt: the pool starts with the prompt's own n-grams."""

    def __init__(self, window: int = 3, level: int = 2, guesses: int = 7, *, prompt: bool = True) -> None:
        if window < 0 or level < 2 or guesses < 1:
            raise ValueError(
                f"lookahead needs a window of at least 0, a level of at least 2 and at least 1 guess, not {window}, "
                f"{level} and {guesses}"
            )
        self.window, self.level, self.guesses, self.prompt = window, level, guesses, prompt
        self.rows = max(0, window * (level - 1) - 1)
        chances = [CHANCES[min(n, len(CHANCES)) - 1] * share for n in range(1, level) for share in SHARES]
        self.kinds = [math.log(chance / (1 - chance)) for chance in chances]
        self._windows: dict[int, Window] = {}  # request id

    def forget(self, seq: Seq) -> None:
        self._windows.pop(seq.id, None)

    def view(self, seq: Seq) -> LookaheadView:
        return LookaheadView(self._known(seq).pool, seq.tokens[1 - self.level :], self.level)

    def riders(self, seq: Seq, room: int) -> tuple[list[int], list[int]]:
        """The window as a comb. The root is the first token of column 0; the first tokens of the others are a chain
        behind it; the token after one is its child. A row so sees the text, the chain up to its column, its column."""
        window = self._known(seq)
        spare = room - max(1, min(self.level - 1, room // 2))  # without nodes what is found would be of no use
        window.riding = max(0, min(self.window, (spare + 1) // (self.level - 1)))
        if window.riding == 0:
            return [], []
        self._advance(window, seq)
        columns = window.columns[: window.riding]
        columns[0][0] = seq.tokens[-1]
        tokens = [column[row] for row in range(self.level - 1) for column in columns][1:]
        chain = range(-1, window.riding - 2)
        return tokens, [*chain, *range(-1, len(tokens) - len(chain) - 1)]

    def observe(self, seen: Seen) -> None:
        for seq, judged, riders in zip(seen.seqs, seen.judged, seen.riders, strict=True):
            window = self._windows.get(seq.id)
            if window is not None and window.riding and judged:
                last = [judged.start, *riders][-window.riding :]  # the ends of the columns
                for column, token in zip(window.columns, seen.logits[last].argmax(-1).tolist(), strict=False):
                    window.pool.add(column[0], (*column[1:], token))
                    column.append(token)
                    del column[0]
                del window.columns[window.riding :]  # these did not move on: they are at the wrong place now
                window.base += 1
                window.riding = 0

    def _known(self, seq: Seq) -> Window:
        window = self._windows.get(seq.id)
        if window is None:
            window = self._windows[seq.id] = Window(Pool(self.guesses))
            text = seq.tokens[: seq.prompt_len] if self.prompt else []
            for start in range(len(text) - self.level + 1):
                window.pool.add(text[start], tuple(text[start + 1 : start + self.level]))
        return window

    def _advance(self, window: Window, seq: Seq) -> None:
        """Bring column 0 to the root: as many columns go as tokens were accepted, runs of the text come in behind."""
        root, text = len(seq.tokens) - 1, seq.tokens
        del window.columns[: root - window.base]
        window.base = root
        while len(window.columns) < self.window:
            start = int(window.filled * STRIDE % 1 * len(text))
            window.filled += 1
            window.columns.append([text[(start + i) % len(text)] for i in range(self.level - 1)])


class LookaheadView:
    """text: its last level - 1 tokens."""

    def __init__(self, pool: Pool, text: Sequence[int], level: int) -> None:
        self._pool, self._text, self._level = pool, text, level

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        context = [*self._text, *path][1 - self._level :]
        found: dict[int, int] = {}
        for n in range(len(context), 0, -1):
            for age, rest in enumerate(self._pool.after(context[-n:])):
                found.setdefault(rest[0], (n - 1) * len(SHARES) + (age > 0))
        return list(found.items())
