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


@dataclass(frozen=True, slots=True)
class Method:
    """How to build a drafter, and whether it runs a draft model (None: with one or without)."""

    build: Callable[[Parts], Drafter]
    draft_model: bool | None


def _model(parts: Parts) -> Drafter:
    assert parts.draft_model is not None, "check() comes first"
    return ModelDrafter(parts.draft_model, parts.target.vocab_size, vocabulary=parts.vocabulary)


METHODS: dict[str, Method] = {
    "none": Method(lambda parts: NoDrafter(), False),
    "ngram": Method(lambda parts: NgramDrafter(), False),
    "model": Method(_model, True),
    "auto": Method(lambda parts: NgramDrafter() if parts.draft_model is None else _model(parts), None),
}


def check(name: str, has_draft_model: bool) -> None:
    """ValueError in one sentence for an unknown name, or if a draft model is missing or of no use."""
    if name not in METHODS:
        raise ValueError(f"drafter {name!r} is not one of {', '.join(METHODS)}")
    wanted = METHODS[name].draft_model
    if wanted and not has_draft_model:
        raise ValueError(f"drafter {name!r} needs draft_model: the name or path of a model of the same vocabulary")
    if wanted is False and has_draft_model:
        raise ValueError(f"drafter {name!r} has no use for a draft_model: leave it out, or choose drafter 'auto'")


def build(name: str, parts: Parts) -> Drafter:
    """The drafter of that name; `check` it first."""
    return METHODS[name].build(parts)
