"""Riders: rows computed beside the drafts for the drafter's sake. They have rows, slots and logits, and no say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foretell.drafters.base import Drafter, NoDrafter
from foretell.drafters.model import ModelDrafter
from foretell.drafters.recycling import RecyclingSource
from foretell.drafters.search import SearchDrafter
from foretell.engine.rows import build_rows, lines
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.planner.fixed import FixedPlanner
from foretell.types import Drafts, Draw, Drawn, Plan, Sampling, Seen, Seq
from tests.conftest import VOCAB, RidingDrafter, run, table_target, tiny_llama
from tests.engine.test_invariance import MODES, TARGETS, prompts
from tests.models.drive import Driver
from tests.play import Stage


class WithRiders(Drafter):
    """Another drafter's drafts, and behind them what `riders` says: (tokens so far, nodes) -> tokens, parents."""

    def __init__(self, inner: Drafter, riders: RidingDrafter, most: int = 5) -> None:
        self.inner, self.riders, self.most = inner, riders, most

    def attach(self, cache: Cache) -> None:
        self.inner.attach(cache)

    def admit(self, seq: Seq) -> None:
        self.inner.admit(seq)

    def forget(self, seq: Seq) -> None:
        self.inner.forget(seq)

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        inner = self.inner.propose(seqs, [max(0, n - self.most) for n in budget], draw)
        trees, rows, riders = inner.trees(), [], []
        laws = inner.drawn.row.split(inner.indptr.diff().tolist()) if inner.drawn else [torch.empty(0)] * len(trees)
        for (tokens, parents), n, law in zip(trees, budget, laws, strict=True):
            riders.append(min(self.most, n))
            rows += [*law.tolist(), *[-1] * riders[-1]]
            for _ in range(riders[-1]):
                parents.append(self.riders.random.randrange(-1, len(tokens)))
                tokens.append(self.riders.random.randrange(VOCAB))
        drawn = inner.drawn and Drawn(inner.drawn.q, torch.tensor(rows, dtype=torch.int32), inner.drawn.distinct)
        return Drafts.pack(trees, drawn, riders)


class Prophet(Drafter):
    """Rides the right tokens, as a chain, beside `wrong` nodes that are not the target's."""

    def __init__(self, known: Sequence[int], wrong: int) -> None:
        self.known, self.wrong = known, wrong

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        trees, riders = [], []
        for seq, n in zip(seqs, budget, strict=True):
            future = list(self.known[len(seq.tokens) :])[: max(0, n - self.wrong)]
            nodes = [(self.known[len(seq.tokens)] + 1) % VOCAB] * min(self.wrong, n)
            riders.append(len(future))
            chain = [-1, *range(len(nodes), len(nodes) + len(future))][: len(future)]
            trees.append((nodes + future, [-1] * len(nodes) + chain))
        return Drafts.pack(trees, riders=riders)


def test_judged_drafts_are_the_nodes_alone() -> None:
    q = torch.full((3, 4), 0.25, dtype=torch.float64)
    trees = [([5, 6, 7], [-1, 0, 1]), ([], []), ([8, 9], [-1, -1]), ([3], [-1])]
    drawn = Drawn(q, torch.tensor([0, 1, -1, -1, -1, 2], dtype=torch.int32), distinct=True)
    drafts = Drafts.pack(trees, drawn, riders=[1, 0, 2, 0])
    nodes = drafts.judged()
    assert nodes.trees() == [([5, 6], [-1, 0]), ([], []), ([], []), ([3], [-1])]
    assert nodes.drawn is not None and nodes.drawn.row.tolist() == [0, 1, 2] and nodes.drawn.q is q
    assert nodes.indptr.dtype == torch.int32 and nodes.riders is None and nodes.ridden() == [0] * 4
    assert drafts.trees() == trees and drafts.ridden() == [1, 0, 2, 0]
    plain = Drafts.pack(trees, riders=[0, 0, 0, 0])
    assert plain.judged() is plain


def test_rows_of_riders_follow_the_nodes_and_are_wanted_after_everybodys() -> None:
    cache = Cache(64, 4, 32)
    seqs = [Seq(i, list(range(1, 2 + n)), 1 + n, Sampling(), 0) for i, n in enumerate((0, 9, 3))]
    for seq, n in zip(seqs, (5, 4, 8), strict=True):
        assert cache.admit(seq) and cache.reserve(seq, n)
    plan = Plan(seqs, chunks=[1, 4, 4], budgets=[4, 0, 4])  # the second is in its prompt
    drafts = Drafts.pack([([11, 12, 13, 14], [-1, 0, -1, 2]), ([15, 16, 17], [-1, 0, 1])], riders=[2, 1])
    rows = build_rows(plan, drafts, cache, VOCAB)
    assert rows.indptr.tolist() == [0, 5, 9, 16]
    assert rows.tokens.tolist() == [1, 11, 12, 13, 14, 1, 2, 3, 4, 1, 2, 3, 4, 15, 16, 17]
    assert rows.parents.tolist() == [-1, 0, 1, 0, 3, -1, 0, 1, 2, -1, 0, 1, 2, 3, 4, 5]
    assert rows.positions.tolist() == [0, 1, 2, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]
    assert rows.want.tolist() == [0, 1, 2, 12, 13, 14, 3, 4, 15], "roots and nodes of all, then riders of all"
    assert len(set(rows.slots.tolist())) == 16
    judged, riders = lines(plan, drafts)
    assert judged == [range(3), range(3, 3), range(3, 6)] and riders == [range(6, 8), range(8, 8), range(8, 9)]


@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("kind", TARGETS)
def test_the_right_tokens_as_riders_are_not_accepted(kind: str, wrong: int) -> None:
    target, prompt = TARGETS[kind](), prompts(1)[0]
    for rule in ("match", "ratio", "block"):
        how = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
        plain = run(target, NoDrafter(), [prompt], [how])[0].token_ids
        drafter = Prophet([*prompt, *plain], min(wrong, 1) if rule == "block" else wrong)
        done = run(target, drafter, [prompt], [how], rule=rule)[0]
        assert done.token_ids == plain
        assert (done.stats.accepted, done.stats.rounds, done.stats.riders > 60) == (0, 20, True)
        nodes = (
            [drafter.wrong * 18 + min(drafter.wrong, 1)] if drafter.wrong else []
        )  # the last round but one has room for one
        assert done.stats.drafted_by_depth == nodes and done.stats.drafted == sum(nodes)


class Witness(RidingDrafter):
    """Checks every line of logits that it is shown against the target's answer to that line's text."""

    def __init__(self, target: Target, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.driver = Driver(target) if not hasattr(target, "table") else None
        self.reference = target
        self.asked: dict[int, tuple[list[int], list[int], list[int], int]] = {}
        self.checked = [0, 0]

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        drafts = super().propose(seqs, budget, draw)
        for seq, tree, riders in zip(seqs, drafts.trees(), drafts.ridden(), strict=True):
            self.asked[seq.id] = (list(seq.tokens), *tree, riders)
        return drafts

    def observe(self, seen: Seen) -> None:
        assert len(seen.logits) == sum(map(len, seen.judged)) + sum(map(len, seen.riders))
        for seq, judged, ridden in zip(seen.seqs, seen.judged, seen.riders, strict=True):
            if seq.id not in self.asked:
                assert not judged and not ridden
                continue
            text, tokens, parents, riders = self.asked.pop(seq.id)
            assert (len(judged), len(ridden)) == (1 + len(tokens) - riders, riders)
            paths: list[list[int]] = []
            for token, parent in zip(tokens, parents, strict=True):
                paths.append([*(paths[parent] if parent >= 0 else []), token])
            for line, path in zip([*judged, *ridden], [[], *paths], strict=True):
                expected = self.answer([*text, *path])
                assert (seen.logits[line] - expected).abs().max() < 1e-9
            self.checked = [self.checked[0] + len(judged), self.checked[1] + len(ridden)]

    def answer(self, tokens: list[int]) -> torch.Tensor:
        if self.driver is None:
            return self.reference.logits(tokens)  # type: ignore[attr-defined,no-any-return]
        seq, logits = self.driver.prefill(tokens, [len(tokens)])
        self.driver.cache.release(seq)
        return logits[-1]


@pytest.mark.parametrize("kind", TARGETS)
def test_a_drafter_finds_the_logits_of_its_nodes_and_riders(kind: str) -> None:
    """Three requests, of which one reads its prompt in chunks; and all at their roots, where every row is wanted."""
    make = {"table": lambda: table_target(), "llama": lambda: tiny_llama(layers=1)}[kind]
    reference = make()
    witness = Witness(reference)
    stage = Stage(make(), witness, draft_tokens=5, max_rows=8)
    for i, prompt in enumerate([[5], [7, 8], prompts(1)[0]]):
        stage.add(prompt, Sampling(seed=i, max_tokens=12, ignore_eos=True))
    stage.finish()
    assert min(witness.checked) > 10 and not witness.asked


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
@pytest.mark.parametrize("mode", MODES)
def test_riders_change_no_draw(mode: str, rule: str) -> None:
    """Noise is keyed by seed, position and round: the same drafts with riders beside them leave every token as it is,
    under the rules that keep q too."""
    target, near, texts = table_target(), table_target(noise=0.15), prompts(5)
    how = [Sampling(seed=90 + i, max_tokens=16, **MODES[mode]) for i in range(5)]
    width = 1 if rule == "block" else 2
    without = run(target, ModelDrafter(near, VOCAB, width=width), texts, how, rule=rule, planner=Always(5))
    drafter = WithRiders(ModelDrafter(near, VOCAB, width=width), RidingDrafter())
    done = run(target, drafter, texts, how, rule=rule, planner=Always(10), max_rows=9)
    assert [c.token_ids for c in done] == [c.token_ids for c in without]
    assert [c.stats.drafted for c in done] == [c.stats.drafted for c in without]
    assert sum(c.stats.riders for c in done) > 40 < sum(c.stats.drafted for c in done)
    assert sum(c.stats.accepted for c in done) > 5


def test_recycling_learns_nothing_from_riders() -> None:
    """The text before a rider may be anything."""
    target, prompt = table_target(), [3, 4]
    how = Sampling(temperature=0.0, max_tokens=30, ignore_eos=True)
    learnt = []
    for riders in (False, True):
        source = RecyclingSource(VOCAB)
        inner: Drafter = SearchDrafter({"recycling": source})
        drafter = WithRiders(inner, RidingDrafter()) if riders else inner
        drafter.observe = inner.observe  # type: ignore[method-assign]
        done = run(target, drafter, [prompt], [how], planner=Always(9 if riders else 4))[0]
        assert (done.stats.riders > 100) == riders
        learnt.append(source.known.of_token)
    assert (learnt[0] == learnt[1]).all()


class Always(FixedPlanner):
    """So many, however near the end is."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, 0)

    def budgets(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        return [self.draft_tokens] * len(seqs)
