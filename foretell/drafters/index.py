"""Where runs of tokens occurred before, in a text that grows or in many that are over: bounded work and memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

RECENT = 6  # occurrences kept of a run of tokens, the latest ones
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
        self._texts: OrderedDict[int, list[int]] = OrderedDict()
        self._number = 0

    def texts(self) -> list[list[int]]:
        return list(self._texts.values())

    def add(self, text: list[int]) -> None:
        self._number += 1
        self._texts[self._number] = text
        self.tokens += len(text)
        self.index.add(text, 0, len(text))
        while self.tokens > self.capacity and self._texts:
            _, oldest = self._texts.popitem(last=False)
            self.tokens -= len(oldest)
            self.index.drop(oldest)


class Walk:
    """The places where a text and a path beyond it occurred before, node by node of a tree."""

    def __init__(self, text: Sequence[int], indexes: Sequence[Index]) -> None:
        self._text, self._indexes = text, indexes
        self._matches: dict[tuple[int, ...], list[Match]] = {}

    def at(self, path: tuple[int, ...]) -> list[Match]:
        """Those of its parent that went this way, or what a shorter match finds anew. Asked after the parent's."""
        matches: list[Match] = []
        if path:
            matches = [
                (text, at + 1, length + 1)
                for text, at, length in self._matches[path[:-1]]
                if text[at] == path[-1] and at + 1 < len(text)
            ]
        if not matches:
            context = [*self._text[-LONGEST:], *path]
            for index in self._indexes:
                matches += index.find(context)
            best = max((length for _, _, length in matches), default=0)
            matches = [match for match in matches if 2 * match[2] >= best]
        self._matches[path] = matches
        return matches
