"""What runs and how much memory each part gets, decided before any weight is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foretell import drafters
from foretell.drafters.base import Drafter
from foretell.drafters.suffix import PAST
from foretell.machine import free_memory
from foretell.models.device import free_memory_of
from foretell.models.open import Prepared, prepare, whole
from foretell.models.vocabulary import same_vocabulary
from foretell.planner.memory import LEAST_CONTEXT, Needs, Split, in_bytes, refusal, shown, split
from foretell.verify import Rule, make_rule

SHARE = 16  # of a limit, one part of so many may be past texts


@dataclass(frozen=True, slots=True)
class Fitted:
    """What is to be loaded. drafter, draft: as asked for, or what of it there is room for. past: tokens of finished
    requests that drafters may keep."""

    target: Prepared
    draft: Prepared | None
    drafter: str | Drafter
    rule: Rule
    split: Split
    past: int


@dataclass(frozen=True, slots=True)
class Setup:
    """The options of `LLM` that decide what it takes, by the same names."""

    model: str | Path
    drafter: str | Drafter = "auto"
    draft_model: str | Path | None = None
    draft_tokens: int | str = "auto"
    rule: str = "match"
    dtype: str = "auto"
    max_context: int | None = None
    max_batch: int = 32
    memory: int | str | None = None
    device: str = "auto"

    def fit(self) -> Fitted:
        """ValueError for whatever cannot work, or does not fit; reads headers, configurations and tokenizers alone.

        Within a limit there must be room for one request of max_context. What drafts gives way to that, the draft model
        first, then what the other drafters remember, with a line in the log; then the limit is refused."""
        limit = self._check()
        rule = make_rule(self.rule)
        target = prepare(self.model, dtype=self.dtype, max_context=self.max_context, device=self.device)
        draft = None if self.draft_model is None else prepare(self.draft_model, dtype=self.dtype, device=self.device)
        past, context = PAST, max(LEAST_CONTEXT, target.context)
        if limit is None:
            needs = self._needs(self.drafter, target, draft, rule, past)
            kv = needs.target.kv + (needs.draft.kv if needs.draft else 0)
            on_cpu = target.device.type == "cpu"
            free = free_memory() if on_cpu else max(0, free_memory_of(target.device) - needs.target.weights)
            slots = _slots(free, kv, context, self.max_batch)
            rule.noise_bytes = needs.noise_kept(self.max_batch)
            return Fitted(target, draft, self.drafter, rule, split(needs, slots, context, self.max_batch), past)
        past = min(past, limit // SHARE // drafters.PAST_BYTES)
        longest: dict[str, int] = {}  # what has no room -> the longest requests beside which it has
        for drafter, kept_draft in self._choices(draft):
            needs = self._needs(drafter, target, kept_draft, rule, past)
            slots = needs.slots(limit, context, self.max_batch)
            if slots >= context:
                if longest:
                    _warn(limit, longest, drafter)
                rule.noise_bytes = needs.noise_kept(self.max_batch)
                found = split(needs, slots, context, self.max_batch, limit)
                return Fitted(target, kept_draft, drafter, rule, found, past)
            what = f"draft_model {kept_draft.name!r}" if kept_draft else f"what drafter {drafter!r} remembers"
            longest[what] = needs.largest_context(limit, self.max_batch, context)
        raise ValueError(refusal(needs, limit, context, self.max_batch))

    def _check(self) -> int | None:
        whole("max_batch", self.max_batch, 1)
        if self.draft_tokens != "auto":
            whole("draft_tokens", self.draft_tokens, 0, also="'auto' or ")
        if isinstance(self.drafter, str):
            drafters.check(self.drafter, self.draft_model is not None)
        elif not isinstance(self.drafter, Drafter):
            raise ValueError(f"drafter must be a method's name or a Drafter object, not {self.drafter!r}")
        if self.memory is not None and self.device == "cuda":
            raise ValueError(
                "memory limits what the process takes beside the CPU, not what it takes on a GPU: leave it out, or use "
                "device='cpu'"
            )
        return None if self.memory is None else in_bytes(self.memory)

    def _choices(self, draft: Prepared | None) -> list[tuple[str | Drafter, Prepared | None]]:
        """From what was asked for to plain decoding. A drafter that the caller made stays."""
        choices: list[tuple[str | Drafter, Prepared | None]] = [(self.drafter, draft)]
        if isinstance(self.drafter, str):
            left = drafters.without_draft_model(self.drafter) if draft else self.drafter
            choices += [(name, None) for name in dict.fromkeys((left, "none")) if draft or name != self.drafter]
        return choices

    def _needs(self, drafter: str | Drafter, target: Prepared, draft: Prepared | None, rule: Rule, past: int) -> Needs:
        if isinstance(drafter, str):
            kept = drafters.kept(drafter, draft is not None, target.size.vocab_size, past)
        else:
            kept = replace(drafter.kept, nodes=drafter.draft_tokens)
        if kept.nodes and isinstance(self.draft_tokens, int):
            kept = replace(kept, nodes=self.draft_tokens)
        ours, theirs = target.text, draft.text if draft else None
        return Needs(
            target.size,
            draft.size if draft else None,
            kept,
            noise=rule.noise_bytes,
            laws=rule.laws,
            translates=bool(ours and theirs and not same_vocabulary(ours, theirs)),
        )


def _warn(limit: int, longest: Mapping[str, int], drafter: str | Drafter) -> None:
    most = next(iter(longest.values()))
    logging.getLogger("foretell").warning(
        "memory %s has no room for %s beside a request of full length, so drafter %r runs instead: %s would keep it",
        shown(limit),
        " and ".join(longest),
        drafter,
        f"max_context {most}" if most else "more memory",
    )


def _slots(free: int, bytes_per_token: int, max_context: int, max_batch: int) -> int:
    """Slots of the pool: every place at full length if a quarter of the free memory holds that, one at least."""
    return min(max_batch * max_context, max(max_context, free // 4 // max(1, bytes_per_token)))
