"""The public engine: generate, chat and stream, synchronous, text in and text out."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretell import drafters
from foretell.drafters.base import Drafter, Progress
from foretell.engine.loop import Engine
from foretell.engine.measure import costs_of
from foretell.engine.memory import Setup
from foretell.engine.request import Completion, Event, Request
from foretell.engine.texts import write
from foretell.kv.cache import Cache
from foretell.machine import cache_folder, cores
from foretell.models.open import Opened, whole
from foretell.planner.auto import Controller
from foretell.planner.cost import Costs
from foretell.planner.fixed import FixedPlanner
from foretell.planner.memory import ROWS
from foretell.types import Planner, Sampling, Seq

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Samplings = Sampling | Sequence[Sampling] | None


class LLM:
    """A language model, and a drafter that makes it faster without changing what it says.

    model: "smollm2-135m-instruct" (built in), a folder with config.json and safetensors, a .gguf file, or a hub id.
    drafter: a method of `drafters.METHODS` ("none", "auto", "ngram", "suffix", "recycling", "prediction", "lookahead",
    "early_exit", "model"), several of them joined by "+" into one tree, or a `Drafter` object. "auto" is the best
    mixture that needs nothing more, or the draft model if there is one.
    draft_model: a model for drafter "model", of the same vocabulary or another. draft_tokens: at most this many nodes
    a round; with "auto" a controller decides in every step how many pay here, from none on. rule: how drafts are
    verified, "match", "ratio" or "block"; all are lossless, and under "match" the tokens are those of plain decoding
    with the same seed. dtype: "auto", "bfloat16", "float32", "float64", "float16", "int8" (weights only). device:
    "cpu", which is "auto" too, or "cuda", which no GPU has run yet. threads: None is all the process may use.
    max_context: tokens of a prompt and its answer, None is the model's own limit. max_batch: requests that run at once.
    memory: bytes, or "12GiB", "500MB": what loading and running all this adds to the process's resident memory - the
    weights of both models, their tokenizers, workspace, what drafters remember, and the cache, which gets what is left.
    What Python and imports take is not in it. It must hold a request of max_context: what drafts is left out if need
    be, with a line in the log. None: a quarter of the free memory for the cache, whatever the rest takes. How it is
    divided is in `LLM.memory`; see docs/memory.md.

    ValueError, in one sentence, for whatever cannot work; nothing is computed before it.
    """

    def __init__(
        self,
        model: str | Path,
        drafter: str | Drafter = "auto",
        draft_model: str | Path | None = None,
        draft_tokens: int | str = "auto",
        rule: str = "match",
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        max_context: int | None = None,
        max_batch: int = 32,
        memory: int | str | None = None,
    ) -> None:
        if threads is not None:
            whole("threads", threads, 1)
        setup = Setup(model, drafter, draft_model, draft_tokens, rule, dtype, max_context, max_batch, memory, device)
        fitted = setup.fit()
        self.memory, verifier, drafter = fitted.split, fitted.rule, fitted.drafter
        opened = fitted.target.load(threads)
        self.name, self.target, self.tokenizer = opened.name, opened.target, opened.text
        self.vocabulary = _vocabulary(opened)
        self.folder = cache_folder() / "models" / opened.fingerprint  # where what is learnt about this model is kept
        draft = fitted.draft.load(threads, share=self.target) if fitted.draft else None
        if isinstance(drafter, str):
            parts = drafters.Parts(
                self.target,
                self.vocabulary,
                draft.target if draft else None,
                trees=verifier.trees,
                folder=self.folder,
                texts=(opened.text, draft.text if draft else None),
                past=fitted.past,
            )
            drafter = drafters.build(drafter, parts)
        if not verifier.trees and not drafter.chains:
            raise ValueError(
                f"rule {rule!r} verifies chains, and this drafter proposes trees: use rule 'match' or 'ratio'"
            )
        self.drafter = drafter
        self.max_context = min(self.target.max_context, self.memory.slots)
        costs, planner = self._planned(draft_tokens, opened.dtype, threads or cores())
        cache = Cache(self.memory.slots, max_batch, self.max_context)
        self.engine = Engine(
            self.target, cache, drafter, verifier, planner, max_batch=max_batch, max_rows=ROWS, costs=costs
        )
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Samplings = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Completion]:
        """Complete one prompt or several, each a text or token ids; sampling: one for all, or one each. progress is
        told after every step how many are complete."""
        many = _prompts(prompts)
        requests = [self._request(p, s) for p, s in zip(many, _samplings(sampling, len(many)), strict=True)]
        return self._run(requests, progress)

    def chat(
        self, conversations: Sequence[Message] | Sequence[Sequence[Message]], sampling: Samplings = None
    ) -> list[Completion]:
        """Answer one conversation (OpenAI-style messages) or several, by the model's own chat template."""
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        many: Sequence[Any] = [conversations] if single else conversations
        return self.generate([self.encode_chat(messages) for messages in many], sampling)

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[Event]:
        """Complete one prompt, piece by piece; the last event has a finish_reason. Closing it ends the request."""
        request = self._request(prompt, sampling or Sampling())
        return self._stream(request)

    def stream_chat(self, messages: Sequence[Message], sampling: Sampling | None = None) -> Iterator[Event]:
        """`stream` of the answer to a conversation."""
        return self.stream(self.encode_chat(messages), sampling)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to where the model is to go on."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids as the prompt instead of messages")
        return self.tokenizer.chat(messages)

    @torch.inference_mode()
    def step(self) -> None:
        """One step of whatever runs."""
        self.engine.step()

    def warm(self, progress: Progress = lambda done, total: None, *, texts: int = 400) -> None:
        """Let the drafter learn from the model alone, without any data; what it learns is kept in the user's cache
        folder and used from then on: "recycling" what the model says after each token of its vocabulary, and with
        "suffix" what it says in `texts` conversations of its own. For 135 M parameters that takes minutes."""
        whole("texts", texts, 0)
        with torch.inference_mode():
            self.drafter.warm(self.target, self.engine.cache, progress)
        self.save_drafter()
        if texts:
            write(self, texts, progress)
            self.save_drafter()

    def save_drafter(self, folder: str | Path | None = None) -> None:
        """Keep what the drafter has learnt from requests so far, as "suffix" and "recycling" do: in that folder, for
        `load_drafter`, or in the user's cache folder, from where drafters of this model start from then on. Private
        requests leave nothing to keep."""
        self.drafter.save(self.folder if folder is None else Path(folder))

    def load_drafter(self, folder: str | Path) -> None:
        """Let the drafter go on with what was saved there."""
        if not Path(folder).is_dir():
            raise ValueError(f"there is no folder {str(folder)!r} to load a drafter from")
        self.drafter.load(Path(folder))

    def submit(self, prompt: Prompt, sampling: Sampling | None = None) -> Request:
        """Add a request without running it: `step` does, and the request's outbox fills. `cancel` takes it back."""
        request = self._request(prompt, sampling or Sampling())
        self.engine.add(request)
        return request

    def cancel(self, request: Request) -> None:
        self.engine.remove(request)

    def _planned(self, draft_tokens: int | str, dtype: str, threads: int) -> tuple[Costs | None, Planner]:
        """What forwards cost, measured now unless it was before, and who decides how much to draft."""
        drafter = self.drafter
        if drafter.draft_tokens == 0 or draft_tokens == 0:
            return None, FixedPlanner(0, self.max_context)
        costs = costs_of(self.target, self.folder, dtype, threads)
        if isinstance(draft_tokens, int):
            return costs, FixedPlanner(draft_tokens, self.max_context)
        return costs, Controller(costs, drafter.draft_tokens, self.max_context, scored=drafter.scored)

    def _run(self, requests: Sequence[Request], progress: Callable[[int], None]) -> list[Completion]:
        for request in requests:
            self.engine.add(request)
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
                progress(sum(request.finish_reason is not None for request in requests))
        finally:
            for request in requests:
                self.engine.remove(request)
        return [request.completion() for request in requests]

    def _stream(self, request: Request) -> Iterator[Event]:
        self.engine.add(request)
        try:
            while True:
                while request.outbox:
                    event = request.outbox.popleft()
                    yield event
                    if event.finish_reason is not None:
                        return
                self.step()
        finally:
            self.engine.remove(request)

    def _request(self, prompt: Prompt, sampling: Sampling) -> Request:
        """Everything that can be wrong with a request is found here, before anything is computed."""
        tokens = self._encode(prompt)
        vocab = self.target.vocab_size
        if not tokens:
            raise ValueError("the prompt is empty: give at least one token")
        self._check_tokens(tokens, "prompt")
        if len(tokens) >= self.max_context:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; the largest that fits is {self.max_context - 1}, "
                "which leaves room for one token of answer"
            )
        for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias or ())):
            outside = next((t for t in ids if not 0 <= t < vocab), None)
            if outside is not None:
                raise ValueError(f"{name}: token id {outside} is outside the vocabulary of {vocab}")
        if sampling.logprobs is not None and sampling.logprobs > vocab:
            raise ValueError(f"logprobs must be at most the vocabulary's {vocab}, not {sampling.logprobs}")
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        prediction = self._prediction(sampling.prediction)
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.target.stop_ids)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        counts = None
        if sampling.penalised:
            counts = torch.zeros(2, vocab)
            counts[0] += torch.bincount(torch.tensor(tokens), minlength=vocab)
        seq = Seq(next(self._ids), tokens, len(tokens), sampling, seed, stop_ids, prediction, counts=counts)
        return Request(seq, self.tokenizer, self.max_context)

    def _prediction(self, given: str | Sequence[int] | None) -> list[int]:
        """The ids of a prediction."""
        if given is None:
            return []
        if not self.drafter.predicts:
            raise ValueError("a prediction needs drafter 'prediction', or several joined by '+' with it among them")
        if isinstance(given, str) and self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids as the prediction")
        tokens = self._encode(given)
        self._check_tokens(tokens, "prediction")
        return tokens

    def _check_tokens(self, tokens: Sequence[int], what: str) -> None:
        for t in tokens:
            if isinstance(t, bool) or not isinstance(t, int):
                raise ValueError(f"a {what} must be a text or a list of token ids; {t!r} is no token id")
            if not 0 <= t < self.target.vocab_size:
                raise ValueError(f"token id {t} of the {what} is outside the vocabulary of {self.target.vocab_size}")

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
                raise ValueError(f"a prompt must be a text or a list of token ids, not {prompt!r}")
            return [t.item() if isinstance(t, torch.Tensor | np.integer) else t for t in prompt]
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids as the prompt")
        return self.tokenizer.encode(prompt)


def _vocabulary(opened: Opened) -> int:
    size = opened.target.vocab_size
    return size if opened.text is None else min(size, len(opened.text.vocab()))


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]  # a text; what is neither a text nor ids is refused with the prompt itself
    many: list[Any] = list(prompts)
    if many and not any(isinstance(p, str | list | tuple) or getattr(p, "ndim", 0) for p in many):
        return [many]
    if not many:
        raise ValueError("no prompt was given")
    return many


def _samplings(sampling: Samplings, count: int) -> list[Sampling]:
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * count
    each = list(sampling) if isinstance(sampling, Iterable) else [sampling]
    wrong = next((s for s in each if not isinstance(s, Sampling)), None)
    if wrong is not None:
        raise ValueError(f"sampling must be a Sampling, or one for each prompt, not {wrong!r}")
    if len(each) != count:
        raise ValueError(f"{len(each)} samplings were given for {count} prompts: give one, or one for each")
    return each
