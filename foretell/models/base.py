"""The only interface to a model that the engine and the drafters see."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from foretell.kv.cache import Cache
from foretell.types import Output, Rows


class Target(Protocol):
    """A causal language model over the slots of a `Cache`.

    exact: a row's logits do not depend, bit for bit, on the rows computed with it (checked, not assumed).
    backend: one word for what computes it. stop_ids: token ids that end a text.
    """

    vocab_size: int
    max_context: int
    stop_ids: frozenset[int]
    exact: bool
    backend: str

    def attach(self, cache: Cache, plane: str) -> None:
        """Make this model's plane in the cache; once, before the first forward."""
        ...

    def kv_bytes(self) -> int:
        """Bytes of keys and values that one token takes."""
        ...

    def forward(self, rows: Rows, cache: Cache, *, taps: Collection[int] = ()) -> Output:
        """Write K and V of every row to its slot; return the logits of `rows.want` and the asked hidden states.
        The tensors of the output are valid until the next forward of the same model."""
        ...
