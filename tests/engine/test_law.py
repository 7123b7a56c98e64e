"""The law of what comes out of the whole engine: 3 tokens over a vocabulary of 8, against the exactly enumerated law
(pain C18). Statistics only complement the exact proofs in tests/verify: RUNS runs see what the walks alone cannot, that
rows, slots, the prefix cache and the seeds hand each law and each draw to the place it belongs to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from foretell.drafters.base import Drafter
from foretell.drafters.early_exit import EarlyExitDrafter
from foretell.drafters.member import MemberSource
from foretell.drafters.model import ModelDrafter
from foretell.drafters.recycling import RecyclingSource
from foretell.drafters.search import SearchDrafter
from foretell.engine.stats import Stats
from foretell.models.table import TableTarget
from foretell.planner.fixed import FixedPlanner
from foretell.types import Drafts, Keys, Law, Sampling, Seq, Verdict
from foretell.verify import Rule, make_rule
from foretell.verify.ratio import Ratio, proposal
from foretell.verify.rule import ROOT, Coins, Tree, Walk, drive, keyed_coins, plant, probabilities
from tests.play import Stage

VOCAB, TOKENS = 8, 3
RUNS = 2500  # of each case
PROMPT = [1, 5, 2, 6, 3, 7, 4, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]  # one page and a bit
SHAPE: dict[str, Any] = {
    "temperature": 5.0,
    "min_p": 0.2,
    "top_k": 6,
    "top_p": 0.95,
    "logit_bias": {1: 5.0, 6: -5.0},
}


class Deep(FixedPlanner):
    """Drafts beyond the end too, so that trees of 3 tokens are as deep and wide as any."""

    def budgets(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        return [seq.id % self.draft_tokens + 1 for seq in seqs]


@dataclass(frozen=True)
class Case:
    rule: str
    width: int = 1
    nodes: int = 4  # a request has 1 to so many
    shape: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()  # drafts come from these layers of the target; none: from another table


CASES = {
    "ratio, chains": Case("ratio"),
    "ratio, width 3": Case("ratio", width=3, nodes=7),
    "ratio, width 3, shaped": Case("ratio", width=3, nodes=7, shape=SHAPE),
    "block, chains": Case("block"),
    "match, width 3": Case("match", width=3, nodes=7),
    "ratio, own layers": Case("ratio", width=2, layers=(1, 2)),
    "block, own layers": Case("block", layers=(1, 2)),
}
UNSHARED = ["ratio, width 3", "block, chains"]  # without the prefix cache too


def table(seed: int) -> TableTarget:
    made = TableTarget(VOCAB, seed=seed, max_context=32)
    made.table *= 0.4  # softer, so that few of the 512 texts are too rare to count
    return made


def naive_law(logits: np.ndarray, shape: dict[str, Any]) -> np.ndarray:
    """[8] probabilities of the next token, one setting after the other."""
    logits = logits.copy()
    for token, bias in shape.get("logit_bias", {}).items():
        logits[token] += bias
    p = np.exp((logits - logits.max()) / shape.get("temperature", 1.0))
    p[p < shape.get("min_p", 0.0)] = 0
    order = np.argsort(-p, kind="stable")
    p[order[shape.get("top_k", VOCAB) :]] = 0
    p /= p.sum()
    before = np.concatenate(([0.0], np.cumsum(p[order])[:-1]))
    p[order[before >= shape.get("top_p", 1.0) + (0 if "top_p" in shape else 1)]] = 0
    return p / p.sum()


def enumerate_law(target: TableTarget, shape: dict[str, Any]) -> dict[tuple[int, ...], float]:
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for text, mass in laws.items():
            p = naive_law(target.logits([*PROMPT, *text]).numpy(), shape)
            longer |= {(*text, token): mass * float(p[token]) for token in range(VOCAB)}
        laws = longer
    assert abs(sum(laws.values()) - 1) < 1e-9
    return laws


def play(
    rule: Rule, case: Case, *, reuse: bool, runs: int = RUNS, drafter: Drafter | None = None
) -> tuple[Counter[tuple[int, ...]], Stats]:
    target = table(1)
    if case.layers:
        drafter = EarlyExitDrafter(target, case.layers, width=case.width)
    drafter = drafter or ModelDrafter(table(2), VOCAB, width=case.width)
    planner = Deep(case.nodes, target.max_context)
    stage = Stage(
        target, drafter, rule=rule, planner=planner, slots=125 * 32, max_batch=125, max_rows=4000, reuse=reuse
    )
    how = [Sampling(seed=7_000_000 + i, max_tokens=TOKENS, **case.shape) for i in range(runs)]
    done = stage.all([PROMPT] * runs, how)
    total = Stats.pooled(c.stats for c in done)
    assert (total.cached_tokens > 0) == reuse and total.accepted > runs / 4
    return Counter(tuple(c.token_ids) for c in done), total


def p_value(seen: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square; texts expected fewer than 5 times count together."""
    runs = seen.total()
    assert all(law[text] > 0 for text in seen), "a text that cannot be"
    cells: list[tuple[float, int]] = []
    rare = [0.0, 0]
    for text, mass in law.items():
        if mass * runs >= 5:
            cells.append((mass * runs, seen[text]))
        else:
            rare = [rare[0] + mass * runs, rare[1] + seen[text]]
    if rare[0] > 0:
        cells.append((rare[0], int(rare[1])))
    assert len(cells) > 20
    statistic = sum((count - wanted) ** 2 / wanted for wanted, count in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


@pytest.mark.parametrize(("name", "reuse"), [*((name, True) for name in CASES), *((name, False) for name in UNSHARED)])
def test_three_tokens_have_the_targets_law(name: str, reuse: bool) -> None:
    case = CASES[name]
    seen, _ = play(make_rule(case.rule), case, reuse=reuse)
    assert p_value(seen, enumerate_law(table(1), case.shape)) > 0.001


@pytest.mark.parametrize(("rule", "width"), [("ratio", None), ("block", 1)])
def test_what_a_mixture_takes_from_a_draft_model_keeps_the_law(rule: str, width: int | None) -> None:
    """The search leaves out what a member drew as it likes: that counts as guessed, not as drawn."""
    members = {"model": MemberSource(ModelDrafter(table(2), VOCAB)), "recycling": RecyclingSource(VOCAB)}
    drafter = SearchDrafter(members, width=width)
    seen, stats = play(make_rule(rule), Case(rule, nodes=5), reuse=True, drafter=drafter)
    assert p_value(seen, enumerate_law(table(1), {})) > 0.001
    assert min(stats.by_member[name][1] for name in members) > 100


class WithoutResidual(Ratio):
    """Draws anew from p after a rejection: the classical mistake."""

    def verify(self, law: Law, drafts: Drafts, keys: Keys) -> Verdict:
        walks = [self.walk(tree, coins) for tree, coins in zip(plant(drafts), keyed_coins(keys), strict=True)]
        return drive(walks, probabilities(law), drafts)

    def walk(self, tree: Tree, coins: Coins) -> Walk:
        path: list[int] = []
        node = ROOT
        while True:
            p = yield node
            siblings = tree.children[node]
            for number, child in enumerate(siblings):
                q, token = proposal(tree, siblings[:number], child), tree.tokens[child]
                assert q is not None
                if coins.accept(len(path), number, p[token] / q[token]):
                    path.append(child)
                    node = child
                    break
            else:
                return path, coins.choose(len(path), p, own=True)


@pytest.mark.parametrize("width", [1, 3])
def test_a_broken_residual_would_be_seen(width: int) -> None:
    case = Case("ratio", width=width)
    seen, _ = play(WithoutResidual(), case, reuse=True, runs=RUNS // 2)
    assert p_value(seen, enumerate_law(table(1), {})) < 1e-6


def test_the_draft_is_another_law() -> None:
    """The two tables differ enough that tokens of the draft's law could not pass for the target's."""
    ours, theirs = enumerate_law(table(1), {}), enumerate_law(table(2), {})
    texts = itertools.product(range(VOCAB), repeat=TOKENS)
    assert sum(abs(ours[text] - theirs[text]) for text in texts) / 2 > 0.5
