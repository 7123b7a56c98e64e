"""The eleven losslessness bugs of the field, each written on purpose: the checkers of the positive tests must catch it.

Numbers are the rows of the survey's table. Rows 1-8 change a law: `exact.distance` from p must be above 0. Rows 9-11
change texts: `exact.decode` must differ from plain decoding. Row 10 (a copied loop that drifts) was in the wild a draft
cache one token too long; what it does to texts is here, what it does to caches is for the tests of kv/ and engine/.
Each mutant stands beside the same flow unbroken, so that it is the bug that is caught and not the flow.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib import import_module

import numpy as np
import pytest
import torch

from foretell.sampling.shape import Shaper
from foretell.types import Drafts, Keys, Sampling, Seq
from foretell.verify import block, make_rule, ratio
from foretell.verify.match import Match, follow
from foretell.verify.rule import Tree, Walk
from tests.verify.exact import (
    Array,
    Flow,
    Grower,
    Oracle,
    Path,
    Table,
    commit,
    decode,
    distance,
    draw_distinct,
    draw_iid,
    enumerate_law,
    finish,
    inverse,
    keys_of,
    law,
    make_seq,
    points,
    random_model,
)

P = law(10, 5, 3, 2)
Q = law(1, 4, 3, 2)


def target(path: Path) -> Array:
    return P


def error(flow: Flow, p: Callable[[Path], Array] = target) -> Fraction:
    return distance(enumerate_law(flow), p)


def one(tokens: Sequence[int], q: Array | None, distinct: bool = False) -> Tree:
    """Siblings at the root, drawn from q or point masses."""
    grower = Grower(distinct)
    grower.laws = [] if q is None else [q]
    for token in tokens:
        grower.add(-1, token, -1 if q is None else 0)
    return grower.tree()


def verified(tree: Tree, oracle: Oracle, p: Callable[[Path], Array] = target) -> Path:
    return finish(ratio.walk(tree, oracle), tree, p)


@pytest.mark.parametrize("shared", [False, True])
def test_1_draft_and_residual_share_noise(shared: bool) -> None:
    """vLLM #47386, #54282."""
    p, q = law(4, 4, 1, 1), law(1, 1, 4, 4)

    def flow(oracle: Oracle) -> Path:
        cell = oracle.categorical([1] * 10)

        class Shared(Oracle):
            def __init__(self) -> None: ...

            def accept(self, depth: int, number: int, chance: Fraction) -> bool:
                return oracle.accept(depth, number, chance)

            def choose(self, depth: int, weights: Array, own: bool) -> int:
                if shared and not own:
                    return inverse(weights, cell, 10)
                return oracle.choose(depth, weights, own)

        tree = one([inverse(q, cell, 10)], q)
        return finish(ratio.walk(tree, Shared()), tree, lambda path: p)

    assert (error(flow, lambda path: p) > 0) == shared


@pytest.mark.parametrize("broken", [False, True])
def test_2_q_is_not_the_q_sampled_from(broken: bool) -> None:
    """transformers #47932: drawn from the top 2, tested with all of q."""
    top = law(0, 4, 3, 0)
    assert (error(lambda o: verified(one(draw_iid(o, top, 1), Q if broken else top), o)) > 0) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_3_a_deterministic_choice_tested_as_a_draw(broken: bool) -> None:
    """apple/ml-recurrent-drafter #6: the mode of q."""
    wrong = error(lambda o: verified(one([1], Q if broken else None), o))
    assert wrong == (Fraction(3, 8) if broken else 0)  # the survey's figure


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("walk", [ratio.walk, block.walk])
def test_4_a_draw_dropped_for_its_own_value(broken: bool, walk: Callable[..., Walk]) -> None:
    """A confidence threshold that reads the token it decides about: q(x) below 1/4."""

    def flow(oracle: Oracle) -> Path:
        token = draw_iid(oracle, Q, 1)
        tree = one([] if broken and Q[token[0]] < Fraction(1, 4) else token, Q)
        return finish(walk(tree, oracle), tree, target)

    assert (error(flow) > 0) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_5_a_draw_dropped_because_p_forbids_it(broken: bool) -> None:
    """A grammar's trim before verification, the flow of vLLM #48197."""
    allowed = law(2, 1, 0, 0)

    def flow(oracle: Oracle) -> Path:
        token = draw_iid(oracle, Q, 1)
        return verified(one([] if broken and not allowed[token[0]] else token, Q), oracle, lambda path: allowed)

    assert (error(flow, lambda path: allowed) > 0) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_6_the_target_sampled_again_after_a_mismatch(broken: bool) -> None:
    """romsto's n-gram loop."""

    def flow(oracle: Oracle) -> Path:
        tree = points([(1,)])
        text = finish(follow(tree, lambda depth, p: oracle.choose(depth, p, True)), tree, target)
        return (oracle.categorical(list(P)),) if broken and len(text) == 1 else text

    wrong = error(flow)
    assert wrong == (Fraction(3, 16) if broken else 0)  # the survey's figure


@pytest.mark.parametrize("broken", [False, True])
def test_7_a_shared_prefix_sampled_once_per_path(broken: bool) -> None:
    """Medusa's nucleus mode: two paths through token 1, the longest match kept."""

    def flow(oracle: Oracle) -> Path:
        if not broken:
            tree = points([(1, 0), (1, 2)])
            return finish(follow(tree, lambda depth, p: oracle.choose(depth, p, True)), tree, target)
        draws = [[oracle.categorical(list(P)) for _ in range(3)] for _ in range(2)]
        best: Path = ()
        for path, drawn in zip([(1, 0), (1, 2)], draws, strict=True):
            n = next((i for i in range(2) if path[i] != drawn[i]), 2)
            text = (*path[:n], drawn[n])
            best = text if len(text) > len(best) else best
        return best

    assert (error(flow) > 0) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_8_siblings_tested_against_the_whole_q(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """TV 0.002 in the survey's example: no Monte Carlo run would see it."""
    p, q = law(6, 5, 4, 3, 2), law(2, 2, 5, 6, 5)
    if broken:
        monkeypatch.setattr(ratio, "proposal", lambda tree, earlier, child: tree.laws[tree.row[child]])
    wrong = error(lambda o: verified(one(draw_distinct(o, q, 2), q, True), o, lambda path: p), lambda path: p)
    assert (0 < wrong < Fraction(1, 100)) if broken else wrong == 0


@pytest.mark.parametrize("broken", [False, True])
def test_8_equal_draws_merged_before_the_test(broken: bool) -> None:
    p, q = law(6, 5, 4, 3, 2), law(2, 2, 5, 6, 5)

    def flow(oracle: Oracle) -> Path:
        tokens = draw_iid(oracle, q, 2)
        return verified(one(list(dict.fromkeys(tokens)) if broken else tokens, q), oracle, lambda path: p)

    assert (error(flow, lambda path: p) > 0) == broken


# Further slips in the walks themselves


@pytest.mark.parametrize("walk", [ratio.walk, block.walk])
def test_a_wrong_residual(walk: Callable[..., Walk], monkeypatch: pytest.MonkeyPatch) -> None:
    module = ratio if walk is ratio.walk else block
    monkeypatch.setattr(module, "excess", lambda p, q, token: p)

    def flow(oracle: Oracle) -> Path:
        tree = one(draw_iid(oracle, Q, 1), Q)
        return finish(walk(tree, oracle), tree, target)

    assert error(flow) > 0


def test_block_with_wrong_chances() -> None:
    p, q = random_model(0, 3), random_model(1000, 3)

    class Shortened(Oracle):
        def __init__(self, oracle: Oracle) -> None:
            self.oracle = oracle

        def accept(self, depth: int, number: int, chance: Fraction) -> bool:
            return self.oracle.accept(depth, number, chance / 2)

        def choose(self, depth: int, weights: Array, own: bool) -> int:
            return self.oracle.choose(depth, weights, own)

    def flow(oracle: Oracle) -> Path:
        grower = Grower(False)
        node, path = -1, ()
        for _ in range(2):
            grower.laws.append(q(path))
            token = oracle.categorical(list(q(path)))
            node, path = grower.add(node, token, len(grower.laws) - 1), (*path, token)
        tree = grower.tree()
        return finish(block.walk(tree, Shortened(oracle)), tree, p)

    assert error(flow, p) > 0


# Rows 9-11: texts

V = 6
TABLE = Table(3, V)
LENGTH = 30


def best_chain(seq: Seq) -> tuple[list[int], list[int]]:
    context, tokens = list(seq.tokens), []
    for _ in range(3):
        tokens.append(int(TABLE.logits[context[-2], context[-1]].argmax()))
        context.append(tokens[-1])
    return tokens, [-1, 0, 1]


def seqs(sampling: Sampling, n: int = 1) -> list[Seq]:
    return [make_seq(sampling, 40 + i, [1, i], V) for i in range(n)]


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, repetition_penalty=1.5),
        Sampling(presence_penalty=2.0),
        Sampling(temperature=0.5, frequency_penalty=0.5),
        Sampling(temperature=0, min_tokens=2, logit_bias={0: 9.0}),
    ],
)
def test_9_penalties_from_before_the_drafts(broken: bool, sampling: Sampling) -> None:
    """SGLang's *relaxed* penalties: one state per request, not per row. The drafts are the text itself."""

    class Relaxed(Shaper):
        def path(self, b: int, node: int) -> list[int]:
            return []

    plain = decode(Match(), TABLE, seqs(sampling, 6), LENGTH, None)

    def perfect(seq: Seq) -> tuple[list[int], list[int]]:
        tokens = plain[seq.seed - 40][seq.generated : seq.generated + 3]
        return tokens, list(range(-1, len(tokens) - 1))

    text = decode(Match(), TABLE, seqs(sampling, 6), LENGTH, perfect, Relaxed if broken else Shaper)
    assert (text != plain) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_10_a_copied_loop_that_drifts(broken: bool) -> None:
    """lucidrains: the slice that drops what was rejected has no effect in the copy, so a token too many stays."""
    sampling = Sampling()
    match, (seq,) = Match(), seqs(sampling)
    context = list(seq.tokens)
    while seq.generated < LENGTH:
        tokens, parents = best_chain(seq)
        drafts = Drafts.pack([(tokens, parents)])
        law = Shaper(torch.stack(TABLE.rows(context, tokens, parents)), drafts, [seq])
        verdict = match.verify(law, drafts, keys_of([seq]))
        accepted = verdict.accepted[0]
        commit(seq, [*(tokens[i] for i in accepted), verdict.next_token[0]])
        stale = tokens[len(accepted)] if broken and len(accepted) < len(tokens) else verdict.next_token[0]
        context = [*seq.tokens[:-1], stale]
    plain = decode(Match(), TABLE, seqs(sampling), LENGTH, None)[0]
    assert (seq.tokens[2 : 2 + LENGTH] != plain) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_11_one_generator_for_all_requests(broken: bool) -> None:
    """EAGLE, mini-sglang, SGLang: a request's tokens depend on its neighbours, and drafts move them."""

    class Global(Match):
        def __init__(self) -> None:
            super().__init__()
            self.generator = np.random.Generator(np.random.Philox(1))

        def noise(self, seed: int, position: int, n: int) -> Array:
            return self.generator.gumbel(size=n)

    def fresh() -> Match:
        return Global() if broken else Match()

    alone = decode(fresh(), TABLE, seqs(Sampling()), LENGTH, None)[0]
    among = decode(fresh(), TABLE, seqs(Sampling(), 5), LENGTH, best_chain)[0]
    assert (alone != among) == broken


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("name", ["ratio", "block"])
def test_11_for_the_rules_that_keep_q(broken: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken:
        generator = np.random.Generator(np.random.Philox(1))
        module = import_module("foretell.verify.rule")
        monkeypatch.setattr(module, "uniform", lambda *key: generator.random(key[-1]))
        monkeypatch.setattr(module, "gumbel", lambda *key: generator.gumbel(size=key[-1]))
    alone = decode(make_rule(name), TABLE, seqs(Sampling()), LENGTH, best_chain)[0]
    among = decode(make_rule(name), TABLE, seqs(Sampling(), 5), LENGTH, best_chain)[0]
    assert (alone != among) == broken


def test_drafts_drawn_under_ratio_do_not_depend_on_neighbours() -> None:
    """Equal seeds at equal positions in one batch are no reason to draw otherwise."""
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    one_row = make_rule("ratio").draw(logits, Keys([4], [9], [2], [1.0]), 3)
    four = make_rule("ratio").draw(logits.repeat(4, 1), Keys([4] * 4, [9] * 4, [2] * 4, [1.0] * 4), 3)
    assert all(torch.equal(row, one_row.tokens[0]) for row in four.tokens)
