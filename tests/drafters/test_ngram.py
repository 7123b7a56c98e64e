"""Prompt lookup: the longest match wins, its latest occurrence is copied, and a round costs the same in a long text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from foretell.drafters.ngram import NgramDrafter
from foretell.types import Draw, Keys, Picks, Sampling, Seq
from tests.conftest import run, table_target


def undrawn(logits: Any, keys: Keys, k: int) -> Picks:
    raise AssertionError("this method draws nothing")


DRAW: Draw = undrawn


def make(tokens: list[int], id: int = 0) -> Seq:
    return Seq(id, list(tokens), len(tokens), Sampling(), 0)


def propose(drafter: NgramDrafter, seq: Seq, budget: int) -> list[int]:
    (tokens, parents), *_ = drafter.propose([seq], [budget], DRAW).trees()
    assert parents == list(range(-1, len(tokens) - 1)), "a chain"
    return tokens


def naive(tokens: list[int], most: int, least: int, budget: int) -> list[int]:
    """The same by trying every length and every place."""
    for n in range(most, least - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for i in range(end, end + budget):
                    text.append(text[i])
                return text[len(tokens) :]
    return []


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    tokens = [1, 2, 3, 7, 9, 9, 3, 8, 5, 1, 2, 3]
    assert propose(NgramDrafter(3), make(tokens), 1) == [7], "after 1 2 3, not after the later 3"
    assert propose(NgramDrafter(1), make(tokens), 1) == [8], "with 1-grams alone, after the later 3"


def test_the_latest_of_equal_matches_is_copied() -> None:
    assert propose(NgramDrafter(2), make([1, 2, 7, 1, 2, 8, 1, 2]), 1) == [8]


def test_no_match_is_no_draft() -> None:
    assert propose(NgramDrafter(), make([1, 2, 3]), 5) == []
    assert propose(NgramDrafter(min_ngram=2), make([1, 5, 1]), 5) == [], "a match of 1 is too short here"
    assert propose(NgramDrafter(), make([1]), 5) == []


@pytest.mark.parametrize("period", [[4], [4, 5], [4, 5, 6], [1, 2, 3, 4, 5]])
def test_periodic_text_is_continued_past_its_end(period: list[int]) -> None:
    """The copy goes on with itself: a loop is drafted to the whole budget, not up to the last token known."""
    tokens = [9, *period, *period]
    assert propose(NgramDrafter(), make(tokens), 12) == (period * 12)[:12]


@pytest.mark.parametrize(("most", "least"), [(0, 0), (3, 0), (1, 2), (-1, -1), (2, -1)])
def test_lengths_that_make_no_sense_are_refused(most: int, least: int) -> None:
    with pytest.raises(ValueError, match=f"min_ngram must be at least 1 and at most max_ngram, not {least} and {most}"):
        NgramDrafter(most, least)


@pytest.mark.parametrize(("most", "least"), [(3, 1), (5, 2), (2, 2)])
def test_growing_texts_against_a_search_of_every_place(most: int, least: int) -> None:
    """The index of a text that grows by several tokens a round, some of them without a budget, finds the same."""
    source, drafter, found = random.Random(4), NgramDrafter(most, least), 0
    for id in range(8):
        seq = make([source.randrange(4) for _ in range(source.randint(1, 6))], id)
        for _ in range(60):
            budget = source.choice([0, 1, 4, 9])
            drafted = propose(drafter, seq, budget)
            assert drafted == (naive(seq.tokens, most, least, budget) if budget else [])
            found += bool(drafted)
            seq.tokens += [source.randrange(4) for _ in range(source.randint(1, 4))]
        if id % 2:
            drafter.forget(seq)  # preempted: the index is made anew
            assert propose(drafter, seq, 3) == naive(seq.tokens, most, least, 3)
    assert found > 100


class Counting(dict[tuple[int, ...], int]):
    insertions = 0

    def __setitem__(self, key: tuple[int, ...], value: int) -> None:
        self.insertions += 1
        super().__setitem__(key, value)


def test_a_round_costs_the_same_in_a_long_text() -> None:
    """Pain A7: n-gram lookup lost half the speed at 16k tokens. Each token enters the index once."""
    costs = []
    for length in (100, 1000, 20000):
        seq, drafter = make([i * i % 251 for i in range(length)]), NgramDrafter(3)
        propose(drafter, seq, 4)
        index, done = drafter._lookup.known[seq.id]
        counting = Counting(index)
        drafter._lookup.known[seq.id] = (counting, done)
        for added in (1, 5, 3):
            seq.tokens += [7] * added
            propose(drafter, seq, 4)
        assert drafter._lookup.known[seq.id][0] is counting, "the index was made anew"
        costs.append(counting.insertions)
    assert costs == [3 * (1 + 5 + 3)] * 3


def test_repetition_is_accepted_by_a_target_that_repeats() -> None:
    """A greedy table target of memory 1 falls into a loop; lookup then has several tokens a round accepted."""
    target = table_target()
    target.table[1:] = 0  # only the last token counts
    done = run(target, NgramDrafter(), [[3, 4, 5]], [Sampling(temperature=0, max_tokens=60, ignore_eos=True)])[0]
    assert done.stats.tokens_per_round > 3 and done.stats.acceptance_rate > 0.8
