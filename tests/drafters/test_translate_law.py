"""The law of three tokens drafted in another vocabulary, against the enumerated one, as in tests/engine/test_law.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.drafters.reading import Languages
from foretell.drafters.translate import SharedTokens, Translator
from foretell.types import Drafts, Draw, Seq
from foretell.verify import make_rule
from tests.drafters.pairs import WAYS
from tests.engine.test_law import RUNS, SHAPE, Case, enumerate_law, p_value, play, table
from tests.play import spelled

# eight letters; the draft lacks two of them, has the rest in another order, and two pairs besides
JOINED = [("a", "c"), ("e", "f")]
LANGUAGES = Languages.of(spelled("abcdefgh"), spelled([*"hgfeca", "ac", "ef"], merges=JOINED), (8, 8))


CASES = {
    "shared tokens": [Case("ratio", shape=SHAPE), Case("block")],
    "shared text": [Case("ratio"), Case("block")],
}


@pytest.mark.parametrize(("way", "case"), [(way, case) for way, cases in CASES.items() for case in cases])
def test_three_tokens_have_the_targets_law(way: str, case: Case) -> None:
    """Under `match` the tokens themselves are those of plain decoding: see test_translate.py."""
    drafter = WAYS[way](table(2), LANGUAGES)
    seen, _ = play(make_rule(case.rule), case, reuse=True, drafter=drafter)
    assert p_value(seen, enumerate_law(table(1), case.shape)) > 0.001


class Unnormalised(SharedTokens):
    """Hands over the draft's own q at the shared tokens, although it drew among these alone."""

    def __init__(self) -> None:
        super().__init__(table(2), LANGUAGES)
        self.masses: list[float] = []

    def _widen(self, logits: Tensor) -> Tensor:
        self.masses += logits.softmax(-1)[:, self._theirs].sum(-1).tolist()
        return super()._widen(logits)

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        self.masses.clear()
        drafts = super().propose(seqs, budget, draw)
        assert drafts.drawn is not None and len(self.masses) == len(drafts.drawn.q)
        q = drafts.drawn.q * torch.tensor(self.masses)[:, None]
        return dataclasses.replace(drafts, drawn=dataclasses.replace(drafts.drawn, q=q))


class Misplaced(SharedTokens):
    """Draws among the right tokens and hands over q with its columns in the draft's order."""

    def __init__(self) -> None:
        super().__init__(table(2), LANGUAGES)

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        drafts = super().propose(seqs, budget, draw)
        assert drafts.drawn is not None
        q = torch.zeros_like(drafts.drawn.q)
        q[:, self._ours] = drafts.drawn.q[:, self._ours[np.argsort(self._theirs)]]
        return dataclasses.replace(drafts, drawn=dataclasses.replace(drafts.drawn, q=q))


@pytest.mark.parametrize(("mutant", "rule"), [(Unnormalised, "ratio"), (Misplaced, "block")])
def test_a_wrong_q_would_be_seen(mutant: type[Unnormalised | Misplaced], rule: str) -> None:
    drafter: Translator = mutant()
    seen, _ = play(make_rule(rule), Case(rule), reuse=False, runs=RUNS // 2, drafter=drafter)
    assert p_value(seen, enumerate_law(table(1), {})) < 1e-6
