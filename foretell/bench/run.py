"""One request, stepped by hand: its events as they come, how long its tokens took, and its completion."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from foretell.bench.timing import Answer
from foretell.engine.llm import LLM, Prompt
from foretell.engine.request import Completion, Event
from foretell.types import Sampling


class Run:
    """prefill_s: steps up to the first token; decode_s: all steps after them, whose tokens are `decoded` in number.

    Speed is taken over the latter alone, so it does not depend on what of the prompt was cached. draft_s and verify_s
    are the parts of decode_s that `Stats` books under these names. `stopping` is asked before each step; once it says
    True the request ends with finish_reason "abort". `meter` is any other clock that goes on during a step; `metered`
    is how far it went in decode_s.
    """

    def __init__(
        self,
        llm: LLM,
        prompt: Prompt,
        sampling: Sampling,
        *,
        stopping: Callable[[], bool] = lambda: False,
        meter: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.request = llm.submit(prompt, sampling)
        self.seed = self.request.seq.seed
        self.prefill_s = self.decode_s = self.metered = 0.0
        self.draft_s = self.verify_s = 0.0
        self._llm, self._stopping, self._meter = llm, stopping, meter
        self._first = 0  # tokens of the first round

    def events(self) -> Iterator[Event]:
        """Run to the end; closing the iterator ends the request."""
        outbox = self.request.outbox
        try:
            while True:
                while outbox:
                    event = outbox.popleft()
                    yield event
                    if event.finish_reason is not None:
                        return
                if self._stopping():
                    self._llm.cancel(self.request)
                else:
                    self._step()
        finally:
            self._llm.cancel(self.request)

    def finish(self) -> Completion:
        """Run to the end without looking at the events."""
        for _ in self.events():
            pass
        return self.completion

    def _step(self) -> None:
        stats = self.request.stats
        drafted, verified = stats.draft_s, stats.verify_s
        started, meter = time.perf_counter(), self._meter()
        self._llm.step()
        took = time.perf_counter() - started
        if self._first:
            self.decode_s += took
            self.metered += self._meter() - meter
            self.draft_s += stats.draft_s - drafted
            self.verify_s += stats.verify_s - verified
        else:
            self.prefill_s += took
            self._first = self.request.seq.generated

    @property
    def completion(self) -> Completion:
        """Once the events have come to their end."""
        return self.request.completion()

    @property
    def answer(self) -> Answer:
        """The finished run in the terms of other engines."""
        tokens = self.completion.token_ids
        return Answer(tokens, len(tokens) - self.decoded, self.prefill_s, self.prefill_s + self.decode_s)

    @property
    def decoded(self) -> int:
        return max(0, self.request.stats.emitted - self._first)

    @property
    def tokens_per_second(self) -> float:
        """Of decoding; 0 if the first round was the last."""
        return self.decoded / self.decode_s if self.decoded else 0.0

    def figures(self) -> dict[str, Any]:
        """The counters, their rates, the speed and what is estimated of it, under the names of `Stats`; alpha and E as
        in the literature."""
        stats = self.request.stats
        return {
            **asdict(stats),
            "alpha": stats.acceptance_rate,
            "E": stats.tokens_per_round,
            "tokens_per_second": self.tokens_per_second,
            **stats.estimates(),
        }


def plain_if(llm: LLM, plain: bool) -> AbstractContextManager[None]:
    """Runs that begin and end inside are without the drafter, as with `drafter="none"`, if they are to be plain: one
    that has nothing to draft would still take time to learn."""
    return llm.engine.plain() if plain else nullcontext()


def afresh(llm: LLM) -> None:
    """Forget earlier runs: a rule's noise is free for the next run of its seed, prompts are computed anew, and a
    drafter that remembers an answer would know the next one to the same prompt by heart."""
    llm.engine.rule = type(llm.engine.rule)()
    llm.engine.cache.forget()
    llm.drafter.reset()


def warm_up(llm: LLM) -> None:
    """A few rounds with and without drafts, on a prompt of its own that repeats itself, so that there are drafts."""
    size = min(llm.target.vocab_size, 8)
    prompt = (list(range(size)) * 3)[: max(1, llm.max_context - 8)]
    for draft_tokens in (None, 0):
        Run(llm, prompt, Sampling(temperature=0, max_tokens=6, ignore_eos=True, draft_tokens=draft_tokens)).finish()
    afresh(llm)
