"""A target whose logits are a lookup of the last tokens: exact, tiny, for tests and for explaining.

It keeps its "keys and values" in a real plane, the token at each slot, and reads them back through the slot table and
the rows' paths: an engine that commits a wrong slot, or leaves a rejected one behind, changes its output.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from foretell.kv.cache import Cache, Plane
from foretell.models.base import layers_to_run
from foretell.models.ops import key_slots
from foretell.types import Output, Rows


class TableTarget:
    """logits(row) = sum over its last `memory` tokens of table[distance, token]; earlier tokens add their sum.

    The sum over all earlier tokens makes every slot of the context matter, not only the last few. Each term is a
    "layer" with an entry of its own at each slot: what only some layers have written, the others do not know.
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
        self.num_layers = memory + 1
        self.forwards = 0
        self._plane: Plane | None = None

    def attach(self, cache: Cache, plane: str) -> None:
        self._plane = cache.add_plane(plane, self.num_layers, 1, 1, torch.int64)

    def kv_bytes(self) -> int:
        return 16 * self.num_layers

    def forward(
        self, rows: Rows, cache: Cache, *, taps: Collection[int] = (), layers: Sequence[int] | None = None
    ) -> Output:
        assert self._plane is not None, "attach a cache first"
        chosen = layers_to_run(layers, self.num_layers)
        self.forwards += 1
        held = self._plane.k[:, :, 0, 0]  # [layers, slots]
        for layer in chosen:
            held[layer, rows.slots] = rows.tokens
        self._plane.filled[rows.slots.numpy()] = len(chosen) == self.num_layers
        keys = key_slots(rows, cache)
        lengths = [len(k) for k in keys]
        assert lengths == (rows.positions + 1).tolist(), "a row does not see exactly the tokens before it"
        seen = [self._seen(held.numpy(), keys[r]) for r in rows.want.tolist()]
        logits = [self.logits(tokens) if layers is None else self.logits(tokens, chosen) for tokens in seen]
        empty = torch.empty(0, self.vocab_size, dtype=torch.float64)
        return Output(torch.stack(logits) if logits else empty)

    def _seen(self, held: np.ndarray, slots: np.ndarray) -> list[int]:
        """The tokens at those slots, each as the one layer that looks at its distance has it."""
        distance = np.arange(len(slots))[::-1]
        tokens: list[int] = held[np.minimum(distance, self.num_layers - 1), slots].tolist()
        return tokens

    def logits(self, tokens: list[int], layers: Sequence[int] | None = None) -> Tensor:
        """float64 [V] after these tokens."""
        memory = self.num_layers - 1
        chosen = layers_to_run(layers, self.num_layers)
        total = torch.zeros(self.vocab_size).double()
        for i, token in enumerate(tokens[-memory:][::-1]):
            if i in chosen:
                total = total + self.table[i, token]
        return total + self.table[memory, tokens[:-memory]].sum(0) if memory in chosen else total
