"""One suite for every drafter: what the engine relies on, whatever the method. To be listed is to be tested."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from foretell.drafters import METHODS, Parts, build, check
from foretell.drafters.base import Drafter, NoDrafter
from foretell.drafters.early_exit import EarlyExitDrafter
from foretell.drafters.model import ModelDrafter
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.types import Drafts, Draw, Sampling, Seen, Seq
from foretell.verify import RULES
from tests.conftest import VOCAB, RandomPlanner, run, table_target
from tests.drafters.pairs import WAYS, letter_drafter
from tests.engine.test_invariance import prompts
from tests.play import FIRST_ID, Stage

MAKERS: dict[str, Callable[[Target], Drafter]] = {
    **{name: lambda target, name=name: build(name, Parts(target, VOCAB, table_target(noise=0.2))) for name in METHODS},
    **{
        f"{name}{kind}": lambda target, name=name, trees=trees: build(name, Parts(target, VOCAB, None, trees=trees))
        for name in ("suffix", "recycling", "lookahead", "suffix+recycling+ngram", "suffix+lookahead")
        for kind, trees in ((", trees", True), (", a chain", False))
    },
    "model, width 2": lambda target: ModelDrafter(table_target(noise=0.2), VOCAB, width=2),
    "model, width 5": lambda target: ModelDrafter(table_target(noise=0.2), VOCAB, width=5),
    "early_exit, width 3": lambda target: EarlyExitDrafter(target, [0, 2], width=3),
    **{f"model, {way}": lambda target, way=way: letter_drafter(way) for way in WAYS},
}
EVERY = pytest.mark.parametrize("name", MAKERS)
BY_RULE = [
    (name, rule) for name, make in MAKERS.items() for rule in RULES if rule != "block" or make(table_target()).chains
]
SLOTS = 130  # too few for five: the scheduler preempts as well
MODES = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8}}


class Watched(Drafter):
    """Any drafter, with what the engine relies on checked at every call."""

    def __init__(self, inner: Drafter, distinct: bool) -> None:
        self.inner, self.distinct = inner, distinct
        self.taps, self.draft_tokens, self.chains = inner.taps, inner.draft_tokens, inner.chains
        self.here: set[int] = set()  # requests it was told of
        self.nodes: dict[int, int] = {}  # request id -> nodes proposed
        self.empty = 0  # proposals for a request without a budget

    def attach(self, cache: Cache) -> None:
        self.inner.attach(cache)

    def admit(self, seq: Seq) -> None:
        assert seq.id not in self.here, "admitted twice without `forget`"
        self.here.add(seq.id)
        self.inner.admit(seq)

    def forget(self, seq: Seq) -> None:
        self.here.discard(seq.id)
        self.inner.forget(seq)

    def observe(self, seen: Seen) -> None:
        rows = seen.rows.tokens.tolist()
        starts = seen.rows.indptr.tolist()
        for seq, kept, start in zip(seen.seqs, seen.kept, starts, strict=False):
            assert seq.cached <= len(seq.tokens) - 1, "the root is never cached"
            assert [rows[start + row] for row in kept] == seq.tokens[seq.cached - len(kept) : seq.cached]
        self.inner.observe(seen)

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        assert self.here >= {seq.id for seq in seqs}, "asked about a request it was not told of"
        before = [(list(seq.tokens), seq.cached, seq.rounds, seq.generated) for seq in seqs]
        drafts = self.inner.propose(seqs, budget, draw)
        assert before == [(seq.tokens, seq.cached, seq.rounds, seq.generated) for seq in seqs], "it wrote to a request"
        trees = drafts.trees()
        assert len(trees) == len(seqs) == drafts.indptr.numel() - 1
        assert drafts.indptr.tolist()[-1] == drafts.tokens.numel() == drafts.parents.numel()
        for most, (tokens, parents) in zip(budget, trees, strict=True):
            assert len(tokens) == len(parents) <= most, "budget"
            assert all(-1 <= parent < i for i, parent in enumerate(parents)), "parents come before their children"
            assert all(0 <= token < VOCAB for token in tokens)
            self.empty += most == 0
        for seq, (tokens, parents) in zip(seqs, drafts.judged().trees(), strict=True):
            assert all(parent < len(tokens) for parent in parents), "no node hangs on a rider"
            if self.distinct:
                assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "siblings are distinct"
            if self.chains:
                assert parents == list(range(-1, len(tokens) - 1)), "its nodes are a chain"
            self.nodes[seq.id] = self.nodes.get(seq.id, 0) + len(tokens)
        if drafts.drawn is not None:
            q, row = drafts.drawn.q, drafts.drawn.row
            assert q.shape[1] == VOCAB and row.numel() == drafts.tokens.numel()
            assert ((row >= -1) & (row < len(q))).all() and q.sum(1).sub(1).abs().max() < 1e-9
            drawn = row >= 0
            assert (q[row[drawn].long(), drafts.tokens[drawn]] > 0).all(), "a node has no chance under its own law"
        return drafts


def containers(thing: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Every dict, set and list that the object holds, its parts' own included; not the cache, which is the engine's."""
    for name, value in vars(thing).items() if hasattr(thing, "__dict__") else ():
        if isinstance(value, dict | set | list | frozenset):
            yield name, value
            for part in value if isinstance(value, list) else ():
                if type(part).__module__.startswith("foretell.drafters"):
                    yield from containers(part, depth - 1)
        elif depth and type(value).__module__.startswith("foretell.drafters"):
            yield from containers(value, depth - 1)


def mentions(value: Any, ids: set[int]) -> bool:
    """Whether a request's id occurs anywhere inside."""
    if isinstance(value, Seq):
        return value.id in ids
    if isinstance(value, Mapping):
        return any(mentions(k, ids) or mentions(v, ids) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return any(mentions(v, ids) for v in value)
    return isinstance(value, int) and value in ids


def left_behind(drafter: Drafter, ids: set[int]) -> list[str]:
    return [name for name, value in containers(drafter) if mentions(value, ids)]


def samplings(count: int, mode: str) -> list[Sampling]:
    return [
        Sampling(
            seed=50 + i,
            max_tokens=14 + i % 5,
            stop_token_ids=[[], [2, 7, 9, 11]][i % 2],
            prediction=[[], [5, 6, 7] * 5][i % 2],
            private=i % 3 == 0,
            **MODES[mode],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "rule"), BY_RULE)
def test_contract_in_company_with_preemption_and_changing_budgets(name: str, rule: str, mode: str) -> None:
    target = table_target()
    watched = Watched(MAKERS[name](target), distinct=rule == "match")
    planner = RandomPlanner(7, target.max_context)
    stage = Stage(target, watched, rule=rule, planner=planner, slots=SLOTS, max_rows=20)
    texts, how = prompts(8), samplings(8, mode)
    requests = [stage.add(p, s) for p, s in zip(texts[:5], how[:5], strict=True)]
    source = random.Random(7)
    while stage.engine.requests:
        if len(requests) < 8 and source.random() < 0.3:
            requests.append(stage.add(texts[len(requests)], how[len(requests)]))
        if stage.engine.scheduler.running and source.random() < 0.15:
            stage.preempt(source.choice(stage.engine.scheduler.running))
        stage.step()
    done = [request.completion() for request in requests]
    assert watched.empty > 0
    for request, completion in zip(requests, done, strict=True):
        dropped = planner.dropped.get(request.seq.id, 0)
        assert completion.stats.drafted == watched.nodes[request.seq.id] - dropped, "statistics say what was verified"
        assert completion.stats.rounds == request.seq.rounds > 0, "the round is part of the key of the noise"
    if rule == "match" or mode == "greedy":
        for p, s, completion in zip(texts, how, done, strict=False):
            assert completion.token_ids == run(target, NoDrafter(), [p], [s], reuse=False)[0].token_ids
    assert not watched.here and not left_behind(watched.inner, {request.seq.id for request in requests})
    assert stage.cache.available == SLOTS


@EVERY
def test_state_is_dropped_when_a_request_ends_or_loses_its_place(name: str) -> None:
    target = table_target()
    drafter = MAKERS[name](target)
    stage = Stage(target, drafter)
    first, second = (stage.add(p, Sampling(seed=1, max_tokens=40, ignore_eos=True)) for p in prompts(2))
    for _ in range(3):
        stage.step()
    stage.engine.remove(first)
    assert not left_behind(drafter, {first.seq.id})
    stage.preempt(second.seq)
    assert not left_behind(drafter, {second.seq.id})
    stage.finish()
    assert len(second.completion().token_ids) == 40 and not left_behind(drafter, {second.seq.id})
    drafter.forget(second.seq)  # once more: harmless


@EVERY
def test_i46_a_prompt_seen_before_is_found_again(name: str) -> None:
    """Pain I46: with a drafter, nearly all reuse of prefixes was lost."""
    target, prompt = table_target(), [1 + i % 20 for i in range(40)]
    how = Sampling(temperature=0, max_tokens=12, ignore_eos=True, prediction=[5, 6, 7])
    cached = []
    for drafter in (NoDrafter(), MAKERS[name](target)):
        stage = Stage(target, drafter)
        first, again = (stage.all([prompt], [how])[0] for _ in range(2))
        assert first.token_ids == again.token_ids and first.stats.cached_tokens == 0
        cached.append(again.stats.cached_tokens)
    assert cached == [32, 32]


def test_what_is_left_behind_would_be_seen() -> None:
    """The check that this suite leans on can fail."""
    target = table_target()
    drafter = MAKERS["ngram"](target)
    stage = Stage(target, drafter)
    request = stage.add([1, 2, 1], Sampling(seed=1, max_tokens=9, ignore_eos=True))
    stage.step()
    assert left_behind(drafter, {request.seq.id}) == ["known"] and request.seq.id == FIRST_ID
    model = MAKERS["model"](target)
    stage = Stage(target, model)
    stage.add([1, 2, 1], Sampling(seed=1, max_tokens=9, ignore_eos=True))
    stage.step()
    assert left_behind(model, {FIRST_ID}) == ["_done"]


@EVERY
def test_without_a_budget_there_are_no_nodes(name: str) -> None:
    """Pain L59: a request that asks for plain decoding gets it, beside one that does not."""
    target = table_target()
    watched = Watched(MAKERS[name](target), distinct=True)
    stage = Stage(target, watched)
    texts, settings = prompts(4), {"max_tokens": 20, "prediction": [5, 6, 7] * 5}
    requests = [
        stage.add(p, Sampling(seed=i, temperature=0, ignore_eos=True, draft_tokens=[0, None, 2, 0][i], **settings))
        for i, p in enumerate(texts)
    ]
    stage.finish()
    counts = [(request.stats.drafted, request.stats.rounds) for request in requests]
    assert counts[0] == counts[3] == (0, 20)
    assert counts[2][0] <= 2 * counts[2][1]
    assert (counts[1][0] > 0) == (counts[2][0] > 0) == (name != "none")


BROKEN: dict[str, tuple[Callable[[Sequence[Seq], Sequence[int]], Drafts], str]] = {
    "a tree too few": (lambda seqs, _: Drafts.chains([]), "returned 0 trees for 1 requests"),
    "too many nodes": (lambda _, budget: Drafts.chains([[1] * (budget[0] + 1)]), "returned 4 nodes where at most 3"),
    "a token too large": (lambda *_: Drafts.chains([[1, VOCAB]]), f"token {VOCAB}, outside the vocabulary of {VOCAB}"),
    "a token below 0": (lambda *_: Drafts.chains([[-1]]), "token -1, outside"),
    "its own parent": (lambda *_: Drafts.pack([([1, 2], [-1, 1])]), "gave node 1 the parent 1"),
    "a node on a rider": (
        lambda *_: Drafts.pack([([1, 2, 3], [-1, 2, -1])], riders=[1]),
        "gave node 1 the parent 2, which does not come before it",
    ),
    "a rider on itself": (lambda *_: Drafts.pack([([1, 2], [-1, 1])], riders=[1]), "gave rider 1 the parent 1"),
    "too many nodes and riders": (
        lambda _, budget: Drafts.pack([([1] * (budget[0] + 1), [-1] * (budget[0] + 1))], riders=[2]),
        "returned 4 nodes and riders where at most 3",
    ),
    "more riders than drafts": (lambda *_: Drafts.pack([([1], [-1])], riders=[2]), "1 drafts and said that 2 of them"),
    "fewer riders than none": (lambda *_: Drafts.pack([([1], [-1])], riders=[-1]), "1 drafts and said that -1 of"),
    "riders of nobody": (lambda *_: Drafts.pack([([1], [-1])], riders=[1, 1]), "1 trees and counted the riders of 2"),
    "no parent at all": (lambda *_: Drafts.pack([([1], [-2])]), "gave node 0 the parent -2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_drafter_that_breaks_its_contract_is_named_and_the_target_computes_nothing(name: str) -> None:
    propose, message = BROKEN[name]
    drafter, target = Drafter(), table_target()
    drafter.propose = lambda seqs, budget, draw: propose(seqs, budget)  # type: ignore[method-assign]
    stage = Stage(target, drafter, draft_tokens=3)
    request = stage.add([1, 2, 3], Sampling(seed=1, max_tokens=9))
    with pytest.raises(ValueError, match=message):
        stage.step()
    assert target.forwards == 0
    stage.engine.remove(request)
    stage.cache.check()
    assert stage.cache.available == stage.cache.slots


@EVERY
def test_nobody_to_draft_for_is_possible(name: str) -> None:
    target = table_target()
    drafter = MAKERS[name](target)
    stage = Stage(target, drafter)
    drafts = drafter.propose([], [], stage.engine.rule.draw)
    assert drafts.trees() == [] and drafts.indptr.tolist() == [0]


def test_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="drafter 'nagram' is not one of none, ngram, suffix, recycling, prediction, "):
        check("nagram", False)


def test_the_model_method_needs_a_model() -> None:
    parts = Parts(table_target(), VOCAB, None)
    with pytest.raises(ValueError, match="needs draft_model"):
        check("model", False)
    with pytest.raises(ValueError, match="no use for a draft_model"):
        check("ngram", True)
    assert type(build("auto", parts)) is type(build("suffix+recycling", parts)), "auto makes do without one"
