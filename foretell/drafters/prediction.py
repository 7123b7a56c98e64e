"""Predicted outputs (as in OpenAI's API): the caller says what the answer will probably be like, a file before an edit.

The prediction is followed token by token. Where the answer departs from it, the next tokens say where it goes on: after
a change the same number of tokens later, after an insertion where it left off, else where the end of the answer occurs
nearest in the prediction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from foretell.drafters.search import Guess, Source
from foretell.types import Seq

SIZES = (3, 2, 1)  # lengths of the runs of tokens by which a place is found again
NEAR = 16  # a single token is looked for so far ahead only
RUNS = (1, 2, 3, 5, 9, 17)  # tokens in a row that came true, from which on the next is surer
START, CHANGED, INSERTED = range(3)  # kinds of guesses before RUNS

Place = tuple[int, int]  # the next position in the prediction, and its kind or the tokens in a row before it: see _kind


class PredictionSource(Source):
    predicts = True
    kinds = (1.0, -0.5, -1.0, 0.0, 1.0, 1.8, 2.3, 2.8, 3.2)

    def __init__(self) -> None:
        self._followed: dict[int, Followed] = {}

    def forget(self, seq: Seq) -> None:
        self._followed.pop(seq.id, None)

    def view(self, seq: Seq) -> PredictionView | NothingPredicted:
        if not seq.prediction:
            return NothingPredicted()
        followed = self._followed.get(seq.id)
        if followed is None:
            followed = self._followed[seq.id] = Followed(seq.prediction, seq.prompt_len)
        followed.advance(seq.tokens)
        return PredictionView(followed, seq.tokens)


class Followed:
    """A prediction, and how far an answer has followed it."""

    def __init__(self, prediction: Sequence[int], start: int) -> None:
        self.text = prediction
        self.at = 0  # the position where the answer is now, or where it departed
        self.run = 0  # tokens in a row that came true before it
        self.since = 0  # tokens of the answer since it departed; 0: it has not
        self._start = self._done = start  # of the text that the answer goes on with
        self._places: dict[tuple[int, ...], list[int]] = {}
        for end in range(1, len(prediction)):
            for n in SIZES:
                if n <= end:
                    self._places.setdefault(tuple(prediction[end - n : end]), []).append(end)

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow the tokens that are new."""
        for end in range(self._done + 1, len(tokens) + 1):
            if not self.since and self.at < len(self.text) and self.text[self.at] == tokens[end - 1]:
                self.at, self.run = self.at + 1, self.run + 1
                continue
            found = self.find(tokens[max(self._start, end - SIZES[0]) : end])
            if found is None:
                self.run, self.since = 0, self.since + 1
            else:
                (self.at, self.run), self.since = found, 0
        self._done = len(tokens)

    def find(self, end: Sequence[int]) -> tuple[int, int] | None:
        """The nearest place that the end of a text leads to, and how many tokens agree there."""
        for n in SIZES:
            places = self._places.get(tuple(end[-n:])) if n <= len(end) else None
            if places:
                i = bisect_left(places, self.at)
                near = [place for place in places[max(0, i - 1) : i + 1] if n > 1 or 0 <= place - self.at <= NEAR]
                if near:
                    return min(near, key=lambda place: abs(place - self.at)), n
        return None

    def places(self) -> list[tuple[int, int]]:
        """(position, kind) of what may come next, the likelier first."""
        if self.since:
            return [(self.at + self.since, CHANGED), (self.at, INSERTED)]
        return [(self.at, _kind(self.run))]


def _kind(run: int) -> int:
    return INSERTED + sum(run >= start for start in RUNS) if run else START


class PredictionView:
    def __init__(self, followed: Followed, tokens: Sequence[int]) -> None:
        self._followed, self._end = followed, tokens[-SIZES[0] :]
        self._runs: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # path -> (position, tokens in a row)

    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        text = self._followed.text
        if not path:
            places = self._followed.places()
            self._runs[path] = [(at, self._followed.run) for at, _ in places]
        else:
            runs = [
                (at + 1, run + 1)
                for at, run in self._runs.get(path[:-1], ())
                if at < len(text) and text[at] == path[-1]
            ]
            found = None if runs else self._followed.find([*self._end, *path])
            self._runs[path] = runs = runs or ([found] if found else [])
            places = [(at, _kind(run)) for at, run in runs]
        guesses: dict[int, int] = {}
        for at, kind in places:
            if at < len(text):
                guesses.setdefault(text[at], kind)
        return list(guesses.items())


class NothingPredicted:
    def guesses(self, path: tuple[int, ...]) -> Sequence[Guess]:
        return ()
