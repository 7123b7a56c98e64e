"""Predicted outputs: followed, left where the answer departs, found again behind it; of no influence on the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from foretell import LLM
from foretell.drafters.base import NoDrafter
from foretell.drafters.prediction import PredictionSource
from foretell.drafters.search import SearchDrafter
from foretell.types import Sampling, Seq
from tests.cli.conftest import write_tiny
from tests.conftest import VOCAB, run, table_target
from tests.drafters.test_search import proposed

PROMPT = [3, 4]
GREEDY = Sampling(temperature=0, max_tokens=60, ignore_eos=True)
FILE = [random.Random(5).randrange(10, 40) for _ in range(90)]  # few tokens: each of them many times, as in code
EDITS = {
    "nothing": (30, 30, []),
    "one token is another": (30, 31, [7]),
    "three are four": (30, 33, [7, 8, 7, 9]),
    "five more": (30, 30, [7, 8, 9, 7, 8]),
    "six less": (30, 36, []),
    "the first line is another": (0, 6, [7, 8, 9]),
}


def drafter() -> SearchDrafter:
    return SearchDrafter({"prediction": PredictionSource()})


def follow(prediction: Sequence[int], answer: Sequence[int], nodes: int = 8) -> list[int]:
    """The position in the answer after each round in which it is said, the draft checked against it."""
    search, at, ends = drafter(), 0, []
    seq = Seq(1, [1, 2, 3], 3, Sampling(), 0, prediction=prediction)
    while at < len(answer):
        paths = proposed(search, seq, nodes)
        right = max((len(path) for path in paths if list(path) == list(answer[at : at + len(path)])), default=0)
        new = list(answer[at : at + right + 1])
        seq.tokens += new
        at += len(new)
        ends.append(at)
    return ends


@pytest.mark.parametrize("edit", EDITS)
def test_it_is_found_again_behind_an_edit(edit: str) -> None:
    start, end, new = EDITS[edit]
    answer = [*FILE[:start], *new, *FILE[end:]]
    rounds = follow(FILE, answer)
    # 9 tokens a round where it is right; each new token can cost one round, and finding it again two
    assert len(rounds) <= len(answer) / 9 + len(new) + 3, rounds


def test_a_long_insertion_and_a_moved_part() -> None:
    inserted = [*FILE[:20], *(random.Random(6).randrange(50, 90) for _ in range(40)), *FILE[20:]]
    assert len(follow(FILE, inserted)) <= len(FILE) / 9 + 40 + 3
    moved = [*FILE[45:], *FILE[:45]]
    assert len(follow(FILE, moved)) <= len(FILE) / 9 + 8


def test_l60_right_predictions_save_forwards_and_wrong_ones_change_nothing() -> None:
    """Pain L60: asked for in several engines, built in none of them."""
    target = table_target()
    plain = run(target, NoDrafter(), [PROMPT], [GREEDY])[0].token_ids
    right = run(target, drafter(), [PROMPT], [replace(GREEDY, prediction=plain)], draft_tokens=8)[0]
    assert right.token_ids == plain and right.stats.rounds < len(plain) / 4
    drafted, accepted = right.stats.by_member["prediction"]
    assert (drafted, accepted) == (right.stats.drafted, right.stats.accepted) and accepted > 40
    for wrong in ([1] * 60, [(t + 1) % VOCAB for t in plain], plain[::-1], [plain[0]]):
        done = run(target, drafter(), [PROMPT], [replace(GREEDY, prediction=wrong)], draft_tokens=8)[0]
        assert done.token_ids == plain
        drafted, accepted = done.stats.by_member["prediction"]
        assert 0 <= accepted <= min(drafted, 20)


def test_each_request_has_its_own_prediction() -> None:
    target, texts = table_target(), [[3, 4], [5, 6, 7], [8]]
    plain = [done.token_ids for done in run(target, NoDrafter(), texts, [GREEDY] * 3)]
    how = [replace(GREEDY, prediction=tokens) for tokens in (plain[0], plain[1], None)]
    done = run(target, drafter(), texts, how, draft_tokens=8)
    assert [c.token_ids for c in done] == plain
    assert [c.stats.rounds < 15 for c in done] == [True, True, False] and done[2].stats.drafted == 0


def test_texts_and_refusals(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    llm = LLM(tmp_path, drafter="prediction+suffix", draft_tokens=8, max_context=160, threads=1)
    plain = llm.generate("hello", GREEDY)[0]
    done = llm.generate("hello", replace(GREEDY, prediction=plain.token_ids))[0]
    assert done.token_ids == plain.token_ids and done.stats.rounds < 20
    assert llm.generate("hello", replace(GREEDY, prediction="hello hello"))[0].token_ids == plain.token_ids
    with pytest.raises(ValueError, match=r"token id 99999 of the prediction is outside the vocabulary"):
        llm.generate("hello", replace(GREEDY, prediction=[99999]))
    with pytest.raises(ValueError, match="prediction must be a text or a list of token ids, not 5"):
        replace(GREEDY, prediction=5)
    with pytest.raises(ValueError, match="a prediction needs drafter 'prediction'"):
        LLM(tmp_path, drafter="ngram", max_context=160, threads=1).generate("hello", replace(GREEDY, prediction="a"))
