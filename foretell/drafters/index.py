"""Where runs of tokens occurred before, in a text that grows or in many that are over: bounded work and memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

RECENT = 6  # occurrences kept of a run of tokens, the latest ones
SEPARATOR = -1  # no token
LONGEST = 24  # a match longer than this is not told from one of this length

Place = tuple[list[int], int]  # a text, and the position after an occurrence in it
Match = tuple[list[int], int, int]  # a text, the position of what followed, and how many tokens before it agree


class Index:
    """Occurrences of the runs of `sizes` tokens in texts; `add` makes a text's tokens up to `end` known."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sorted(sizes, reverse=True)
        self._places: dict[tuple[int, ...], list[Place]] = {}

    def add(self, text: list[int], start: int, end: int) -> None:
        """The runs that end before positions start..end become known; something follows each of them."""
        places = self._places
        for position in range(max(start, 1), end):
            for n in self.sizes:
                if n <= position:
                    found = places.setdefault(tuple(text[position - n : position]), [])
                    found.append((text, position))
                    if len(found) > RECENT:
                        del found[0]

    def drop(self, text: list[int]) -> None:
        """Forget a text, whichever of its runs are still known."""
        for position in range(1, len(text)):
            for n in self.sizes:
                if n <= position:
                    key = tuple(text[position - n : position])
                    left = [place for place in self._places.get(key, ()) if place[0] is not text]
                    if left:
                        self._places[key] = left
                    else:
                        self._places.pop(key, None)

    def find(self, context: Sequence[int]) -> list[Match]:
        """Earlier occurrences of the longest known end of the context, the longest agreement first, then the latest."""
        for n in self.sizes:
            if n <= len(context):
                places = self._places.get(tuple(context[-n:]))
                if places:
                    matches = [(text, at, agreement(text, at, context, n)) for text, at in reversed(places)]
                    return sorted(matches, key=lambda match: -match[2])
        return []


def agreement(text: Sequence[int], at: int, context: Sequence[int], known: int) -> int:
    """How many tokens before text[at] equal the end of the context, of which `known` do for certain."""
    n, most = known, min(LONGEST, at, len(context))
    while n < most and text[at - n - 1] == context[-n - 1]:
        n += 1
    return n


class Past:
    """An index over texts that are over, the oldest of which go when there are more than `capacity` tokens."""

    def __init__(self, size: int, capacity: int) -> None:
        self.index = Index([size])
        self.capacity, self.tokens = capacity, 0
        self._texts: list[list[int]] = []  # the oldest first

    def texts(self) -> list[list[int]]:
        return [list(text) for text in self._texts]

    def add(self, text: Sequence[int]) -> None:
        """A text that goes on from one that is known, as a conversation's next turn does, is not kept twice."""
        places = (i for i in reversed(range(len(self._texts))) if _begins(text, self._texts[i]))
        at = next(places, None)
        known = [] if at is None else self._texts.pop(at)
        before = len(known)
        known += text[before:]
        self._texts.append(known)
        self.tokens += len(known) - before
        self.index.add(known, before, len(known))
        while self.tokens > self.capacity and self._texts:
            oldest = self._texts.pop(0)
            self.tokens -= len(oldest)
            self.index.drop(oldest)


class Archive:
    """The same lookup over texts that change no more: sorted once, quickly, and small. tokens: int32 [N], of all texts
    in turn; lengths: int32 [M]."""

    def __init__(self, size: int, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self.size, self.tokens, self.lengths = size, tokens, lengths
        ends = lengths.cumsum()
        # a separator behind each text, so that no match reaches from one into the next
        self._text: list[int] = np.insert(tokens, ends, SEPARATOR).tolist()
        flat = np.array(self._text, dtype=np.int64)
        self._base = int(flat.max(initial=0)) + 1  # three tokens of 2^21 kinds fit
        runs = np.lib.stride_tricks.sliding_window_view(flat[:-1], size) if len(flat) > size else np.empty((0, size))
        followed = flat[size:] if len(flat) > size else flat[:0]
        places = np.flatnonzero((followed >= 0) & (runs >= 0).all(1))
        keys = runs[places] @ self._base ** np.arange(size)
        order = np.argsort(keys, kind="stable")
        self._sorted: list[int] = keys[order].tolist()
        self._places: list[int] = (places[order] + size).tolist()

    def find(self, context: Sequence[int]) -> list[Match]:
        """As of `Index`."""
        end = context[-self.size :]
        if len(end) < self.size or max(end) >= self._base:
            return []
        key = sum(token * self._base**i for i, token in enumerate(end))
        first = bisect_left(self._sorted, key)
        last = bisect_right(self._sorted, key, first)
        places = self._places[max(first, last - RECENT) : last]
        matches = [(self._text, at, agreement(self._text, at, context, self.size)) for at in reversed(places)]
        return sorted(matches, key=lambda match: -match[2])


def _begins(text: Sequence[int], old: Sequence[int]) -> bool:
    """Whether the text begins with the old one; its end tells nearly always."""
    end = len(old)
    return end <= len(text) and text[max(0, end - 8) : end] == old[-8:] and text[:end] == old


class Walk:
    """The places where a text and a path beyond it occurred before, node by node of a tree."""

    def __init__(self, text: Sequence[int], indexes: Sequence[Index | Archive]) -> None:
        self._text, self._indexes = text, indexes
        self._matches: dict[tuple[int, ...], list[Match]] = {}

    def at(self, path: tuple[int, ...]) -> list[Match]:
        """Those of its parent that went this way, or what a shorter match finds anew. Asked after the parent's."""
        matches: list[Match] = []
        if path:
            matches = [
                (text, at + 1, length + 1)
                for text, at, length in self._matches[path[:-1]]
                if text[at] == path[-1] and at + 1 < len(text) and text[at + 1] != SEPARATOR
            ]
        if not matches:
            context = [*self._text[-LONGEST:], *path]
            for index in self._indexes:
                matches += index.find(context)
            best = max((length for _, _, length in matches), default=0)
            matches = [match for match in matches if 2 * match[2] >= best]
        self._matches[path] = matches
        return matches
