"""The drafting methods by name: the only place where a method is called by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foretell.drafters.base import Drafter, NoDrafter
from foretell.drafters.early_exit import CHOICE, Choice, EarlyExitDrafter
from foretell.drafters.lookahead import LookaheadSource
from foretell.drafters.member import MemberSource
from foretell.drafters.model import ModelDrafter
from foretell.drafters.ngram import NgramDrafter, NgramSource
from foretell.drafters.prediction import PredictionSource
from foretell.drafters.recycling import RecyclingSource
from foretell.drafters.search import SearchDrafter, Source
from foretell.drafters.suffix import SuffixSource
from foretell.drafters.translate import translator
from foretell.models.base import Target
from foretell.models.text import Text
from foretell.models.vocabulary import same_vocabulary


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter may be built from. vocabulary: ids of the target that stand for a token. trees: whether the rule
    verifies more than chains. folder: where what was learnt about this target is kept. texts: the tokenizers of target
    and draft_model, as far as they have one."""

    target: Target
    vocabulary: int
    draft_model: Target | None
    trees: bool = True
    folder: Path | None = None
    texts: tuple[Text | None, Text | None] = (None, None)


@dataclass(frozen=True, slots=True)
class Method:
    """How to build a drafter, and whether it runs a draft model (None: with one or without)."""

    build: Callable[[Parts], Drafter]
    draft_model: bool | None = False


def _model(parts: Parts) -> Drafter:
    model, size, (ours, theirs) = parts.draft_model, parts.target.vocab_size, parts.texts
    assert model is not None, "check() comes first"
    if ours is not None and theirs is not None and not same_vocabulary(ours, theirs):
        return translator(model, (ours, theirs), size)
    if (ours is None or theirs is None) and model.vocab_size != size:
        raise ValueError(
            f"draft_model has {model.vocab_size} tokens and the model {size}: without tokenizers to compare, they must "
            "be equal"
        )
    return ModelDrafter(model, size, vocabulary=parts.vocabulary)


def _early_exit(parts: Parts) -> Drafter:
    count = parts.target.num_layers
    saved = Choice.load(parts.folder / CHOICE, count) if parts.folder else None
    choice = saved or Choice.default(count)
    return EarlyExitDrafter(parts.target, choice.layers, draft_tokens=choice.draft_tokens, vocabulary=parts.vocabulary)


# what knows texts, in a tree of its own or in one with others
SOURCES: dict[str, Callable[[Parts], Source]] = {
    "ngram": lambda parts: NgramSource(),
    "suffix": lambda parts: SuffixSource(),
    "recycling": lambda parts: RecyclingSource(parts.target.vocab_size),
    "prediction": lambda parts: PredictionSource(),
    "lookahead": lambda parts: LookaheadSource(),
}
# what runs a model, and can be a member of such a tree as well
RUNNERS: dict[str, Callable[[Parts], Drafter]] = {"early_exit": _early_exit, "model": _model}
MIXTURE = ("suffix", "recycling", "ngram", "prediction")  # the best that needs nothing but the target


def _source(name: str, parts: Parts) -> Source:
    return SOURCES[name](parts) if name in SOURCES else MemberSource(RUNNERS[name](parts))


def _search(*names: str) -> Callable[[Parts], Drafter]:
    return lambda parts: SearchDrafter({name: _source(name, parts) for name in names}, width=None if parts.trees else 1)


def _auto(parts: Parts) -> Drafter:
    return _search(*MIXTURE)(parts) if parts.draft_model is None else _model(parts)


METHODS: dict[str, Method] = {
    "none": Method(lambda parts: NoDrafter()),
    "ngram": Method(lambda parts: NgramDrafter()),
    "suffix": Method(_search("suffix")),
    "recycling": Method(_search("recycling")),
    "prediction": Method(_search("prediction")),
    "lookahead": Method(_search("lookahead")),
    "early_exit": Method(_early_exit),
    "model": Method(_model, True),
    "auto": Method(_auto, None),
}


def check(name: str, has_draft_model: bool) -> None:
    """ValueError in one sentence for an unknown name, or if a draft model is missing or of no use."""
    members = name.split("+")
    unknown = next((member for member in members if member not in METHODS), None)
    if unknown is not None:
        raise ValueError(f"drafter {unknown!r} is not one of {', '.join(METHODS)}, or several joined by '+'")
    if len(members) > 1:
        joined = SOURCES.keys() | RUNNERS.keys()
        alone = next((member for member in members if member not in joined), None)
        if alone is not None:
            among = ", ".join((*SOURCES, *RUNNERS))
            raise ValueError(f"drafter {alone!r} cannot be joined with others: choose among {among}")
        if len(set(members)) < len(members):
            raise ValueError(f"drafter {name!r} names a member twice")
    uses = {METHODS[member].draft_model for member in members}
    if True in uses and not has_draft_model:
        raise ValueError(f"drafter {name!r} needs draft_model: the name or path of a smaller model")
    if has_draft_model and uses == {False}:
        raise ValueError(f"drafter {name!r} has no use for a draft_model: leave it out, or choose drafter 'auto'")


def build(name: str, parts: Parts) -> Drafter:
    """The drafter of that name; `check` it first."""
    members = name.split("+")
    drafter = METHODS[name].build(parts) if len(members) == 1 else _search(*members)(parts)
    if parts.folder:
        drafter.load(parts.folder)
    return drafter
