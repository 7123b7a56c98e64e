"""Pain C18 and C20: three tokens over a vocabulary of 8, through the tensor code, against the law of a naive shaper.

Exactness is proved in test_exact.py; this ties the tensors, the keyed noise and the shaping to it: chi-square over all
512 texts, fixed seeds, p-value above 0.001. The controls show that the very test sees broken rules.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from foretell.sampling.shape import Shaper
from foretell.types import Drafts, Drawn, Keys, Sampling, Seq
from foretell.verify import make_rule, ratio
from foretell.verify.rule import Rule
from tests.sampling.naive import naive
from tests.verify.exact import commit, keys_of, make_seq

V, LENGTH, RUNS = 8, 3, 2000
made = torch.Generator().manual_seed(11)
P = torch.randn(V, V, generator=made) * 1.5
Q = P + torch.randn(V, V, generator=made)


def draft(rule: Rule, seqs: Sequence[Seq], widths: Sequence[int]) -> Drafts:
    """Every node widths[depth] children from the draft's table; what a drafter with logits does."""
    base = keys_of(seqs)
    tokens: list[list[int]] = [[] for _ in seqs]
    parents: list[list[int]] = [[] for _ in seqs]
    rows: list[list[int]] = [[] for _ in seqs]
    laws: list[torch.Tensor] = []
    level = [(b, -1, seq.tokens[-1]) for b, seq in enumerate(seqs)]
    for depth, width in enumerate(widths):
        owner = [b for b, _, _ in level]
        keys = Keys(
            [base.seed[b] for b in owner],
            [base.position[b] + depth for b in owner],
            [base.round[b] for b in owner],
            [base.temperature[b] for b in owner],
        )
        picks = rule.draw(Q[[last for _, _, last in level]], keys, width)
        offset = sum(map(len, laws))
        if picks.q is not None:
            laws.append(picks.q)
        following = []
        for i, (b, node, _) in enumerate(level):
            for token in picks.tokens[i].tolist():
                tokens[b].append(token)
                parents[b].append(node)
                rows[b].append(offset + i)
                following.append((b, len(tokens[b]) - 1, token))
        level = following
    packed = Drafts.pack(list(zip(tokens, parents, strict=True)))
    if not laws:
        return packed
    row = torch.tensor([r for share in rows for r in share], dtype=torch.int32)
    return Drafts(packed.indptr, packed.tokens, packed.parents, Drawn(torch.cat(laws), row, max(widths) > 1))


def texts(rule: Rule, sampling: Sampling, widths: Sequence[int], first_seed: int, runs: int = RUNS) -> np.ndarray:
    """int64 [V^LENGTH], how often each text came."""
    seqs = [make_seq(sampling, first_seed + i, [2, 5], V) for i in range(runs)]
    while going := [s for s in seqs if s.generated < LENGTH]:
        drafts = draft(rule, going, widths)
        last = [x for s, (tokens, _) in zip(going, drafts.trees(), strict=True) for x in (s.tokens[-1], *tokens)]
        verdict = rule.verify(Shaper(P[last], drafts, going), drafts, keys_of(going))
        for seq, (tokens, _), accepted, token in zip(
            going, drafts.trees(), verdict.accepted, verdict.next_token, strict=True
        ):
            commit(seq, [*(tokens[i] for i in accepted), token])
    codes = [int("".join(map(str, s.tokens[2 : 2 + LENGTH])), V) for s in seqs]
    return np.bincount(codes, minlength=V**LENGTH)


def expected(sampling: Sampling) -> np.ndarray:
    law = np.zeros([V] * LENGTH)
    for a, pa in enumerate(naive(P[5].tolist(), sampling, [2, 5], [], [0])[0]):
        for b, pb in enumerate(naive(P[a].tolist(), sampling, [2, 5], [a], [0])[0]):
            law[a, b] = pa * pb * np.array(naive(P[b].tolist(), sampling, [2, 5], [a, b], [0])[0])
    return law.ravel()


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    assert not counts[law == 0].any()
    wanted = law * counts.sum()
    rare = wanted < 6
    observed, wanted = np.append(counts[~rare], counts[rare].sum()), np.append(wanted[~rare], wanted[rare].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(stats.chisquare(observed, wanted).pvalue)


PLAIN = Sampling()
SHAPED = [
    Sampling(min_p=0.2, logit_bias={1: 5.0, 4: -5.0}),
    Sampling(temperature=0.7, top_k=3),
    Sampling(temperature=1.3, top_p=0.8, repetition_penalty=1.3, presence_penalty=0.4, min_tokens=2),
]
CASES = [
    *[("ratio", PLAIN, widths) for widths in ([1], [1, 1], [1, 1, 1], [1, 1, 1, 1], [4], [2, 2])],
    *[("ratio", shaped, widths) for shaped, widths in zip(SHAPED, ([2, 1], [1, 1], [1, 1]), strict=True)],
    *[("block", sampling, [1, 1]) for sampling in (PLAIN, SHAPED[0])],
    ("match", SHAPED[2], [2, 1]),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_texts_have_the_law_of_the_target(case: int) -> None:
    name, sampling, widths = CASES[case]
    counts = texts(make_rule(name), sampling, widths, 1_000_000 * (case + 1))
    assert p_value(counts, expected(sampling)) > 0.001


def test_control_a_broken_residual_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratio, "residual", lambda rest, q, token: rest)
    assert p_value(texts(make_rule("ratio"), PLAIN, [1, 1], 5), expected(PLAIN)) < 1e-9


def test_control_a_draft_that_ignores_the_temperature_is_seen() -> None:
    """Pain C19 (dflash #74): drawn as at temperature 1, tested as if at 0.5."""

    class Deaf(ratio.Ratio):
        def draw(self, logits, keys, k):  # type: ignore[no-untyped-def]
            ones = Keys(keys.seed, keys.position, keys.round, [1.0] * len(keys.seed))
            picks = super().draw(logits, ones, k)
            picks.q.copy_(torch.softmax(logits.double() / 0.5, -1))
            return picks

    sampling = Sampling(temperature=0.5)
    assert p_value(texts(Deaf(), sampling, [1, 1], 5), expected(sampling)) < 1e-9
