"""The drafting methods by name: the only place where a method is called by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.drafters.base import Drafter, NoDrafter
from foretell.drafters.model import ModelDrafter
from foretell.drafters.ngram import NgramDrafter
from foretell.models.base import Target


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter may be built from. vocabulary: ids of the target that stand for a token."""

    target: Target
    vocabulary: int
    draft_model: Target | None


def _model(parts: Parts) -> Drafter:
    if parts.draft_model is None:
        raise ValueError(
            "drafter 'model' needs draft_model: the name or path of a smaller model of the same vocabulary"
        )
    return ModelDrafter(parts.draft_model, parts.target.vocab_size, vocabulary=parts.vocabulary)


METHODS: dict[str, Callable[[Parts], Drafter]] = {
    "none": lambda parts: NoDrafter(),
    "ngram": lambda parts: NgramDrafter(),
    "model": _model,
    "auto": lambda parts: NgramDrafter() if parts.draft_model is None else _model(parts),
}


def build(name: str, parts: Parts) -> Drafter:
    """ValueError in one sentence for an unknown name, or if the method lacks what it needs."""
    if name not in METHODS:
        raise ValueError(f"drafter {name!r} is not one of {', '.join(METHODS)}")
    return METHODS[name](parts)
