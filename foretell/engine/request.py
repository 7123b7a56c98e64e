"""One request from its first token to its last: text, stops, log-probabilities, and what may be shown already."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from foretell.engine.stats import Stats
from foretell.models.text import Detokenizer, Text
from foretell.types import Seq


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a generated token under the model itself, and the likeliest alternatives (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Event:
    """What became known of a stream. token_ids belong to text; drafted says which of them a drafter had guessed."""

    text: str
    token_ids: list[int]
    drafted: list[bool]
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation.

    text is the decoding of token_ids, less the stop id that ended it, if one did: such an id is the last of token_ids.
    A stop string is not part of text, and token_ids are the shortest run of the generated tokens that covers text.
    logprobs, if asked for, has one entry for each of token_ids. finish_reason: "stop", "length" or "abort".
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    logprobs: list[Logprob] | None
    finish_reason: str
    stats: Stats


class Request:
    def __init__(self, seq: Seq, text: Text | None, max_context: int) -> None:
        self.seq = seq
        self.stats = Stats()
        self.finish_reason: str | None = None
        self.outbox: deque[Event] = deque()
        self._max_context = max_context
        self._detokenizer = Detokenizer(text) if text else None
        self._stops = tuple(seq.sampling.stop)
        self._tokens: list[int] = []
        self._drafted: list[bool] = []
        self._ends: list[int] = []  # length of the text after each token
        self._logprobs: list[Logprob] = []
        self._sent_tokens = 0
        self._sent_text = 0
        self._text = ""

    def push(self, token: int, drafted: bool, logprob: Logprob | None) -> bool:
        """Take the next token; False once the request is finished and takes no more."""
        seq, sampling = self.seq, self.seq.sampling
        self._tokens.append(token)
        self._drafted.append(drafted)
        if logprob is not None:
            self._logprobs.append(logprob)
        stopped = token in seq.stop_ids
        before = len(self._text)
        if self._detokenizer and not stopped:
            self._text += self._detokenizer.add([token])
        self._ends.append(len(self._text))
        self._find_stop(before)
        if self.finish_reason is None:
            if stopped:
                self._finish("stop")
            elif len(self._tokens) >= sampling.max_tokens or seq.prompt_len + len(self._tokens) >= self._max_context:
                self._finish("length")
        return self.finish_reason is None

    def flush(self) -> None:
        """Put what became certain into the outbox: text that no stop string can still take back, and its tokens.
        Tokens without text of their own wait for the text that follows: a stop string there takes them with it."""
        if self.finish_reason is None:
            certain = len(self._text) - self._held_back()
            count = self._sent_tokens
            while count < len(self._tokens) and self._ends[count] <= certain:
                count += 1
            if self._detokenizer:
                while count > self._sent_tokens and self._end(count) == self._end(count - 1):
                    count -= 1
                certain = min(certain, self._end(count))
        else:
            certain, count = len(self._text), len(self._tokens)
        sent, self._sent_tokens = self._sent_tokens, count
        piece, self._sent_text = self._text[self._sent_text : certain], certain
        if count > sent or piece or self.finish_reason is not None:
            self.outbox.append(Event(piece, self._tokens[sent:count], self._drafted[sent:count], self.finish_reason))

    def abort(self) -> None:
        if self.finish_reason is None:
            self._finish("abort")
            self.flush()

    def completion(self) -> Completion:
        assert self.finish_reason is not None, "the request is still running"
        logprobs = None if self.seq.sampling.logprobs is None else list(self._logprobs)
        prompt = self.seq.tokens[: self.seq.prompt_len]
        return Completion(self._text, list(self._tokens), prompt, logprobs, self.finish_reason, self.stats)

    def _find_stop(self, before: int) -> None:
        """End the text before the first stop string that ends in what came after its first `before` characters."""
        if not self._stops or len(self._tokens) < self.seq.sampling.min_tokens:
            return
        found = [self._text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
        cuts = [at for at in found if at >= 0]
        if not cuts:
            return
        self._text = self._text[: min(cuts)]
        keep = next((i + 1 for i, end in enumerate(self._ends) if end >= len(self._text)), 0) if self._text else 0
        for items in (self._tokens, self._drafted, self._logprobs, self._ends):
            del items[keep:]
        self._detokenizer = None  # whatever it still holds lies behind the stop string
        self._finish("stop")

    def _finish(self, reason: str) -> None:
        if self._detokenizer:
            before = len(self._text)
            self._text += self._detokenizer.finish()
            self._detokenizer = None
            if self._ends:
                self._ends[-1] = len(self._text)
            self._find_stop(before)
        if self.finish_reason is None:
            self.finish_reason = reason
            self.stats.emitted = len(self._tokens)

    def _end(self, count: int) -> int:
        """Length of the text of the first `count` tokens."""
        return self._ends[count - 1] if count else 0

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for n in range(min(longest - 1, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-n:]) for stop in self._stops):
                return n
        return 0
