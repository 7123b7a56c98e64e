"""How much memory a model, its draft model and the keys and values of its requests take: by their configurations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretell.models.hub import resolve
from foretell.models.load import open_checkpoint, tensor_shapes
from foretell.models.open import DTYPES


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes. kv, draft_kv: of one token's keys and values. What a step computes in comes on top."""

    weights: float
    kv: float
    draft_weights: float = 0.0
    draft_kv: float = 0.0

    def tokens(self, limit: float) -> int:
        """That fit beside the weights."""
        left = limit - self.weights - self.draft_weights
        return max(0, math.floor(left / (self.kv + self.draft_kv))) if self.kv + self.draft_kv else 0

    def needed(self, context: float, batch: int) -> float:
        """By so many requests of so many tokens."""
        return self.weights + self.draft_weights + batch * context * (self.kv + self.draft_kv)

    def figures(self, context: float, batches: Sequence[int], limit: float | None) -> dict[str, Any]:
        """Ready for JSON."""
        rows = [{"batch": batch, "bytes": self.needed(context, batch)} for batch in batches]
        if limit is not None:
            fits = self.tokens(limit)
            rows = [{**row, "largest_context": fits // row["batch"]} for row in rows]
        return {**asdict(self), "limit": limit, "context": context, "batches": rows}


def of_models(model: str, draft_model: str | None, dtype: str) -> Footprint | None:
    """None if a model's configuration does not say."""
    target, draft = _bytes(model, dtype), _bytes(draft_model, dtype) if draft_model else (0.0, 0.0)
    return Footprint(*target, *draft) if target and draft else None


def _bytes(model: str, dtype: str) -> tuple[float, float] | None:
    """Of the weights and of a token's keys and values, as they are in memory."""
    checkpoint = open_checkpoint(resolve(model))
    config = checkpoint.config
    if config is None:
        return None
    own = 2 if checkpoint.gguf is not None else config.dtype.itemsize
    each = own if dtype == "auto" else DTYPES[dtype].itemsize
    parameters = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    return float(parameters * each), float(2 * config.num_layers * config.num_kv_heads * config.head_dim * each)
