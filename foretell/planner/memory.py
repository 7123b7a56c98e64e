"""How a limit of memory is divided: weights and workspace first, keys and values of all models get what is left.

Plain arithmetic over what models and drafters say they take; nothing here loads or measures anything. Sizes are bytes
of resident memory that loading and running a model adds to the process: what Python, PyTorch and imports take before is
not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from foretell.types import Kept, ModelSize

BASE = 24 << 20  # code that is first run, buffers of a few rows, holes between what allocators gave out
SLOT = 200  # of one token's bookkeeping: its places in lists, the page it is found by, text and counts of its request
ROWS = 256  # rows of a step beyond drafts, and of one pass of a draft model
ROW_COPIES = 6  # float64 [V] that shaping and drawing from one row take at once
LEAST_CONTEXT = 2  # tokens: a prompt of one and its answer
_UNITS = {unit: 1000**i for i, unit in enumerate(("b", "kb", "mb", "gb", "tb"))}
_UNITS |= {"": 1} | {unit: 1024**i for i, unit in enumerate(("kib", "mib", "gib", "tib"), 1)}


@dataclass(frozen=True, slots=True)
class Needs:
    """What is to run, whatever room it gets."""

    target: ModelSize
    draft: ModelSize | None = None
    kept: Kept = Kept()  # by the drafter
    noise: int = 0  # that the rule keeps between two steps, at most
    laws: bool = False  # q of every drafted node is kept through a step
    translates: bool = False  # the draft has tokens of its own, and so a cache of its own

    def slot(self) -> int:
        """Of one token in the cache."""
        draft = self.draft.kv if self.draft else 0
        return self.target.kv + draft + self.kept.per_token + SLOT * (2 if self.translates else 1)

    def noise_kept(self, batch: int) -> int:
        """What it is worth keeping: the draft's draws are the target's in the same round, and most in the next."""
        return min(self.noise, 16 * self.target.vocab_size * batch * (1 + self.kept.nodes))

    def parts(self, context: int, batch: int) -> dict[str, int]:
        """All but the cache's slots, by the names of `Split`: for `batch` requests of at most `context` tokens."""
        target, draft, nodes = self.target, self.draft, self.kept.nodes
        ids = 8 * target.vocab_size  # of a row in float64
        wanted = batch * (1 + nodes)
        work = target.work(ROWS + batch + batch * nodes, wanted, context)
        work += ids * (2 * batch + ROW_COPIES)  # the target's law; counts of requests with penalties
        drafting = self.kept.fixed + batch * self.kept.per_request
        if draft is not None:
            drafting += draft.work(max(ROWS, batch), batch, min(context, draft.max_context))
        if self.kept.runs:
            drafting += ids * 2 * batch  # its rows widened
            drafting += ids * 2 * batch * nodes if self.laws else 0
        if self.translates and draft is not None:
            drafting += TRANSLATED * (target.vocab_size + draft.vocab_size) + 4 * batch * context
        return {
            "weights": target.weights + target.position * context,
            "draft_weights": draft.weights + draft.position * draft.max_context if draft else 0,
            "workspace": BASE + work + self.noise_kept(batch) + 4 * batch * context,
            "drafting": drafting,
        }

    def slots(self, limit: int, context: int, batch: int) -> int:
        """How many tokens the cache holds within the limit, at most all requests at full length; below 0 if the rest
        is too much already."""
        left = limit - sum(self.parts(context, batch).values())
        return min(batch * context, left // self.slot())

    def largest_context(self, limit: int, batch: int, most: int) -> int:
        """The longest request, up to `most` tokens, that fits while there are places for `batch`; 0: none does."""
        low, high = LEAST_CONTEXT - 1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.slots(limit, middle, batch) >= middle else (low, middle - 1)
        return low if low >= LEAST_CONTEXT else 0

    def largest_batch(self, limit: int, context: int, most: int) -> int:
        """The most places, up to `most`, beside which a request of that length fits; 0: none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.slots(limit, context, middle) >= context else (low, middle - 1)
        return low

    def least(self) -> int:
        """Without this nothing runs at all."""
        return sum(self.parts(LEAST_CONTEXT, 1).values()) + LEAST_CONTEXT * self.slot()


TRANSLATED = 120  # of a token of either vocabulary that is read in the other


@dataclass(frozen=True, slots=True)
class Split:
    """Where the memory goes, in bytes. `peak` is what is reached when the cache is full and all places are taken.

    weights: of the target, with its tokenizer and tables of positions. draft_weights: of the draft model likewise.
    workspace: of the target's largest step, and what its rule keeps. drafting: the same of the drafter, with what it
    remembers of texts. slots: tokens in the cache, all requests together; kv and draft_kv: of each, keys and values
    of target and draft; slot: of each, bookkeeping included. limit: as asked for, None: no limit.
    """

    weights: int
    draft_weights: int
    workspace: int
    drafting: int
    slots: int
    kv: int
    draft_kv: int
    slot: int
    max_context: int
    max_batch: int
    limit: int | None = None

    @property
    def cache(self) -> int:
        return self.slots * self.slot

    @property
    def peak(self) -> int:
        return self.weights + self.draft_weights + self.workspace + self.drafting + self.cache

    @property
    def full_requests(self) -> int:
        """Requests of max_context tokens that the cache holds at once. More may run while they are shorter; when slots
        run out, the latest gives way and comes back."""
        return self.slots // self.max_context

    def as_dict(self) -> dict[str, int | None]:
        """All of it, for a program to read."""
        names = ("peak", "weights", "draft_weights", "workspace", "drafting", "cache", "slots", "kv", "draft_kv")
        return {name: getattr(self, name) for name in (*names, "full_requests", "limit")}

    def __str__(self) -> str:
        within = "" if self.limit is None else f" of {shown(self.limit)}"
        draft = f", draft model {shown(self.draft_weights)}" if self.draft_weights else ""
        full = f"{self.full_requests} request{'s' if self.full_requests > 1 else ''} at full length"
        return (
            f"{shown(self.peak)}{within}: weights {shown(self.weights)}{draft}, cache {shown(self.cache)} "
            f"({self.slots} tokens, {full})"
        )


def split(needs: Needs, slots: int, context: int, batch: int, limit: int | None = None) -> Split:
    """What so many slots take, with all the rest."""
    draft = needs.draft.kv if needs.draft else 0
    parts: Mapping[str, int] = needs.parts(context, batch)
    return Split(
        **parts,
        slots=slots,
        kv=needs.target.kv,
        draft_kv=draft,
        slot=needs.slot(),
        max_context=context,
        max_batch=batch,
        limit=limit,
    )


def refusal(needs: Needs, limit: int, context: int, batch: int) -> str:
    """Why a request of `context` tokens does not fit with places for `batch`, and what would, in one sentence."""
    if limit < needs.least():
        return (
            f"memory {shown(limit)} is not enough to run this model at all, not even for one request of "
            f"{LEAST_CONTEXT} tokens: it takes {shown(needs.least())}, {shown(needs.target.weights)} of it for weights"
        )
    wanted = sum(needs.parts(context, batch).values()) + context * needs.slot()
    options = []
    for places in dict.fromkeys((batch, 1)):
        longest = needs.largest_context(limit, places, context)
        if longest:
            options.append(f"max_context {longest} with max_batch {places}")
    most = needs.largest_batch(limit, context, batch)
    if most:
        options.append(f"max_context {context} with max_batch {most}")
    return (
        f"memory {shown(limit)} does not hold one request of max_context {context} with max_batch {batch}, which takes "
        f"{shown(wanted)}: the largest that fit are {', or '.join(dict.fromkeys(options))}"
    )


def in_bytes(value: object) -> int:
    """What `memory` says: a whole number of bytes, or a text such as "12GiB" or "500MB". ValueError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower()) if isinstance(value, str) else None
    size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if size <= 0:
        raise ValueError(f"memory must be a number of bytes or such as '12GiB' or '500MB', not {value!r}")
    return size


def shown(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10**10 else f"{size / 1e6:.1f} MB"
