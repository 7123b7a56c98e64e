"""An independent draft model with the target's vocabulary (Leviathan et al. 2023; Chen et al. 2023), on a plane of its
own."""

from __future__ import annotations

from foretell.drafters.passes import PassDrafter
from foretell.kv.cache import Cache
from foretell.models.base import Target

PLANE = "draft"


class ModelDrafter(PassDrafter):
    """width: chains that start at the root, 1 being a single chain. vocabulary: ids below it may be proposed."""

    def __init__(self, model: Target, vocab_size: int, *, vocabulary: int | None = None, width: int = 1) -> None:
        super().__init__(model, PLANE, vocab_size, vocabulary=vocabulary, width=width)

    def attach(self, cache: Cache) -> None:
        super().attach(cache)
        self.model.attach(cache, PLANE)
