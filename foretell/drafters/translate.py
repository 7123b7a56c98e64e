"""A draft model with another vocabulary than the target's, lossless (Timor et al. 2025, arXiv 2502.05202).

It reads the target's text with its own tokenizer and keeps its keys and values in a cache of its own: its tokens are
other ones and not as many. Its answer becomes tokens of the target in one of two ways.

- `SharedTokens` (token-level intersection, TLI): it draws among the tokens that both vocabularies have. Its logits are
  put where the target has those tokens, with -inf elsewhere, before the rule's `draw` sees them: q is what was drawn
  from, over the target's whole vocabulary, and shares the target's noise token by token.
- `SharedText` (string-level exact match, SLEM): it says what it finds likeliest in all of its own vocabulary, and the
  target's tokenizer makes tokens of the text. Nothing is drawn: point masses, exact under every rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretell.drafters.base import Drafter
from foretell.drafters.grow import Forest, Growth
from foretell.drafters.passes import CHUNK, Part, part_rows
from foretell.drafters.reading import Languages, Reading
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.models.text import Text
from foretell.types import Drafts, Draw, Seq

PLANE = "draft"
ENOUGH = 0.75  # share of a sample text's tokens that both vocabularies have, from which on these will do


@dataclass(slots=True)
class Heard:
    """One request as the draft knows it."""

    reading: Reading
    own: Seq  # the draft's tokens, then those it guessed last; in the drafter's own cache
    length: int = 0  # how many of own.tokens are the text
    over: bool = False  # the text has outgrown the draft


class Translator(Drafter):
    """What both ways share. model: the draft. languages: its tokenizer and the target's."""

    chains = True

    def __init__(self, model: Target, languages: Languages) -> None:
        self.model, self.languages = model, languages
        self.rows = 0  # computed so far
        self.cache: Cache
        self._heard: dict[int, Heard] = {}  # request id -> what is known of it

    def attach(self, cache: Cache) -> None:
        """A cache of as many slots and places as the target's."""
        longest = min(cache.slots, self.model.max_context)
        self.cache = Cache(cache.slots, cache.table.shape[0], longest)
        self.model.attach(self.cache, PLANE)

    def forget(self, seq: Seq) -> None:
        heard = self._heard.pop(seq.id, None)
        if heard is not None:
            self.cache.release(heard.own)

    def _listen(self, seqs: Sequence[Seq], budget: Sequence[int]) -> list[int]:
        """Read every text that may have drafts, and make room -> how many tokens each may guess."""
        limits = [self._read(seq, n) if n > 0 else 0 for seq, n in zip(seqs, budget, strict=True)]
        spare = self.cache.available
        for i, seq in enumerate(seqs):
            if limits[i] > 0:
                own = self._heard[seq.id].own
                lacking = len(own.tokens) - own.cached
                limits[i] = max(0, min(limits[i], spare - lacking + 1))  # the last guess is not computed
                spare -= lacking + limits[i] - 1 if limits[i] else 0
        return limits

    def _read(self, seq: Seq, budget: int) -> int:
        """Bring what the draft knows of the request up to date -> how many tokens may follow within its context."""
        heard = self._heard.get(seq.id)
        if heard is None:
            own = Seq(seq.id, [], 0, seq.sampling, seq.seed)
            heard = self._heard[seq.id] = Heard(Reading(self.languages), own)
        if heard.over:
            return 0
        own = heard.own
        start, ids, whole = heard.reading.read(seq.tokens)
        same = start
        while same < min(own.cached, start + len(ids)) and own.tokens[same] == ids[same - start]:
            same += 1
        heard.length = start + len(ids)
        if own.table >= 0:
            self.cache.rewind(own, max(0, min(same, heard.length - 1)))
        own.tokens[same:] = ids[same - start :]
        heard.over = heard.length >= self.cache.max_context
        if heard.over:
            self.cache.release(own)
        if heard.over or heard.length == 0 or (own.table < 0 and not self.cache.admit(own)):
            return 0
        return min(budget, self.cache.max_context - heard.length) if whole else 0

    def _compute(self, texts: Sequence[Seq]) -> Tensor:
        """Compute what is lacking of each text -> [len(texts), V of the draft], logits at their last tokens."""
        found: dict[int, Tensor] = {}
        while len(found) < len(texts):
            left, parts, reached, want = CHUNK, [], [], []
            for i, seq in enumerate(texts):
                n = min(len(seq.tokens) - seq.cached, left)
                if n > 0:
                    left -= n
                    parts.append(self._part(seq, n))
                    if seq.cached + n == len(seq.tokens):
                        reached.append(i)
                        want.append(CHUNK - left - 1)
            rows = part_rows(parts, want)
            self.rows += rows.tokens.numel()
            logits = self.model.forward(rows, self.cache).logits
            for part in parts:
                self.cache.commit(part.seq, range(len(part.tokens)))
            if len(reached) == len(texts):
                return logits
            found.update(zip(reached, logits.clone(), strict=True))
        return torch.stack([found[i] for i in range(len(texts))])

    def _part(self, seq: Seq, n: int) -> Part:
        if not self.cache.reserve(seq, n):
            raise MemoryError("the draft model's cache is full although room was made")
        return Part(seq, seq.cached, (), seq.tokens[seq.cached : seq.cached + n], self.cache.reserved(seq))


class SharedTokens(Translator):
    """Drafts of the tokens that both vocabularies have (TLI); ValueError if there are none."""

    def __init__(self, model: Target, languages: Languages) -> None:
        super().__init__(model, languages)
        pairs = self.languages.to_draft
        if not pairs:
            raise ValueError("the tokenizers of draft_model and model have no token in common: use another draft_model")
        self._ours, self._theirs = np.array(list(pairs)), np.array(list(pairs.values()))

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        limits = self._listen(seqs, budget)
        forest = Forest([Growth(seq, n, (), ()) for seq, n in zip(seqs, limits, strict=True)], 1)
        while growing := forest.active:
            texts = [self._heard[g.seq.id].own for g in growing]
            forest.extend(self._widen(self._compute(texts)), draw)
            for g, own in zip(growing, texts, strict=True):
                own.tokens.append(self.languages.to_draft[g.tokens[-1]])
        return forest.drafts()

    def _widen(self, logits: Tensor) -> Tensor:
        """[M, V of the draft] -> float64 [M, V of the target], -inf where the token is not the draft's too."""
        narrow = (logits if logits.dtype in (torch.float32, torch.float64) else logits.float()).numpy(force=True)
        wide = np.full((len(narrow), self.languages.sizes[0]), -np.inf)  # numpy: nothing to wake for a few rows
        for row, source in zip(wide, narrow, strict=True):
            row[self._ours] = source[self._theirs]
        return torch.from_numpy(wide)


class SharedText(Translator):
    """Drafts of the text that the draft model finds likeliest (SLEM)."""

    def __init__(self, model: Target, languages: Languages) -> None:
        super().__init__(model, languages)
        said = {i for i, raw in enumerate(self.languages.written) if raw}
        self._silent = torch.tensor([i for i in range(model.vocab_size) if i not in said], dtype=torch.int64)

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        limits = self._listen(seqs, budget)
        going = [(self._heard[seq.id].own, n) for seq, n in zip(seqs, limits, strict=True) if n > 0]
        for step in range(max(limits, default=0)):
            going = [(own, n) for own, n in going if step < n and not (step and own.tokens[-1] in self.model.stop_ids)]
            if not going:
                break
            logits = self._compute([own for own, _ in going])
            logits[:, self._silent] = float("-inf")
            for (own, _), token in zip(going, logits.argmax(-1).tolist(), strict=True):
                own.tokens.append(token)
        return Drafts.chains([self._answer(seq, n) for seq, n in zip(seqs, limits, strict=True)])

    def _answer(self, seq: Seq, limit: int) -> list[int]:
        if limit == 0:
            return []
        heard = self._heard[seq.id]
        said = b"".join([self.languages.written[t] for t in heard.own.tokens[heard.length :]])
        return heard.reading.answer(said)[:limit]


def translator(model: Target, texts: tuple[Text, Text], vocab_size: int) -> Translator:
    """The way that suits the two vocabularies. texts: the tokenizers of target and draft; vocab_size: the target's."""
    languages = Languages.of(*texts, (vocab_size, model.vocab_size))
    return SharedTokens(model, languages) if languages.shared >= ENOUGH else SharedText(model, languages)
