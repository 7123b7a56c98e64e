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
from foretell.drafters.recycling import OWN, PAIRS, RecyclingSource
from foretell.drafters.search import SearchDrafter, Source
from foretell.drafters.suffix import PAST, SuffixSource
from foretell.drafters.translate import translator
from foretell.models.base import Target
from foretell.models.text import Text
from foretell.models.vocabulary import same_vocabulary
from foretell.types import Kept


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter may be built from. vocabulary: ids of the target that stand for a token. trees: whether the rule
    verifies more than chains. folder: where what was learnt about this target is kept. texts: the tokenizers of target
    and draft_model, as far as they have one. past: tokens of finished requests that may be kept for others."""

    target: Target
    vocabulary: int
    draft_model: Target | None
    trees: bool = True
    folder: Path | None = None
    texts: tuple[Text | None, Text | None] = (None, None)
    past: int = PAST


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
    "suffix": lambda parts: SuffixSource(parts.past),
    "recycling": lambda parts: RecyclingSource(parts.target.vocab_size),
    "prediction": lambda parts: PredictionSource(),
    "lookahead": lambda parts: LookaheadSource(),
}
# what runs a model, and can be a member of such a tree as well
RUNNERS: dict[str, Callable[[Parts], Drafter]] = {"early_exit": _early_exit, "model": _model}
MIXTURE = ("suffix", "recycling", "ngram", "prediction")  # the best that needs nothing but the target
# the memory that each takes, for V ids and `past` tokens: measured on texts of random tokens, which share nothing, so
# that others take less (see docs/memory.md). nodes: beyond the usual.
KEPT: dict[str, Callable[[int, int], Kept]] = {
    "ngram": lambda ids, past: Kept(per_token=260, nodes=0),
    "suffix": lambda ids, past: Kept(fixed=past * PAST_BYTES, per_token=750, nodes=0),
    "recycling": lambda ids, past: Kept(fixed=146 * ids + 420 * PAIRS, per_request=380 * OWN, nodes=0),
    "lookahead": lambda ids, past: Kept(per_request=1 << 22, nodes=LookaheadSource().rows),
    "early_exit": lambda ids, past: Kept(nodes=0, runs=True),
    "model": lambda ids, past: Kept(nodes=0, runs=True),
}
SEARCH = Kept(per_token=60, nodes=0)  # of a tree of several
PAST_BYTES = 530  # of a token of a finished request, read from disk or learnt since


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
    joined = name.split("+")
    unknown = next((member for member in joined if member not in METHODS), None)
    if unknown is not None:
        raise ValueError(f"drafter {unknown!r} is not one of {', '.join(METHODS)}, or several joined by '+'")
    if len(joined) > 1:
        alone = next((member for member in joined if member not in SOURCES.keys() | RUNNERS.keys()), None)
        if alone is not None:
            among = ", ".join((*SOURCES, *RUNNERS))
            raise ValueError(f"drafter {alone!r} cannot be joined with others: choose among {among}")
        if len(set(joined)) < len(joined):
            raise ValueError(f"drafter {name!r} names a member twice")
    uses = {METHODS[member].draft_model for member in joined}
    if True in uses and not has_draft_model:
        raise ValueError(f"drafter {name!r} needs draft_model: the name or path of a smaller model")
    if has_draft_model and uses == {False}:
        raise ValueError(f"drafter {name!r} has no use for a draft_model: leave it out, or choose drafter 'auto'")


def members(name: str, has_draft_model: bool) -> list[str]:
    """What a drafter's name stands for."""
    if name == "auto":
        return ["model"] if has_draft_model else [*MIXTURE]
    return name.split("+")


def without_draft_model(name: str) -> str:
    """What is left of a drafter that had one."""
    left = [member for member in name.split("+") if METHODS[member].draft_model is not True]
    return "+".join(left) or "none"


def kept(name: str, has_draft_model: bool, vocabulary: int, past: int = PAST) -> Kept:
    """The memory that the drafter of that name will take, before it is built; `check` it first."""
    names = members(name, has_draft_model)
    if names == ["none"]:
        return Kept(nodes=0)
    found = [SEARCH, *(KEPT[member](vocabulary, past) for member in names if member in KEPT)]
    return Kept(
        fixed=sum(part.fixed for part in found),
        per_request=sum(part.per_request for part in found),
        per_token=sum(part.per_token for part in found),
        nodes=Drafter.draft_tokens + sum(part.nodes for part in found),
        runs=any(part.runs for part in found),
    )


def build(name: str, parts: Parts) -> Drafter:
    """The drafter of that name; `check` it first."""
    joined = name.split("+")
    drafter = METHODS[name].build(parts) if len(joined) == 1 else _search(*joined)(parts)
    if parts.folder:
        drafter.load(parts.folder)
    return drafter
