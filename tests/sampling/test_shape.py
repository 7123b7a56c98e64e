"""The target's law against a naive version in plain Python, and its promises: lazy, per row, stable under ties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foretell.sampling.shape import Shaper, best_ids, nucleus_size, top_logprobs
from foretell.types import Drafts, Sampling, Seq
from tests.sampling.naive import naive

V = 12


def make_seq(sampling: Sampling, prompt: list[int], output: list[int], stop: list[int], vocab: int = V) -> Seq:
    counts = None
    if sampling.penalised:
        counts = torch.zeros(2, vocab)
        for row, tokens in enumerate((prompt, output)):
            for token in tokens:
                counts[row, token] += 1
    return Seq(5, prompt + output, len(prompt), sampling, 1, frozenset(stop), counts=counts)


def probabilities(row: torch.Tensor) -> list[float]:
    assert row.dtype == torch.float64
    assert row.max() == 0
    return torch.softmax(row, 0).tolist()


ids = st.integers(0, V - 1)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 7, V, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.2, 0.01, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.8, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.3]),
    logit_bias=st.one_of(st.none(), st.dictionaries(ids, st.sampled_from([5.0, -5.0, -math.inf, 0.25]), max_size=4)),
    min_tokens=st.sampled_from([0, 0, 3]),
)
values = st.one_of(st.floats(-8, 8, width=16), st.integers(-2, 2).map(float))  # the second kind ties


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_equals_the_naive_version_along_tree_paths(data: st.DataObject, dtype: torch.dtype) -> None:
    batch, trees, cases = data.draw(st.integers(1, 3)), [], []
    for _ in range(batch):
        n = data.draw(st.integers(0, 4))
        trees.append(([data.draw(ids) for _ in range(n)], [data.draw(st.integers(-1, i - 1)) for i in range(n)]))
        lists = st.lists(ids, max_size=4)
        cases.append((data.draw(samplings), [3, *data.draw(lists)], data.draw(lists), [0, 7]))
    drafts = Drafts.pack(trees)
    rows = batch + drafts.tokens.numel()
    logits = torch.tensor([[data.draw(values) for _ in range(V)] for _ in range(rows)], dtype=dtype)
    seqs = [make_seq(*case) for case in cases]
    law = Shaper(logits, drafts, seqs)
    out = law(range(rows))
    at = 0
    for (tokens, parents), (sampling, prompt, output, stop) in zip(trees, cases, strict=True):
        for node in range(-1, len(tokens)):
            path, up = [], node
            while up >= 0:
                path.append(tokens[up])
                up = parents[up]
            expected, edge = naive(logits[at].tolist(), sampling, prompt, output + path[::-1], stop)
            assume(not edge)
            got = probabilities(out[at])
            assert got == pytest.approx(expected, abs=1e-12)
            assert [p > 0 for p in got] == [p > 0 for p in expected]
            assert torch.equal(law([at])[0], out[at])  # to the bit, alone or among others
            at += 1
    assert torch.equal(law(range(rows - 1, -1, -1)), out.flip(0))


def test_nothing_is_shaped_but_what_is_asked() -> None:
    logits = torch.full((4, V), math.nan)
    logits[2] = torch.arange(V)
    law = Shaper(logits, Drafts.chains([[1], [2]]), [make_seq(Sampling(), [1], [], [])] * 2)
    assert law([2]).shape == (1, V)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-300, 5e-324])
def test_small_temperatures_are_a_point_at_the_best(temperature: float) -> None:
    logits = torch.tensor([[1.0, 30.0, 29.0, -math.inf]])
    law = Shaper(logits, Drafts.chains([[]]), [make_seq(Sampling(temperature=temperature), [1], [], [])])
    assert probabilities(law([0])[0]) == [0, 1, 0, 0]


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 2.0, 0.0]])
    for sampling, support in [
        (Sampling(temperature=0), [1]),
        (Sampling(top_k=2), [1, 2]),
        (Sampling(top_p=0.3), [1, 2]),
        (Sampling(min_p=1.0), [1, 2, 3, 4]),
        (Sampling(min_p=1.0, top_p=0.5), [1, 2]),  # the mass before the third is exactly the half: it goes
        (Sampling(top_k=3, top_p=0.6), [1, 2]),
    ]:
        row = Shaper(logits, Drafts.chains([[]]), [make_seq(sampling, [1], [], [], 6)])([0])[0]
        assert torch.nonzero(row > -math.inf).flatten().tolist() == support, sampling


def test_min_p_and_bias_of_the_field_bug() -> None:
    """vLLM #42744, #38202: min_p or a bias refused or applied to bonus tokens only; here they hold at every row."""
    sampling = Sampling(min_p=0.2, logit_bias={0: 5.0, 2: -5.0})
    logits = torch.tensor([[0.0, 5.0, 5.0, 3.0], [0.0, 5.0, 5.0, 4.0]])
    out = Shaper(logits, Drafts.chains([[1]]), [make_seq(sampling, [1], [], [])])(range(2))
    assert (out > -math.inf).tolist() == [[True, True, False, False], [True, True, False, True]]


def test_min_tokens_counts_the_path() -> None:
    seq = make_seq(Sampling(temperature=0, min_tokens=3), [1, 2], [4], [0])
    logits = torch.zeros(4, V)
    logits[:, 0] = 9.0
    logits[:, 5] = 1.0
    out = Shaper(logits, Drafts.chains([[6, 7, 8]]), [seq])(range(4))
    assert out.argmax(1).tolist() == [5, 5, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_raise(bad: float, temperature: float) -> None:
    logits = torch.zeros(1, V)
    logits[0, 3] = bad
    with pytest.raises(FloatingPointError, match="request 5"):
        Shaper(logits, Drafts.chains([[]]), [make_seq(Sampling(temperature=temperature), [1], [], [0])])([0])


def test_a_row_without_a_token_ends_the_text_or_raises() -> None:
    everything = {i: -math.inf for i in range(V)}
    logits = torch.zeros(1, V)
    none = Drafts.chains([[]])
    banned = Sampling(logit_bias=everything)
    assert probabilities(Shaper(logits, none, [make_seq(banned, [1], [], [9, 4])])([0])[0])[4] == 1
    waiting = Sampling(min_tokens=2, logit_bias={i: -math.inf for i in range(V) if i != 4})
    assert probabilities(Shaper(logits, none, [make_seq(waiting, [1], [], [4])])([0])[0])[4] == 1
    with pytest.raises(FloatingPointError, match="no token"):
        Shaper(logits, none, [make_seq(banned, [1], [], [])])([0])
    with pytest.raises(FloatingPointError, match="no token"):
        Shaper(logits - math.inf, none, [make_seq(Sampling(), [1], [], [4])])([0])


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 12.0])
def test_the_short_way_to_the_nucleus_is_the_long_way(scale: float) -> None:
    rng = np.random.default_rng(int(scale * 10))
    for rounding in (1, 12):
        x = np.round(rng.normal(size=5000) * scale, rounding)
        x -= x.max()
        for top_p in (1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999, 1 - 1e-12, 1 - 2**-53):
            sizes = {nucleus_size(x, top_p, head) for head in (1, 16, 1024, 4999, 5000, 9000)}
            assert len(sizes) == 1
            ordered = np.exp(x[np.argsort(-x, kind="stable")])
            before = np.concatenate([[0.0], np.cumsum(ordered)[:-1]])
            assert abs(sizes.pop() - np.count_nonzero(before < top_p * ordered.sum())) <= (top_p > 0.99999)


def test_rounding_never_asks_for_more_than_all() -> None:
    """A running sum may end a rounding below the sum; then all are kept, not one more."""
    for seed in range(200):
        x = np.random.default_rng(seed).normal(size=100)
        assert nucleus_size(x - x.max(), 1 - 2**-53, 100) <= 100


def test_best_ids() -> None:
    x = np.array([1.0, 3.0, 2.0, 3.0, -math.inf, 2.0])
    assert [best_ids(x, k).tolist() for k in (1, 2, 3, 4)] == [[1], [1, 3], [1, 3, 2], [1, 3, 2, 5]]
    assert best_ids(x, 6).tolist() == [1, 3, 2, 5, 0, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_logprobs(dtype: torch.dtype) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = torch.log_softmax(logits.double(), 0)
    own, top = top_logprobs(logits, 7, 5)
    assert own == pytest.approx(expected[7].item(), rel=1e-6)
    assert own == float(np.float32(own))
    order = sorted(range(50), key=lambda i: (-logits[i].item(), i))[:5]
    assert [i for i, _ in top] == order
    assert [p for _, p in top] == pytest.approx([expected[i].item() for i in order], rel=1e-6)
    assert top_logprobs(logits, 7, 0)[1] == []
    assert len(top_logprobs(logits, 7, 99)[1]) == 50
