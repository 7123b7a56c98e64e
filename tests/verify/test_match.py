"""Rule `match`: hand-made forests, an independent walk, laziness, and equality of texts with plain decoding."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.sampling.noise import Purpose, gumbel
from foretell.sampling.shape import Shaper
from foretell.types import Drafts, Keys, Sampling, Seq
from foretell.verify import make_rule
from foretell.verify.match import Match
from tests.verify.exact import Table, decode, keys_of, make_seq

V = 7


class Fixed:
    """A law of given rows that notes what it was asked."""

    def __init__(self, logp: Tensor) -> None:
        self.logp = logp
        self.asked: list[list[int]] = []

    def __call__(self, rows: Sequence[int]) -> Tensor:
        self.asked.append(list(rows))
        return self.logp[list(rows)]


def one_hot_rows(tokens: Sequence[int]) -> Tensor:
    rows = torch.full((len(tokens), V), -torch.inf, dtype=torch.float64)
    rows[range(len(tokens)), list(tokens)] = 0.0
    return rows


def greedy(n: int) -> Keys:
    return Keys([0] * n, [0] * n, [0] * n, [0.0] * n)


def test_a_hand_made_forest() -> None:
    #   request 0: root -> 3, 5; 5 -> 1, 2; 2 -> 4        request 1: nothing        request 2: chain 6, 6
    drafts = Drafts.pack([([3, 5, 1, 2, 4], [-1, -1, 1, 1, 3]), ([], []), ([6, 6], [-1, 0])])
    law = Fixed(one_hot_rows([5, 0, 2, 0, 4, 1, 3, 6, 0, 0]))
    verdict = Match().verify(law, drafts, greedy(3))
    assert verdict.accepted == [[1, 3, 4], [], [0]]
    assert verdict.next_token == [1, 3, 0]
    assert law.asked == [[0, 6, 7], [2, 8], [4], [5]]  # only accepted paths, one call a level


def test_ties_of_the_target_go_to_the_lowest_id() -> None:
    verdict = Match().verify(Fixed(torch.zeros(1, V)), Drafts.chains([[]]), greedy(1))
    assert verdict.next_token == [0]


def test_no_requests() -> None:
    assert Match().verify(Fixed(torch.zeros(0, V)), Drafts.pack([]), greedy(0)).accepted == []


@pytest.mark.parametrize("seed", range(20))
def test_equals_an_independent_walk(seed: int) -> None:
    rng = random.Random(seed)
    trees = []
    for _ in range(4):
        n = rng.randrange(8)
        trees.append(([rng.randrange(V) for _ in range(n)], [rng.randrange(-1, i) for i in range(n)]))
    drafts = Drafts.pack(trees)
    logp = torch.randn(4 + drafts.tokens.numel(), V, generator=torch.Generator().manual_seed(seed)).double()
    keys = Keys([rng.randrange(2**64) for _ in range(4)], [9, 3, 0, 5], [0] * 4, [1.0, 0.7, 0.0, 1.0])
    verdict = Match().verify(Fixed(logp), drafts, keys)
    start = 0
    for b, (tokens, parents) in enumerate(trees):
        node, path = -1, []
        while True:
            row = logp[start + 1 + node].numpy()
            g = gumbel(keys.seed[b], Purpose.TARGET, keys.position[b] + len(path), 0, V)
            token = int(np.argmax(row + g * (keys.temperature[b] > 0)))
            hit = [i for i in range(len(tokens)) if parents[i] == node and tokens[i] == token]
            if not hit:
                break
            node = hit[0]
            path.append(node)
        assert (verdict.accepted[b], verdict.next_token[b]) == (path, token)
        start += len(tokens) + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.4])
def test_a_draft_equal_to_the_target_is_always_kept(temperature: float) -> None:
    """Pain C25: the coupled guess is the target's own token."""
    match = Match()
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(3))
    keys = Keys(list(range(40)), list(range(7, 47)), [0] * 40, [temperature] * 40)
    picks = match.draw(logits, keys, 1)
    seqs = [make_seq(Sampling(temperature=temperature), 0, [1], 50)] * 40
    drafts = Drafts.chains(picks.tokens.tolist())
    both = logits.repeat_interleave(2, 0)
    verdict = Match().verify(Shaper(both, drafts, seqs), drafts, keys)
    assert verdict.accepted == [[0]] * 40


def test_draw() -> None:
    match = Match()
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    keys = Keys([1, 1, 2], [4, 9, 4], [0, 7, 0], [0.0, 0.5, 1.0])
    picks = match.draw(logits, keys, 3)
    assert picks.q is None
    for i, temperature in enumerate(keys.temperature):
        logq = torch.log_softmax(logits[i] / (temperature or 1), 0)
        g = torch.from_numpy(gumbel(keys.seed[i], Purpose.TARGET, keys.position[i], 0, V))
        expected = torch.topk(logq + (g if temperature else 0), 3).indices
        assert picks.tokens[i].tolist() == expected.tolist()
        assert torch.allclose(picks.score[i], logq[expected])
    with pytest.raises(ValueError, match="8 different tokens"):
        match.draw(logits, keys, V + 1)


def test_noise_is_kept_within_bounds_and_never_changes() -> None:
    match = Match(noise_bytes=8 * V * 3)
    for position in [0, 1, 0, 2, 0, 3, 1, 1]:
        assert np.array_equal(match.noise(5, position, V), gumbel(5, Purpose.TARGET, position, 0, V))
        assert match.bytes == sum(a.nbytes for a in match.made.values()) <= match.noise_bytes
    assert list(match.made) == [(5, 0), (5, 3), (5, 1)]  # the least recently used went
    assert np.array_equal(match.noise(5, 3, 2), gumbel(5, Purpose.TARGET, 3, 0, 2))  # a smaller vocabulary: a prefix
    assert np.array_equal(match.noise(5, 3, V + 1), gumbel(5, Purpose.TARGET, 3, 0, V + 1))
    assert match.bytes == sum(a.nbytes for a in match.made.values())
    none = Match(noise_bytes=0)
    assert np.array_equal(none.noise(5, 3, V), gumbel(5, Purpose.TARGET, 3, 0, V))
    assert none.bytes == 0


def hostile(seed: int, table: Table):  # type: ignore[no-untyped-def]
    """Guesses well, badly, twice the same, and drops nodes by their value: all of it harmless under `match`."""
    rng = random.Random(seed)

    def draft(seq: Seq) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        for i in range(rng.randrange(9)):
            parent = rng.randrange(-1, i)
            above = [*seq.tokens, *([tokens[parent]] if parent >= 0 else [])]
            token = int(table.logits[above[-2], above[-1]].argmax()) if rng.random() < 0.7 else rng.randrange(V)
            tokens.append(token)
            parents.append(parent if parent < 0 or tokens[parent] != 2 else -1)
        return tokens, parents

    return draft


def coupled(match: Match, table: Table, depth: int, width: int):  # type: ignore[no-untyped-def]
    """A chain with side branches from the target's own logits, through the rule's draw."""

    def draft(seq: Seq) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        node, path = -1, list(seq.tokens)
        for d in range(depth):
            at = keys_of([seq])
            keys = Keys(at.seed, [at.position[0] + d], at.round, at.temperature)
            drawn = match.draw(table.logits[path[-2], path[-1]][None], keys, width).tokens[0].tolist()
            tokens += drawn
            parents += [node] * width
            node, path = len(tokens) - width, [*path, drawn[0]]
        return tokens, parents

    return draft


SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(),
    Sampling(temperature=0, repetition_penalty=1.4, frequency_penalty=0.3, min_tokens=6),
    Sampling(temperature=0.8, top_k=5, top_p=0.9, presence_penalty=0.7, logit_bias={3: 1.0, 5: -5.0}),
    Sampling(min_p=0.2, repetition_penalty=0.8, min_tokens=12),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("seed", range(3))
def test_texts_equal_plain_decoding(sampling: Sampling, seed: int) -> None:
    """For every drafter, alone or among strangers, to the token."""
    table = Table(seed, V, decimals=1)
    length = 25

    def seqs(n: int) -> list[Seq]:
        return [make_seq(SAMPLINGS[i - 1] if i else sampling, seed + 17 * i, [1, i], V) for i in range(n)]

    plain = decode(Match(), table, seqs(1), length, None)[0]
    match = Match()
    for n in (1, 4):
        for drafter in (hostile(seed, table), coupled(match, table, 3, 1), coupled(match, table, 2, 3)):
            mine = seqs(n)
            assert decode(match, table, mine, length, drafter)[0] == plain
    helped = seqs(1)
    decode(match, table, helped, length, coupled(match, table, 3, 1))
    if not sampling.penalised:
        assert helped[0].rounds < length / 1.5


@pytest.mark.parametrize("name", ["ratio", "block"])
def test_the_other_rules_are_plain_decoding_without_drafts_and_at_temperature_0(name: str) -> None:
    table = Table(2, V)
    for sampling in SAMPLINGS:
        plain = decode(Match(), table, [make_seq(sampling, 4, [1, 2], V)], 25, None)
        assert decode(make_rule(name), table, [make_seq(sampling, 4, [1, 2], V)], 25, None) == plain

    def chain(seq: Seq) -> tuple[list[int], list[int]]:
        a = int(table.logits[seq.tokens[-2], seq.tokens[-1]].argmax())
        return [a, int(table.logits[seq.tokens[-1], a].argmax()), seq.rounds % V], [-1, 0, 1]

    plain = decode(Match(), table, [make_seq(SAMPLINGS[0], 4, [1, 2], V)], 25, None)
    assert decode(make_rule(name), table, [make_seq(SAMPLINGS[0], 4, [1, 2], V)], 25, chain) == plain
