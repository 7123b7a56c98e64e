"""The only interface to a model that the engine and the drafters see."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from foretell.kv.cache import Cache
from foretell.types import Output, Rows


class Target(Protocol):
    """A causal language model over the slots of a `Cache`.

    exact: a row's logits do not depend, bit for bit, on the rows computed with it (checked, not assumed).
    backend: one word for what computes it. stop_ids: token ids that end a text. num_layers: decoder layers that
    `forward` may choose among; 0: it runs whole only.
    """

    vocab_size: int
    max_context: int
    stop_ids: frozenset[int]
    exact: bool
    backend: str
    num_layers: int

    def attach(self, cache: Cache, plane: str) -> None:
        """Make this model's plane in the cache; once, before the first forward."""
        ...

    def kv_bytes(self) -> int:
        """Bytes of keys and values that one token takes."""
        ...

    def forward(
        self, rows: Rows, cache: Cache, *, taps: Collection[int] = (), layers: Sequence[int] | None = None
    ) -> Output:
        """Write K and V of every row to its slot; return the logits of `rows.want` and the asked hidden states.
        The tensors of the output are valid until the next forward of the same model.

        layers: those to run, ascending, under the same final norm and head; None is all. Only their K and V are
        written, only they can be tapped, and unless they are all of them the slots do not count as filled."""
        ...


def layers_to_run(layers: Sequence[int] | None, count: int) -> Sequence[int]:
    """The chosen ones of `count` layers, None being all. ValueError if that is no choice."""
    if layers is None:
        return range(count)
    if count == 0:
        raise ValueError("this model runs whole only: no drafter can use some of its layers, choose another one")
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= count:
        raise ValueError(
            f"layers {list(layers)} are no choice among the model's {count}: name one at least, each once, in "
            f"ascending order from 0 to {count - 1}"
        )
    return layers
