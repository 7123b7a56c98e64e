"""A target whose logits are a lookup of the last tokens: exact, tiny, for tests and for explaining.

It keeps its "keys and values" in a real plane, the token at each slot, and reads them back through the slot table and
the rows' paths: an engine that commits a wrong slot, or leaves a rejected one behind, changes its output.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from foretell.kv.cache import Cache, Plane
from foretell.models.ops import key_slots
from foretell.types import Output, Rows


class TableTarget:
    """logits(row) = sum over its last `memory` tokens of table[distance, token]; earlier tokens add their sum.

    The sum over all earlier tokens makes every slot of the context matter, not only the last few.
    """

    exact = True
    backend = "table"

    def __init__(
        self, vocab_size: int, *, memory: int = 3, seed: int = 0, max_context: int = 512, stop_ids: Collection[int] = ()
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size, self.max_context, self.stop_ids = vocab_size, max_context, frozenset(stop_ids)
        self.table = 2 * torch.randn(memory + 1, vocab_size, vocab_size, generator=generator, dtype=torch.float64)
        self.table[memory] /= 8
        self.forwards = 0
        self._plane: Plane | None = None

    def attach(self, cache: Cache, plane: str) -> None:
        self._plane = cache.add_plane(plane, 1, 1, 1, torch.int64)

    def kv_bytes(self) -> int:
        return 16

    def forward(self, rows: Rows, cache: Cache, *, taps: Collection[int] = ()) -> Output:
        assert self._plane is not None, "attach a cache first"
        self.forwards += 1
        tokens = self._plane.k[0, :, 0, 0]
        tokens[rows.slots] = rows.tokens
        self._plane.filled[rows.slots.numpy()] = True
        keys = key_slots(rows, cache)
        lengths = [len(k) for k in keys]
        assert lengths == (rows.positions + 1).tolist(), "a row does not see exactly the tokens before it"
        logits = [self.logits(tokens[torch.from_numpy(keys[r])].tolist()) for r in rows.want.tolist()]
        empty = torch.empty(0, self.vocab_size, dtype=torch.float64)
        return Output(torch.stack(logits) if logits else empty)

    def logits(self, tokens: list[int]) -> Tensor:
        """float64 [V] after these tokens."""
        memory = len(self.table) - 1
        recent = tokens[-memory:][::-1]
        total = sum((self.table[i, token] for i, token in enumerate(recent)), torch.zeros(self.vocab_size).double())
        return total + self.table[memory, tokens[:-memory]].sum(0)
