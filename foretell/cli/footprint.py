"""How much memory a model, its draft model and the keys and values of its requests take: given, or as it is told before
a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretell.models.open import prepare


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


def of_models(model: str, draft_model: str | None, dtype: str) -> Footprint:
    """As `LLM` will count them; tokenizers are among the weights. ValueError if a model cannot be opened."""
    target = prepare(model, dtype=dtype).size
    if draft_model is None:
        return Footprint(target.weights, target.kv)
    draft = prepare(draft_model, dtype=dtype).size
    return Footprint(target.weights, target.kv, draft.weights, draft.kv)
