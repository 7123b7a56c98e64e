"""Losslessness by enumeration in Fractions: what a round emits, continued from p, has exactly the law p.

Each case runs over several random targets and drafts whose laws depend on the context and have impossible tokens.
"""

import random
from fractions import Fraction

import pytest

from foretell.verify import block, ratio
from foretell.verify.match import follow
from tests.verify.exact import (
    Draw,
    Grower,
    Model,
    Oracle,
    Path,
    distance,
    draw_distinct,
    draw_iid,
    draw_shared,
    enumerate_law,
    every_path,
    finish,
    grow,
    law,
    points,
    random_model,
)

SEEDS = range(4)


def models(seed: int, vocab: int) -> tuple[Model, Model]:
    return random_model(seed, vocab), random_model(seed + 1000, vocab)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("vocab", "gamma"), [(2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (4, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("walk", [ratio.walk, block.walk])
def test_chains(seed: int, vocab: int, gamma: int, walk: type) -> None:
    p, q = models(seed, vocab)

    def flow(oracle: Oracle) -> Path:
        tree = grow(oracle, q, [1] * gamma, draw_iid)
        return finish(walk(tree, oracle), tree, p)

    assert distance(enumerate_law(flow), p) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draw", [draw_iid, draw_distinct])
@pytest.mark.parametrize(
    ("vocab", "widths"), [(2, [2]), (3, [2]), (3, [3]), (5, [2]), (4, [3]), (2, [2, 2]), (3, [2, 1])]
)
def test_siblings_and_trees(seed: int, draw: Draw, vocab: int, widths: list[int]) -> None:
    p, q = models(seed, vocab)

    def flow(oracle: Oracle) -> Path:
        tree = grow(oracle, q, widths, draw)
        return finish(ratio.walk(tree, oracle), tree, p)

    assert distance(enumerate_law(flow), p) == 0


def test_a_two_level_tree_without_replacement() -> None:
    p, q = random_model(1, 3, zeros=False), random_model(2, 3, zeros=False)

    def flow(oracle: Oracle) -> Path:
        tree = grow(oracle, q, [2, 2], draw_distinct)
        return finish(ratio.walk(tree, oracle), tree, p)

    assert distance(enumerate_law(flow), p) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_all_tokens_as_siblings_leave_nothing_to_reject(seed: int) -> None:
    p, q = models(seed, 3)

    def flow(oracle: Oracle) -> Path:
        tree = grow(oracle, q, [3], draw_distinct)
        return finish(ratio.walk(tree, oracle), tree, p)

    assert all(len(text) == 2 for text in enumerate_law(flow))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("widths", [[2, 1], [1, 1], [2, 1, 1]])
def test_one_noise_for_all_nodes_of_a_depth(seed: int, widths: list[int]) -> None:
    """`rule.sample` gives nodes of one depth equal noise: fully coupled draws in different branches stay lossless."""
    m = 6
    p = random_model(seed, 3)
    cells: dict[Path, object] = {}

    def q(path: Path):  # type: ignore[no-untyped-def]  # laws in sixths, so that cells are exact
        rng = random.Random(f"{seed} {path} q")
        cuts = sorted(rng.randint(0, m) for _ in range(2))
        return cells.setdefault(path, law(cuts[0], cuts[1] - cuts[0], m - cuts[1]))

    def flow(oracle: Oracle) -> Path:
        grower = Grower(widths[0] > 1)
        level: list[tuple[int, Path]] = [(-1, ())]
        for depth, width in enumerate(widths):
            draw = draw_shared(m)(oracle) if width == 1 else draw_distinct
            following = []
            for node, path in level:
                grower.laws.append(q(path))
                for token in draw(oracle, q(path), width):
                    following.append((grower.add(node, token, len(grower.laws) - 1), (*path, token)))
            level = following
            assert depth < 3
        tree = grower.tree()
        return finish(ratio.walk(tree, oracle), tree, p)

    assert distance(enumerate_law(flow), p) == 0


TREES = [[], [(0,)], [(2,), (0,)], [(1, 1, 1)], [(0, 1), (0, 2), (1, 0)], [(2,), (1,), (0,)], list(every_path(3, 2))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("paths", TREES)
def test_point_masses(seed: int, paths: list[Path]) -> None:
    """No draft at all included. `match` on the very same trees, and block where they are chains."""
    p = random_model(seed, 3)
    tree = points(paths)

    def matched(oracle: Oracle) -> Path:
        return finish(follow(tree, lambda depth, row: oracle.choose(depth, row, True)), tree, p)

    flows = [lambda oracle: finish(ratio.walk(tree, oracle), tree, p), matched]
    if all(len(children) < 2 for children in tree.children):
        flows.append(lambda oracle: finish(block.walk(tree, oracle), tree, p))
    for flow in flows:
        outcomes = enumerate_law(flow)
        assert distance(outcomes, p) == 0
        if flow is matched:
            assert outcomes == enumerate_law(flows[0])  # for point masses the two rules are one


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pattern", ["dp", "pd", "dpd", "pdp", "ddp"])
@pytest.mark.parametrize("walk", [ratio.walk, block.walk])
def test_drawn_and_point_nodes_along_one_chain(seed: int, pattern: str, walk: type) -> None:
    p, q = models(seed, 3)

    def flow(oracle: Oracle) -> Path:
        grower, node, path = Grower(False), -1, ()
        for kind in pattern:
            if kind == "d":
                grower.laws.append(q(path))
                token, row = oracle.categorical(list(q(path))), len(grower.laws) - 1
            else:
                token, row = sum(path) % 3, -1  # may depend on what was drawn before
            node, path = grower.add(node, token, row), (*path, token)
        tree = grower.tree()
        return finish(walk(tree, oracle), tree, p)

    assert distance(enumerate_law(flow), p) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("order", ["pdd", "dpd", "ddp", "dep", "ded"])
def test_drawn_and_point_siblings(seed: int, distinct: bool, order: str) -> None:
    """p: a token fixed by the siblings before it; d: from one q; e: from another q, drawn apart."""
    p, q = models(seed, 4)
    laws = [q(()), q((9,))]

    def flow(oracle: Oracle) -> Path:
        grower = Grower(distinct)
        grower.laws = laws
        taken: dict[int, list[int]] = {0: [], 1: []}
        for kind in order:
            if kind == "p":
                grower.add(-1, (2 + sum(grower.tokens)) % 4)
                continue
            row = "de".index(kind)
            left = [0 if distinct and i in taken[row] else w for i, w in enumerate(laws[row])]
            token = oracle.categorical(left) if any(left) else min(set(range(4)) - set(taken[row]))
            taken[row].append(token)
            grower.add(-1, token, row)
        tree = grower.tree()
        return finish(ratio.walk(tree, oracle), tree, p)

    assert distance(enumerate_law(flow), p) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("walk", [ratio.walk, block.walk])
def test_a_chain_may_end_after_a_token_it_has_read(seed: int, walk: type) -> None:
    """Legal: keep the node and draft nothing below it. (Dropping the node itself is mutant 4.)"""
    p, q = models(seed, 3)

    def flow(oracle: Oracle) -> Path:
        tree = grow(oracle, q, [1, 1, 1], draw_iid, stop=lambda path: path[-1:] == (0,) or path == (2, 1))
        return finish(walk(tree, oracle), tree, p)

    assert distance(enumerate_law(flow), p) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("walk", [ratio.walk, block.walk])
def test_greedy_is_greedy(seed: int, walk: type) -> None:
    """The target a point everywhere: only its own text comes out, whatever law the drafts have."""
    soft, q = models(seed, 3)

    def p(path: Path):  # type: ignore[no-untyped-def]
        best = int(soft(path).argmax())
        return law(*(int(i == best) for i in range(3)))

    def flow(oracle: Oracle) -> Path:
        tree = grow(oracle, q, [1, 1, 1], draw_iid)
        return finish(walk(tree, oracle), tree, p)

    assert distance(enumerate_law(flow), p) == 0


def mean_length(walk: type, p: Model, q: Model, gamma: int) -> Fraction:
    def flow(oracle: Oracle) -> Path:
        tree = grow(oracle, q, [1] * gamma, draw_iid)
        return finish(walk(tree, oracle), tree, p)

    return sum((chance * len(text) for text, chance in enumerate_law(flow).items()), start=Fraction(0))


@pytest.mark.parametrize("walk", [ratio.walk, block.walk])
def test_a_draft_equal_to_the_target_is_always_kept(walk: type) -> None:
    """Pain C25: at temperature 1, draft == target, acceptance is exactly 1."""
    for seed in SEEDS:
        p = random_model(seed, 3)
        assert mean_length(walk, p, p, 3) == 4


def test_block_is_never_shorter_than_ratio() -> None:
    """Pain C25, on 20 random pairs; somewhere it must be longer."""
    gains = []
    for seed in range(20):
        p, q = models(seed, 2 + seed % 2)
        gains.append(mean_length(block.walk, p, q, 3) - mean_length(ratio.walk, p, q, 3))
    assert min(gains) >= 0
    assert max(gains) > 0
