"""Where keys and values live: slots of one token each, shared by every plane.

A request reserves slots for the rows of a step, commits those on the accepted path (an entry of the slot table each, no
copy), and gets rid of the rest by doing nothing. A draft model keeps its keys and values in another plane of the same
slots, so acceptance, preemption and prefix hits treat both alike. Slots lie in the slot table in order of position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretell.kv.prefix import PAGE, Page, PrefixPages
from foretell.types import Seq


@dataclass(frozen=True, slots=True)
class Plane:
    """One model's keys and values over all slots."""

    k: Tensor  # [layers, slots, heads, head_dim]
    v: Tensor  # [layers, slots, heads, head_dim]
    filled: np.ndarray  # bool [slots]  the plane's own model has written this slot since it was reserved


class Cache:
    """Slots for `slots` tokens, held by at most `max_seqs` requests of at most `max_context` tokens each.

    `reuse`: keep the pages of finished requests for others with the same beginning until their slots are needed.
    """

    def __init__(self, slots: int, max_seqs: int, max_context: int, *, reuse: bool = True) -> None:
        self.slots = slots
        self.max_context = max_context
        self.table = torch.zeros(max_seqs, max_context, dtype=torch.int32)  # [max_seqs, max_context]
        self.planes: dict[str, Plane] = {}
        self._lines = self.table.numpy()
        self._free = list(range(slots - 1, -1, -1))
        self._free_lines = list(range(max_seqs - 1, -1, -1))
        self._scratch: dict[int, list[int]] = {}  # request id -> reserved, not committed
        self._shared: dict[int, list[Page]] = {}  # request id -> pages it took from the prefix cache
        self._held: dict[int, Seq] = {}
        self._prefix = PrefixPages() if reuse else None

    def add_plane(
        self,
        name: str,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> Plane:
        """A new plane over all slots, on the CPU unless told otherwise. Memory is touched only where it is written.

        In memory the slots of a head lie side by side: attention reads them head by head."""
        shape = (layers, heads, self.slots, head_dim)
        k, v = (torch.empty(shape, dtype=dtype, device=device or "cpu").transpose(1, 2) for _ in range(2))
        plane = Plane(k, v, np.zeros(self.slots, dtype=np.bool_))
        self.planes[name] = plane
        return plane

    @property
    def available(self) -> int:
        """Slots that `reserve` could hand out now."""
        return len(self._free) + (self._prefix.idle_slots if self._prefix else 0)

    def admit(self, seq: Seq) -> bool:
        """Give the request a line of the slot table and the longest cached beginning of its tokens, at least one
        token short of all of them. False: no line is free."""
        if not self._free_lines:
            return False
        seq.table = self._free_lines.pop()
        pages = self._prefix.take(seq.tokens[:-1]) if self._prefix else []
        for page in pages:
            self._lines[seq.table, seq.cached : seq.cached + len(page.slots)] = page.slots
            seq.cached += len(page.slots)
        self._shared[seq.id] = pages
        self._held[seq.id] = seq
        return True

    def reserve(self, seq: Seq, n: int) -> bool:
        """Hold n slots beyond `seq.cached` until `commit`, in place of those an interrupted step left behind. False:
        there are too few, none is held."""
        self._free.extend(self._scratch.pop(seq.id, ()))
        missing = n - len(self._free)
        if missing > 0:
            if n > self.available or self._prefix is None:
                return False
            self._free.extend(self._prefix.evict(missing))
        taken = self._free[-n:] if n else []
        del self._free[len(self._free) - n :]
        taken.reverse()
        self._scratch[seq.id] = taken
        for plane in self.planes.values():
            plane.filled[taken] = False
        return True

    def reserved(self, seq: Seq) -> Sequence[int]:
        """The slots of this step's rows of the request, in row order."""
        return self._scratch[seq.id]

    def unwrite(self, seq: Seq, start: int) -> None:
        """What models wrote to the reserved slots from the `start`th on is of no use: other tokens will have them."""
        slots = self._scratch[seq.id][start:]
        for plane in self.planes.values():
            plane.filled[slots] = False

    def committed(self, seq: Seq, start: int, end: int) -> np.ndarray:
        """int32 [end - start]: slots of the tokens at positions start..end, all below `seq.cached`."""
        line: np.ndarray = self._lines[seq.table, start:end]
        return line

    def commit(self, seq: Seq, kept: Iterable[int]) -> None:
        """Make the kept ones of the reserved slots, in path order, the next tokens' own; the rest go back."""
        scratch = self._scratch.pop(seq.id)
        order = list(kept)
        slots = [scratch[i] for i in order]
        self._lines[seq.table, seq.cached : seq.cached + len(slots)] = slots
        seq.cached += len(slots)
        if len(order) < len(scratch):
            keep = set(order)
            self._free.extend(s for i, s in enumerate(scratch) if i not in keep)

    def rewind(self, seq: Seq, length: int) -> None:
        """Take back the commitment of all tokens but the first `length`, and of what else is in a page shared with
        others that this cuts: `seq.cached` says what is left. For a cache whose texts may change at their end."""
        self._free.extend(self._scratch.pop(seq.id, ()))
        shared = self._shared[seq.id]
        own = PAGE * len(shared)  # where the request's own slots begin
        left = min(length, seq.cached)
        while PAGE * len(shared) > left and self._prefix is not None:
            self._prefix.untake(shared.pop())
            left = min(left, PAGE * len(shared))
        self._free.extend(self._lines[seq.table, max(left, own) : seq.cached].tolist())
        seq.cached = left

    def release(self, seq: Seq) -> None:
        """Take back all that the request holds; whole pages of committed tokens stay for others to use."""
        if self._held.pop(seq.id, None) is None:
            return
        self._free.extend(self._scratch.pop(seq.id, ()))
        shared = self._shared.pop(seq.id)
        slots = self._lines[seq.table, : seq.cached].tolist()
        if self._prefix is None:
            self._free.extend(slots)
        else:
            self._free.extend(self._prefix.give_back(seq.tokens[: seq.cached], slots, shared))
        self._free_lines.append(seq.table)
        seq.table, seq.cached = -1, 0

    def forget(self) -> None:
        """Give up the pages that no request is using: a prompt with the same beginning is computed anew."""
        if self._prefix is not None:
            self._free.extend(self._prefix.evict(self._prefix.idle_slots))

    def check(self) -> None:
        """Raise AssertionError unless every slot is exactly one of free, held and published."""
        seen = list(self._free)
        for seq in self._held.values():
            borrowed = sum(len(page.slots) for page in self._shared[seq.id])
            seen += self._lines[seq.table, borrowed : seq.cached].tolist()
            seen += self._scratch.get(seq.id, [])
        if self._prefix:
            seen += self._prefix.all_slots()
            self._prefix.check([page for pages in self._shared.values() for page in pages])
        assert sorted(seen) == list(range(self.slots)), "a slot is lost or held twice"
        lines = [seq.table for seq in self._held.values()] + self._free_lines
        assert sorted(lines) == list(range(self.table.shape[0])), "a line of the slot table is lost or held twice"
