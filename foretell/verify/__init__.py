"""The exact mathematics: which drafted tokens the target keeps. Imports types and sampling, no model, no cache."""

from __future__ import annotations

from foretell.verify.block import Block
from foretell.verify.match import Match
from foretell.verify.ratio import Ratio
from foretell.verify.rule import Rule

RULES: dict[str, type[Rule]] = {"match": Match, "ratio": Ratio, "block": Block}

__all__ = ["RULES", "Rule", "make_rule"]


def make_rule(name: str) -> Rule:
    """The rule of that name; ValueError if there is none."""
    if name not in RULES:
        raise ValueError(f"there is no rule {name!r}: choose one of {', '.join(RULES)}")
    return RULES[name]()
