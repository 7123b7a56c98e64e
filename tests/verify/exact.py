"""The checkers of this folder: an exact one for laws, an equality one for texts. The mutants must fail them.

Exact: a whole round, drafting included, is a function of an `Oracle`. `enumerate_law` runs it once for every way its
random decisions can fall and adds up probabilities as Fractions. The code under test is the production walk, fed with
arrays of Fractions.
Equality: `decode` is the engine in small, over a table of logits, run through the tensor code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foretell.sampling.shape import Shaper
from foretell.types import Drafts, Keys, Sampling, Seq
from foretell.verify.rule import Rule, Tree, Walk

Array = NDArray[Any]
Model = Callable[[tuple[int, ...]], Array]  # context -> law, object array [V] of Fraction
Path = tuple[int, ...]


# ---------------------------------------------------------------- exact


def law(*weights: int | Fraction) -> Array:
    """The law in proportion to the weights."""
    total = sum(Fraction(w) for w in weights)
    return np.array([Fraction(w) / total for w in weights], dtype=object)


def random_model(seed: int, vocab: int, *, zeros: bool = True) -> Model:
    """A law for every context, some tokens impossible."""
    made: dict[Path, Array] = {}

    def model(context: Path) -> Array:
        if context not in made:
            rng = random.Random(f"{seed} {context}")
            weights = [rng.randint(0 if zeros else 1, 5) for _ in range(vocab)]
            weights[rng.randrange(vocab)] += 1
            made[context] = law(*weights)
        return made[context]

    return model


class Oracle:
    """Follows a script of decisions, then takes the first outcome of each further one and notes the others."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.at = 0
        self.weight = Fraction(1)
        self.others: list[list[int]] = []

    def categorical(self, weights: Sequence[Any]) -> int:
        if self.at == len(self.script):
            possible = [i for i, w in enumerate(weights) if w]
            self.others += [self.script + [i] for i in possible[1:]]
            self.script.append(possible[0])
        choice = self.script[self.at]
        self.at += 1
        self.weight *= Fraction(weights[choice]) / sum(weights)
        return choice

    # the two methods of `rule.Coins`

    def accept(self, depth: int, number: int, chance: Any) -> bool:
        chance = min(Fraction(1), Fraction(chance))
        return self.categorical([1 - chance, chance]) == 1

    def choose(self, depth: int, weights: Array, own: bool) -> int:
        return self.categorical(list(weights))


Flow = Callable[[Oracle], Path]  # one round: -> the tokens it emits


def enumerate_law(flow: Flow) -> dict[Path, Fraction]:
    scripts: list[list[int]] = [[]]
    outcomes: dict[Path, Fraction] = {}
    while scripts:
        oracle = Oracle(scripts.pop())
        emitted = flow(oracle)
        outcomes[emitted] = outcomes.get(emitted, Fraction(0)) + oracle.weight
        scripts += oracle.others
    assert sum(outcomes.values()) == 1
    return outcomes


def distance(outcomes: dict[Path, Fraction], p: Model) -> Fraction:
    """Total variation between p and what is emitted, continued from p to one length: 0 is losslessness."""
    vocab, length = len(p(())), max(map(len, outcomes))
    total = Fraction(0)
    for text in product(range(vocab), repeat=length):
        emitted = Fraction(0)
        for n in range(1, length + 1):
            if text[:n] in outcomes:
                emitted += outcomes[text[:n]] * chance(p, text, n)
        total += abs(emitted - chance(p, text, 0))
    return total / 2


def chance(p: Model, text: Path, start: int) -> Fraction:
    return prod((p(text[:i])[text[i]] for i in range(start, len(text))), start=Fraction(1))


def finish(walk: Walk, tree: Tree, p: Model) -> Path:
    """Feed the walk with p and return what the round emits."""
    paths: dict[int, Path] = {-1: ()}
    for node in range(len(tree.tokens)):
        parent = next(i for i in range(-1, node) if node in tree.children[i])
        paths[node] = (*paths[parent], tree.tokens[node])
    node = next(walk)
    while True:
        try:
            node = walk.send(p(paths[node]))
        except StopIteration as end:
            accepted, token = end.value
            assert list(accepted) == [] or paths[accepted[-1]] == tuple(tree.tokens[i] for i in accepted)
            return (*(tree.tokens[i] for i in accepted), token)


class Grower:
    """Grows one tree level by level with the oracle's draws; keeps what `Drawn` would hold."""

    def __init__(self, distinct: bool) -> None:
        self.tokens: list[int] = []
        self.children: list[list[int]] = [[]]
        self.row: list[int] = []
        self.laws: list[Array] = []
        self.distinct = distinct

    def add(self, parent: int, token: int, row: int = -1) -> int:
        node = len(self.tokens)
        self.children[parent].append(node)
        self.children.insert(node, [])  # the root's stays last
        self.tokens.append(token)
        self.row.append(row)
        return node

    def tree(self) -> Tree:
        return Tree(self.tokens, self.children, self.row, self.laws, self.distinct)


Draw = Callable[[Oracle, Array, int], list[int]]


def draw_iid(oracle: Oracle, q: Array, k: int) -> list[int]:
    return [oracle.categorical(list(q)) for _ in range(k)]


def draw_distinct(oracle: Oracle, q: Array, k: int) -> list[int]:
    """Without replacement; once q is exhausted the lowest ids left, as the tensor code may give."""
    drawn: list[int] = []
    for _ in range(k):
        left = [Fraction(0) if i in drawn else w for i, w in enumerate(q)]
        drawn.append(oracle.categorical(left) if any(left) else min(set(range(len(q))) - set(drawn)))
    return drawn


def draw_shared(m: int) -> Callable[[Oracle], Draw]:
    """All of one depth from one uniform cell of m: the coupling that equal noise makes. One token per node."""

    def for_level(oracle: Oracle) -> Draw:
        cell = oracle.categorical([1] * m)
        return lambda _, q, k: [inverse(q, cell, m)] * k

    return for_level


def inverse(weights: Array, cell: int, m: int) -> int:
    """Inverse cumulative law at the middle of the cell."""
    target, running = (cell + Fraction(1, 2)) / m * sum(weights), Fraction(0)
    for i, w in enumerate(weights):
        running += w
        if target < running:
            return i
    raise AssertionError("unreachable")


def grow(
    oracle: Oracle, q: Model, widths: Sequence[int], draw: Draw, stop: Callable[[Path], bool] | None = None
) -> Tree:
    """Every node gets widths[depth] children from its own law; stop: no children below that path."""
    grower = Grower(draw is draw_distinct)
    level: list[tuple[int, Path]] = [(-1, ())]
    for width in widths:
        following = []
        for node, path in level:
            if stop is not None and stop(path):
                continue
            grower.laws.append(q(path))
            for token in draw(oracle, q(path), width):
                following.append((grower.add(node, token, len(grower.laws) - 1), (*path, token)))
        level = following
    return grower.tree()


def points(paths: Sequence[Path]) -> Tree:
    """A fixed tree of point masses through these paths."""
    grower = Grower(False)
    nodes: dict[Path, int] = {(): -1}
    for path in paths:
        for i in range(1, len(path) + 1):
            if path[:i] not in nodes:
                nodes[path[:i]] = grower.add(nodes[path[: i - 1]], path[i - 1])
    return grower.tree()


def every_path(vocab: int, length: int) -> Iterator[Path]:
    return product(range(vocab), repeat=length)


# ---------------------------------------------------------------- equality

Drafter = Callable[[Seq], tuple[list[int], list[int]]]  # -> tokens, parents


class Table:
    """A target whose logits are a table of the last two tokens."""

    def __init__(self, seed: int, vocab: int, spread: float = 2.0, decimals: int = 6) -> None:
        made = torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.logits = (made * spread).round(decimals=decimals)  # few decimals: ties
        self.vocab = vocab

    def rows(self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[torch.Tensor]:
        paths = {-1: list(context)}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            paths[node] = [*paths[parent], token]
        return [self.logits[path[-2], path[-1]] for path in paths.values()]


def make_seq(sampling: Sampling, seed: int, prompt: Sequence[int], vocab: int, id: int = 0) -> Seq:
    counts = torch.zeros(2, vocab) if sampling.penalised else None
    if counts is not None:
        for token in prompt:
            counts[0, token] += 1
    return Seq(id, list(prompt), len(prompt), sampling, seed, frozenset([0]), counts=counts)


def commit(seq: Seq, tokens: Sequence[int]) -> None:
    seq.tokens += tokens
    seq.rounds += 1
    if seq.counts is not None:
        for token in tokens:
            seq.counts[1, token] += 1


def keys_of(seqs: Sequence[Seq]) -> Keys:
    return Keys(
        [s.seed for s in seqs],
        [len(s.tokens) for s in seqs],
        [s.rounds for s in seqs],
        [s.sampling.temperature for s in seqs],
    )


def decode(
    rule: Rule, table: Table, seqs: Sequence[Seq], length: int, drafter: Drafter | None, shaper: type[Shaper] = Shaper
) -> list[list[int]]:
    """Generate `length` tokens for each; no drafter is plain decoding."""
    while going := [s for s in seqs if s.generated < length]:
        trees = [drafter(s) if drafter else ([], []) for s in going]
        drafts = Drafts.pack(trees)
        logits = [row for s, tree in zip(going, trees, strict=True) for row in table.rows(s.tokens, *tree)]
        verdict = rule.verify(shaper(torch.stack(logits), drafts, going), drafts, keys_of(going))
        for seq, (tokens, _), accepted, token in zip(going, trees, verdict.accepted, verdict.next_token, strict=True):
            commit(seq, [*(tokens[i] for i in accepted), token])
    return [s.tokens[s.prompt_len :][:length] for s in seqs]
