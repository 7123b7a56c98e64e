"""Names, draws, and the doors of the rules that keep q."""

import numpy as np
import pytest
import torch

from foretell.sampling.noise import Purpose, gumbel, uniform
from foretell.sampling.shape import Shaper
from foretell.types import Drafts, Drawn, Keys, Sampling
from foretell.verify import RULES, make_rule, ratio
from foretell.verify.block import Block
from foretell.verify.match import Match
from foretell.verify.ratio import Ratio
from foretell.verify.rule import KeyedCoins, probabilities
from tests.verify.exact import make_seq

V = 9


def test_names() -> None:
    assert RULES == {"match": Match, "ratio": Ratio, "block": Block}
    for name, cls in RULES.items():
        assert isinstance(make_rule(name), cls)
        assert make_rule(name).lossless
    with pytest.raises(ValueError, match="no rule 'typical': choose one of match, ratio, block"):
        make_rule("typical")


@pytest.mark.parametrize("name", ["ratio", "block"])
def test_the_q_handed_over_is_the_q_drawn_from(name: str) -> None:
    """Pain C19: temperature is in q; an argmax comes with a point mass."""
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(1))
    keys = Keys([1, 2, 3, 3], [5, 6, 7, 7], [0, 1, 2, 3], [1.0, 0.5, 0.0, 2.0])
    picks = make_rule(name).draw(logits, keys, 1)
    assert picks.q is not None
    assert picks.q.dtype == torch.float64
    for i, temperature in enumerate(keys.temperature):
        logq = torch.log_softmax(logits[i].double() / (temperature or 1), 0)
        token = int(picks.tokens[i, 0])
        if temperature == 0:
            assert token == int(logits[i].argmax())
            assert picks.q[i].tolist() == [float(t == token) for t in range(V)]
        else:
            g = gumbel(keys.seed[i], Purpose.DRAFT, keys.position[i], keys.round[i], V)
            assert torch.allclose(picks.q[i], logq.exp(), atol=1e-15)
            assert token == int((logq + torch.from_numpy(g)).argmax())
        assert picks.score[i, 0].item() == pytest.approx(logq[token].item())


def test_draws_without_replacement_come_in_the_order_of_drawing() -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(2))
    keys = Keys([1], [5], [0], [1.0])
    picks = Ratio().draw(logits, keys, V)
    noisy = torch.log_softmax(logits[0].double(), 0) + torch.from_numpy(gumbel(1, Purpose.DRAFT, 5, 0, V))
    assert picks.tokens[0].tolist() == noisy.argsort(descending=True).tolist()
    firsts = [Ratio().draw(logits, Keys([s], [5], [0], [1.0]), 2).tokens[0].tolist() for s in range(4000)]
    q = torch.softmax(logits[0].double(), 0)
    pairs = np.zeros((V, V))
    for a, b in firsts:
        pairs[a, b] += 1
    expected = q[:, None] * q[None] / (1 - q[:, None]) * (1 - torch.eye(V))
    assert abs(pairs / 4000 - expected.numpy()).max() < 0.03


def test_all_greedy_rows_have_no_q() -> None:
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(2))
    for k in (1, 3):
        picks = Ratio().draw(logits, Keys([1, 1], [5, 6], [0, 0], [0.0, 0.0]), k)
        assert picks.q is None
        assert picks.tokens.tolist() == torch.topk(logits, k).indices.tolist()


def test_more_draws_than_the_law_has_tokens() -> None:
    """Beyond its support nothing is drawn: the rest are tested as point masses."""
    logits = torch.full((1, V), -torch.inf)
    logits[0, 4], logits[0, 6] = 1.0, -900.0  # the second rounds to 0 in q
    picks = Ratio().draw(logits, Keys([1], [5], [0], [1.0]), 3)
    assert picks.tokens[0, 0] == 4
    assert picks.q is not None
    assert picks.q[0, 6] == 0
    assert len(set(picks.tokens[0].tolist())) == 3
    drafts = Drafts.pack([(picks.tokens[0].tolist(), [-1] * 3)])
    drawn = Drawn(picks.q, torch.zeros(3, dtype=torch.int32), True)
    drafts = Drafts(drafts.indptr, drafts.tokens, drafts.parents, drawn)
    target = torch.full((4, V), -torch.inf)
    target[:, int(picks.tokens[0, 2])] = 0.0
    verdict = Ratio().verify(
        Shaper(target, drafts, [make_seq(Sampling(), 1, [1], V)]), drafts, Keys([1], [5], [0], [1.0])
    )
    assert verdict.accepted == [[2]]


def test_bad_asks() -> None:
    logits, keys = torch.zeros(1, V), Keys([1], [5], [0], [1.0])
    with pytest.raises(ValueError, match="10 different tokens"):
        Ratio().draw(logits, keys, V + 1)
    with pytest.raises(ValueError, match="draws 1 token at a time, not 2"):
        Block().draw(logits, keys, 2)
    tree = Drafts.pack([([1], [-1]), ([1, 2], [-1, -1])])
    with pytest.raises(ValueError, match="rule 'block' verifies chains"):
        Block().verify(lambda rows: torch.zeros(len(rows), V), tree, Keys([1] * 2, [5] * 2, [0] * 2, [1.0] * 2))


@pytest.mark.parametrize("name", ["ratio", "block"])
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_q_that_did_not_draw_the_token_is_refused(name: str, value: float) -> None:
    q = torch.full((1, V), 1 / (V - 1), dtype=torch.float64)
    q[0, 3] = value
    drawn = Drawn(q, torch.zeros(1, dtype=torch.int32), False)
    drafts = Drafts.chains([[3]])
    drafts = Drafts(drafts.indptr, drafts.tokens, drafts.parents, drawn)
    with pytest.raises(ValueError, match="drafted token 3 has no probability under the q"):
        make_rule(name).verify(lambda rows: torch.zeros(len(rows), V), drafts, Keys([1], [5], [0], [1.0]))


def test_coins() -> None:
    coins = KeyedCoins(seed=4, position=10, round=3, temperature=0.7)
    u = uniform(4, Purpose.ACCEPT, 12, 3, 3)
    for number in range(3):
        assert not coins.accept(2, number, u[number])  # below, not at
        assert coins.accept(2, number, np.nextafter(u[number], 1))
    assert all(coins.accept(d, 0, 1.0) and not coins.accept(d, 0, 0.0) for d in range(50))
    weights = np.array([0.0, 0.2, 0.0, 0.5, 0.3])
    own = gumbel(4, Purpose.TARGET, 10, 0, 5)
    residual = gumbel(4, Purpose.RESIDUAL, 10, 3, 5)
    with np.errstate(divide="ignore"):
        assert coins.choose(0, weights, own=True) == (np.log(weights) + own).argmax()
        assert coins.choose(0, weights, own=False) == (np.log(weights) + residual).argmax()
    assert KeyedCoins(4, 10, 3, 0.0).choose(0, weights, own=True) == 3


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("name", ["ratio", "block"])
def test_a_draft_equal_to_the_target_is_always_kept_by_the_tensor_code(name: str, temperature: float) -> None:
    """Pain C25: p and q are computed alike, so the ratio is 1 to the bit and no coin can fall badly."""
    logits = torch.randn(30, 501, generator=torch.Generator().manual_seed(3)) * 4
    keys = Keys(list(range(30)), [7] * 30, [0] * 30, [temperature] * 30)
    picks = make_rule(name).draw(logits, keys, 1)
    assert picks.q is not None
    chains = Drafts.chains(picks.tokens.tolist())
    drafts = Drafts(
        chains.indptr, chains.tokens, chains.parents, Drawn(picks.q, torch.arange(30, dtype=torch.int32), False)
    )
    seqs = [make_seq(Sampling(temperature=temperature), 0, [1], 501)] * 30
    law = Shaper(logits.repeat_interleave(2, 0), drafts, seqs)
    assert torch.equal(probabilities(law)(range(0, 60, 2)), picks.q)
    assert make_rule(name).verify(law, drafts, keys).accepted == [[0]] * 30


def test_a_residual_that_rounds_away_leaves_p() -> None:
    p = np.array([0.25, 0.75])
    assert ratio.residual(p, p, 1) is p
    assert ratio.residual(np.array([0.0, 1.0]), None, 1).tolist() == [0.0, 1.0]
    assert ratio.residual(p, np.array([0.5, 0.5]), 0).tolist() == [0.0, 1.0]
