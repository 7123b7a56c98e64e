"""The window and its pool: what rides, what is harvested, what it finds, and that nothing grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from foretell.drafters import lookahead
from foretell.drafters.base import NoDrafter
from foretell.drafters.lookahead import LookaheadSource, Pool
from foretell.drafters.search import Guess, SearchDrafter, Source
from foretell.models.table import TableTarget
from foretell.types import Sampling, Seen, Seq
from tests.conftest import CONTEXT, VOCAB, run, table_target

Next = Callable[[list[int]], int]


class Saying(TableTarget):
    """Says what a function of the text says, whatever that is."""

    def __init__(self, following: Next, max_context: int = CONTEXT) -> None:
        super().__init__(VOCAB, max_context=max_context)
        self.following = following

    def logits(self, tokens: list[int]) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(self.following(tokens)), VOCAB).double()


def ring(tokens: list[int]) -> int:
    """A circle of twelve tokens, 10 to 21; others lead into it."""
    return 10 + (tokens[-1] * 5 + 7) % 12 if tokens[-1] < 10 else 10 + (tokens[-1] - 10 + 5) % 12


def fibonacci(tokens: list[int]) -> int:
    """Sums of two: twelve tokens long, and one token does not tell the next."""
    return (tokens[-1] + tokens[-2]) % 8 if len(tokens) > 1 else 1


def text(tokens: list[int], id: int = 1) -> Seq:
    return Seq(id, tokens, len(tokens), Sampling(), 0)


def greedy(count: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=count, ignore_eos=True)


class Diary(LookaheadSource):
    """Notes what rode and what was harvested."""

    def __init__(self, *args: int, prompt: bool = False) -> None:
        super().__init__(*args, prompt=prompt)
        self.rode: list[tuple[list[int], list[int], list[int]]] = []
        self.harvest: list[list[tuple[int, ...]]] = []

    def riders(self, seq: Seq, room: int) -> tuple[list[int], list[int]]:
        tokens, parents = super().riders(seq, room)
        self.rode.append((list(seq.tokens), tokens, parents))
        return tokens, parents

    def observe(self, seen: Seen) -> None:
        columns = [list(column) for column in self._windows[seen.seqs[0].id].columns] if self._windows else []
        riding = self._windows[seen.seqs[0].id].riding if self._windows else 0
        super().observe(seen)
        if riding:
            after = self._windows[seen.seqs[0].id].columns[:riding]
            self.harvest.append([(*a, b[-1]) for a, b in zip(columns, after, strict=False)])


def test_the_window_is_a_comb_behind_the_root() -> None:
    """Columns 0 to 3 of three tokens each, the root being the first of column 0: entry (r, t) sees the chain up to its
    column, then its column down to itself."""
    source = LookaheadSource(4, 4)
    seq = text([1, 2, 3, 4, 5, 6, 7, 8, 9])
    tokens, parents = source.riders(seq, 40)
    columns = source._windows[1].columns
    assert len(tokens) == source.rows == 4 * 3 - 1 and columns[0][0] == 9
    for number, column in enumerate(columns):
        for row, token in enumerate(column):
            if (row, number) != (0, 0):
                entry = row * 4 + number - 1  # its index: rows of four, the root left out
                seen = []
                while entry >= 0:
                    seen.append(tokens[entry])
                    entry = parents[entry]
                expected = [c[0] for c in columns[1 : number + 1]] + column[1 : row + 1]
                assert seen[::-1] == expected and seen[0] == token


@pytest.mark.parametrize(("window", "level"), [(5, 3), (3, 2), (4, 4), (1, 2), (1, 3), (0, 3)])
def test_nodes_and_riders_share_one_budget(window: int, level: int) -> None:
    for room in range(40):
        source = LookaheadSource(window, level)
        tokens, parents = source.riders(text([1, 2, 3]), room)
        assert len(tokens) == len(parents) <= min(source.rows, max(0, room - 1)), "a node at least has room"
        assert room < source.rows + level - 1 or len(tokens) == source.rows, "all ride where there is room"
        assert all(-1 <= parent < i for i, parent in enumerate(parents))
    assert SearchDrafter({"lookahead": source}).draft_tokens == SearchDrafter.draft_tokens + source.rows


@pytest.mark.parametrize("shape", [(5, 3), (3, 2), (4, 5), (2, 3), (1, 2)])
def test_an_n_gram_is_what_the_target_said_there(shape: tuple[int, int]) -> None:
    """On a target that looks at the whole text: the last token of every harvested n-gram is the target's own after the
    text, the chain and the column that rode, whatever was accepted in between."""
    target = table_target()
    source = Diary(*shape, prompt=True)
    run(target, SearchDrafter({"lookahead": source}), [[3, 4, 5] * 3], [greedy(50)], draft_tokens=source.rows + 4)
    checked = 0
    for (before, tokens, _), harvest in zip(source.rode, source.harvest, strict=False):
        count = len(harvest)
        chain = tokens[: count - 1]
        for number, gram in enumerate(harvest):
            told = [*before, *chain[:number], *gram[1:-1]]
            assert gram[0] == (before[-1] if number == 0 else chain[number - 1])
            assert gram[-1] == int(target.logits(told).argmax())
            checked += 1
    assert checked > 10


def test_columns_move_on_as_the_text_does() -> None:
    """A column that stays rides with its tokens one further on: its second token becomes its first, and the target's
    comes behind. Where k tokens were accepted, the first k columns are gone."""
    source = Diary(6, 3)
    run(Saying(ring), SearchDrafter({"lookahead": source}), [[1, 2, 3, 4]], [greedy(40)], draft_tokens=source.rows + 2)
    moved = 0
    for (before, _, _), harvest, (after, tokens, _) in zip(source.rode, source.harvest, source.rode[1:], strict=False):
        accepted = len(after) - len(before) - 1
        stayed = [gram[1:] for gram in harvest[accepted:]]
        if tokens:
            count = (len(tokens) + 1) // 2
            now = list(zip([after[-1], *tokens[: count - 1]], tokens[count - 1 :], strict=True))
            assert [column[1:] for column in now][: len(stayed)] == [column[1:] for column in stayed][:count]
            assert now[1 : len(stayed)] == stayed[1:count]
            moved += len(stayed)
    assert moved > 10


@pytest.mark.parametrize("level", [2, 3, 4])
def test_columns_reach_the_fixed_point(level: int) -> None:
    """Where one token tells the next, a column is the target's own text after as many rounds as it has tokens."""
    source = Diary(4, level)
    run(Saying(ring), SearchDrafter({"lookahead": source}), [[1, 2, 3, 4]], [greedy(60)], draft_tokens=source.rows + 3)
    grams = {(first, *rest) for harvest in source.harvest for first, *rest in harvest}
    assert all(gram[-1] == ring([gram[-2]]) for gram in grams)
    settled = [gram for gram in grams if all(b == ring([a]) for a, b in zip(gram, gram[1:], strict=False))]
    assert len(settled) >= 12


@pytest.mark.parametrize(("following", "level"), [(ring, 2), (ring, 3), (ring, 4), (fibonacci, 3), (fibonacci, 4)])
def test_a_period_that_the_prompt_does_not_show_is_found(following: Next, level: int) -> None:
    """After some rounds of looking every node is right; with the window off nothing ever is."""
    prompt = [1, 2, 3] if following is ring else [1, 1]
    target, nodes = Saying(following, 400), 6
    on, off = LookaheadSource(5, level), LookaheadSource(0, level)
    found, lost = (
        run(target, SearchDrafter({"lookahead": source}), [prompt], [greedy(200)], draft_tokens=nodes + source.rows)[0]
        for source in (on, off)
    )
    assert found.token_ids == lost.token_ids
    warm = 16  # rounds, at most, in which the pool fills
    assert found.stats.rounds <= warm + 200 / (nodes + 1), f"{found.stats.rounds} rounds"
    assert lost.stats.rounds == 200


def test_runs_repeat() -> None:
    def rounds() -> list[tuple[int, int, int]]:
        drafter = SearchDrafter({"lookahead": LookaheadSource(3, 3)})
        done = run(table_target(), drafter, [[3, 4], [5, 6, 7]], [Sampling(seed=1, max_tokens=40)] * 2)
        return [(c.stats.rounds, c.stats.drafted, c.stats.riders) for c in done]

    assert rounds() == rounds()


def test_the_pool_keeps_the_latest() -> None:
    pool = Pool(2)
    for rest in [(1, 2), (3, 4), (1, 2), (5, 6)]:
        pool.add(9, rest)
    assert pool.after([9]) == [(5, 6), (1, 2)], "3 4 was seen longest ago"
    assert pool.after([9, 1]) == [(2,)] and pool.after([9, 3]) == [] == pool.after([8])


def test_the_longest_agreement_guesses_first_and_each_token_once() -> None:
    source = LookaheadSource(0, 3, prompt=True)
    view = source.view(text([1, 2, 3, 7, 2, 4, 1, 2]))
    # of 1 2: 3, the longest; of 2: 4 was seen last, 3 is known
    assert view.guesses(()) == [(3, 2), (4, 0)]
    assert view.guesses((3,)) == [(7, 2)] and view.guesses((9,)) == []
    assert source.kinds[2] > source.kinds[0] > source.kinds[1]
    assert LookaheadSource(0, 3, prompt=False).view(text([1, 2, 3, 1, 2])).guesses(()) == []


def test_nothing_grows_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "KEYS", 10)
    source = LookaheadSource(3, 3, 2)
    sizes = []

    class Sizes(SearchDrafter):
        def observe(self, seen: Seen) -> None:
            super().observe(seen)
            for window in source._windows.values():
                grams = [len(grams) for grams in window.pool.grams.values()]
                sizes.append((len(window.columns), len(grams), max(grams)))

    run(TableTarget(VOCAB, max_context=400), Sizes({"lookahead": source}), [[3, 4]], [greedy(300)], draft_tokens=9)
    assert max(size[0] for size in sizes) <= 3 and max(size[1] for size in sizes) == 10
    assert max(size[2] for size in sizes) == 2 and not source._windows


class Rider(Source):
    """Rides a chain of its own and checks the logits it is shown."""

    kinds = (0.5,)

    def __init__(self, target: TableTarget, chain: Sequence[int]) -> None:
        self.target, self.chain, self.checked = target, list(chain), 0
        self.texts: dict[int, list[int]] = {}

    def view(self, seq: Seq) -> Rider:
        return self

    def guesses(self, path: tuple[int, ...]) -> list[Guess]:
        return [(1 + len(path), 0)]

    def riders(self, seq: Seq, room: int) -> tuple[list[int], list[int]]:
        chain = self.chain[: room // 3]
        self.texts[seq.id] = [*seq.tokens, *chain]
        return chain, list(range(-1, len(chain) - 1))

    def observe(self, seen: Seen) -> None:
        for seq, lines in zip(seen.seqs, seen.riders, strict=True):
            for i, line in enumerate(reversed(lines)):
                told = self.texts[seq.id]
                assert (seen.logits[line] == self.target.logits(told[: len(told) - i])).all()
                self.checked += 1


def test_several_sources_that_ride_each_see_their_own() -> None:
    target = table_target()
    sources = [Rider(target, [7, 8]), LookaheadSource(2, 3), Rider(target, [9, 10, 11])]
    texts = [[3, 4], [5, 6, 7], [8]]
    done = run(
        target,
        SearchDrafter(dict(zip("abc", sources, strict=True))),
        texts,
        [greedy(12)] * 3,
        draft_tokens=12,
        max_rows=4,
    )
    plain = run(target, NoDrafter(), texts, [greedy(12)] * 3)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert sources[0].checked > 20 and sources[2].checked > 10  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", [(-1, 3, 7), (5, 1, 7), (5, 3, 0)])
def test_settings_that_mean_nothing_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="window of at least 0, a level of at least 2 and at least 1 guess"):
        LookaheadSource(*wrong)
