"""The cache against a plain list of tokens per request: whatever is reserved, committed, released and reused, a
request's line of the slot table reads back its own tokens, and no slot is lost or held twice."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foretell.kv.cache import Cache
from foretell.kv.prefix import PAGE
from foretell.types import Sampling, Seq

SLOTS, LINES, CONTEXT = 5 * PAGE + 3, 3, 4 * PAGE


def make_seq(id: int, tokens: list[int]) -> Seq:
    return Seq(id, list(tokens), len(tokens), Sampling(), 0)


class World:
    """A cache with a plane that keeps the token at each slot, and the requests that it should serve."""

    def __init__(self, reuse: bool, slots: int = SLOTS, lines: int = LINES) -> None:
        self.cache = Cache(slots, lines, CONTEXT, reuse=reuse)
        self.plane = self.cache.add_plane("target", 1, 1, 1, torch.int64)
        self.held: list[Seq] = []
        self.ids = 0

    @property
    def at(self) -> Any:
        return self.plane.k[0, :, 0, 0].numpy()

    def admit(self, tokens: list[int]) -> Seq | None:
        seq = make_seq(self.ids, tokens)
        self.ids += 1
        if not self.cache.admit(seq):
            return None
        self.held.append(seq)
        return seq

    def write(self, seq: Seq, tokens: list[int]) -> None:
        """What a forward does: tokens go to the reserved slots."""
        slots = list(self.cache.reserved(seq))
        assert len(slots) == len(tokens)
        assert not self.plane.filled[slots].any(), "a reserved slot still counts as written by an earlier owner"
        self.at[slots] = tokens
        self.plane.filled[slots] = True

    def compute(self, seq: Seq) -> bool:
        """All that is uncached but the root becomes cached."""
        tail = seq.tokens[seq.cached : -1]
        if not self.cache.reserve(seq, len(tail)):
            return False
        self.write(seq, tail)
        self.cache.commit(seq, range(len(tail)))
        return True

    def release(self, seq: Seq) -> None:
        self.held.remove(seq)
        self.cache.release(seq)

    def read(self, seq: Seq) -> list[int]:
        slots = self.cache.committed(seq, 0, seq.cached)
        assert self.plane.filled[slots].all()
        return [int(token) for token in self.at[slots]]

    def state(self) -> tuple[Any, ...]:
        """All of the cache that can be seen, to show that nothing changed."""
        reserved = {seq.id: list(self.cache._scratch.get(seq.id, [])) for seq in self.held}
        pages = self.cache._prefix.all_slots() if self.cache._prefix else []
        seqs = [(seq.id, seq.cached, seq.table) for seq in self.held]
        return self.cache.available, self.cache.table.tolist(), reserved, pages, seqs, list(self.plane.filled)


class CacheMachine(RuleBasedStateMachine):
    @initialize(reuse=st.booleans(), seed=st.integers(0, 2**32))
    def start(self, reuse: bool, seed: int) -> None:
        self.world, self.random = World(reuse), random.Random(seed)
        self.reuse = reuse
        self.texts = [[self.random.randrange(50) for _ in range(CONTEXT - 8)] for _ in range(2)]

    @rule(text=st.integers(0, 1), shared=st.integers(1, CONTEXT - 8), own=st.integers(0, 3))
    def admit(self, text: int, shared: int, own: int) -> None:
        tokens = self.texts[text][:shared] + [self.random.randrange(50) for _ in range(own)]
        free = len(self.world.held) < LINES
        before = self.world.cache.available
        seq = self.world.admit(tokens)
        assert (seq is not None) == free
        if seq:
            assert seq.cached <= len(tokens) - 1, "the last token must be computed, its logits are wanted"
            assert self.reuse or seq.cached == 0
            assert before - self.world.cache.available in range(seq.cached + 1)

    @precondition(lambda self: self.world.held)
    @rule(who=st.integers(0, 99), chunk=st.integers(1, 30), nodes=st.integers(0, 6), interrupted=st.booleans())
    def step(self, who: int, chunk: int, nodes: int, interrupted: bool) -> None:
        world, seq = self.world, self.world.held[who % len(self.world.held)]
        tail = seq.tokens[seq.cached :][:chunk]
        ready = seq.cached + len(tail) == len(seq.tokens)
        drafts = [self.random.randrange(50) for _ in range(nodes)] if ready else []
        drafts = drafts[: max(0, CONTEXT - len(seq.tokens) - 1)]  # a full line has room for none
        rows = tail + drafts
        stale = len(world.cache._scratch.get(seq.id, []))  # of a step that was interrupted
        available, before = world.cache.available + stale, world.state()
        if not world.cache.reserve(seq, len(rows)):
            assert len(rows) > available
            assert stale or world.state() == before, "Full, and nothing changed"
            return
        assert len(rows) <= available
        world.write(seq, rows)
        if interrupted and self.random.random() < 0.3:
            return  # the step never came to its commit: the next reserve must not lose these slots
        path = self.random.sample(range(len(drafts)), self.random.randint(0, len(drafts)))  # any subset, any order
        if ready:
            seq.tokens += [drafts[node] for node in path]
            if len(seq.tokens) < CONTEXT:
                seq.tokens.append(self.random.randrange(50))  # the next root
            else:
                path = path[:-1]
        world.cache.commit(seq, [*range(len(tail)), *(len(tail) + node for node in path)])

    @precondition(lambda self: self.world.held)
    @rule(who=st.integers(0, 99), length=st.integers(0, CONTEXT), others=st.integers(0, 2))
    def rewind(self, who: int, length: int, others: int) -> None:
        """The end of the text changes: what is kept is kept as it was, a page of others is left to them whole."""
        world, seq = self.world, self.world.held[who % len(self.world.held)]
        cached, shared = seq.cached, PAGE * len(world.cache._shared[seq.id])
        world.cache.rewind(seq, length)
        assert seq.cached == (min(length, cached) if length >= shared else length // PAGE * PAGE)
        end = [self.random.randrange(50) for _ in range(others)]
        seq.tokens[seq.cached :] = (seq.tokens[seq.cached :][:1] + end)[: CONTEXT - seq.cached] or [1]

    @precondition(lambda self: self.world.held)
    @rule(who=st.integers(0, 99), back=st.booleans())
    def release(self, who: int, back: bool) -> None:
        world, seq = self.world, self.world.held[who % len(self.world.held)]
        cached, tokens = seq.cached, list(seq.tokens)
        world.release(seq)
        assert (seq.cached, seq.table) == (0, -1)
        world.cache.release(seq)  # once more: harmless
        if back:  # preempted: its own pages are there to be found unless they were never whole
            again = world.admit(tokens)
            assert again is not None
            assert again.cached >= (cached // PAGE * PAGE if self.reuse else 0)

    @invariant()
    def every_line_reads_back_its_own_tokens(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.cache.check()
        for seq in self.world.held:
            assert self.world.read(seq) == seq.tokens[: seq.cached]

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for seq in list(self.world.held):
                self.world.release(seq)
            self.world.cache.check()
            assert self.world.cache.available == SLOTS, "with nobody left, every slot can be had"


CacheMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestCache = CacheMachine.TestCase


def test_long_random_lives_reuse_evict_and_fill_up() -> None:
    """The same world over 3,000 operations, and proof that it was not an idle one: hits, evictions, refusals."""
    source, world = random.Random(5), World(reuse=True, slots=6 * PAGE + 5)
    texts = [[source.randrange(50) for _ in range(CONTEXT - 4)] for _ in range(4)]
    hits = refused = 0
    for _ in range(3000):
        if len(world.held) < LINES and source.random() < 0.5:
            seq = world.admit(source.choice(texts)[: source.randint(2, CONTEXT - 4)])
            assert seq is not None
            hits += seq.cached
            if not world.compute(seq):
                refused += 1
                world.release(seq)
        elif world.held:
            world.release(source.choice(world.held))
        world.cache.check()
        for seq in world.held:
            assert world.read(seq) == seq.tokens[: seq.cached]
    assert hits > 1000 and refused > 100
    assert world.cache._prefix is not None
    assert world.cache._prefix._numbers > 6, "more pages were made than the pool could hold: some were evicted"


@pytest.mark.parametrize("length", [2, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE + 5])
def test_the_same_prompt_twice_loses_at_most_a_page(length: int) -> None:
    """Pain I46: speculation cost a cache unit of each hit. The last token is never a hit: its logits are wanted."""
    world, tokens = World(reuse=True), list(range(length))
    first = world.admit(tokens)
    assert first is not None and first.cached == 0 and world.compute(first)
    world.release(first)
    second = world.admit(tokens)
    assert second is not None and length - 1 - PAGE < second.cached <= length - 1
    assert world.read(second) == tokens[: second.cached]


@pytest.mark.parametrize("length", [PAGE, 2 * PAGE, 2 * PAGE + 1])
def test_the_last_token_is_computed_even_if_all_of_the_prompt_is_known(length: int) -> None:
    world, tokens = World(reuse=True), list(range(3 * PAGE))
    first = world.admit([*tokens, 0])
    assert first is not None and world.compute(first)
    world.release(first)
    second = world.admit(tokens[:length])
    assert second is not None and second.cached == (length - 1) // PAGE * PAGE


def test_rewinding_within_a_shared_page_leaves_it_to_the_others() -> None:
    world = World(reuse=True)
    tokens = list(range(2 * PAGE + 3))
    first = world.admit(tokens)
    assert first is not None and world.compute(first)
    world.release(first)
    one, two = world.admit(tokens), world.admit(tokens)
    assert one is not None and two is not None and one.cached == two.cached == 2 * PAGE
    available = world.cache.available
    world.cache.rewind(one, PAGE + 3)
    assert one.cached == PAGE and world.cache.available == available, "the other still uses it"
    assert world.read(two) == tokens[: 2 * PAGE]
    world.cache.rewind(two, 0)
    assert two.cached == 0 and world.cache.available == available + PAGE, "nobody does"
    world.cache.check()


def test_two_that_run_side_by_side_share_slots() -> None:
    world, tokens = World(reuse=True), list(range(2 * PAGE + 1))
    first = world.admit(tokens)
    assert first is not None and world.compute(first)
    world.release(first)
    left = world.cache.available
    second, third = world.admit(tokens), world.admit([*tokens[:PAGE], 99, 98])
    assert second is not None and third is not None and (second.cached, third.cached) == (2 * PAGE, PAGE)
    assert world.cache.available == left - 2 * PAGE, "the page both use is counted once"
    assert np.array_equal(world.cache.committed(second, 0, PAGE), world.cache.committed(third, 0, PAGE))


def test_pages_in_use_are_never_evicted() -> None:
    world, tokens = World(reuse=True, slots=3 * PAGE), list(range(PAGE + 1))
    first = world.admit(tokens)
    assert first is not None and world.compute(first)
    world.release(first)
    user, greedy = world.admit(tokens), world.admit([7, 8])
    assert user is not None and greedy is not None and user.cached == PAGE
    assert world.cache.available == 2 * PAGE
    assert not world.cache.reserve(greedy, 2 * PAGE + 1)
    assert world.cache.reserve(greedy, 2 * PAGE)
    world.write(greedy, [1] * (2 * PAGE))
    assert world.read(user) == tokens[:PAGE]
    world.cache.check()


def test_idle_pages_are_given_up_for_slots() -> None:
    world = World(reuse=True, slots=2 * PAGE)
    first = world.admit(list(range(2 * PAGE)))
    assert first is not None and world.compute(first)
    world.release(first)
    assert world.cache.available == 2 * PAGE
    other = world.admit([40, 41])
    assert other is not None and world.cache.reserve(other, 2 * PAGE)
    world.release(other)
    again = world.admit(list(range(2 * PAGE)))
    assert again is not None and again.cached == 0, "its page is gone and must not be found"
    world.cache.check()


def test_without_reuse_nothing_outlives_its_request() -> None:
    world = World(reuse=False)
    for _ in range(2):
        seq = world.admit(list(range(CONTEXT - 1)))
        assert seq is not None and seq.cached == 0 and world.compute(seq)
        assert not world.cache.reserve(seq, SLOTS)
        world.release(seq)
    assert world.cache.available == SLOTS


def test_no_free_line_is_no_admission() -> None:
    world = World(reuse=True)
    assert all(world.admit([1, 2]) for _ in range(LINES))
    before = world.state()
    assert world.admit([1, 2]) is None and world.state() == before


def test_a_plane_has_every_slot_and_its_own_shape() -> None:
    cache = Cache(10, 2, 8)
    plane = cache.add_plane("draft", 3, 2, 4, torch.bfloat16)
    assert plane.k.shape == plane.v.shape == (3, 10, 2, 4) and plane.k.dtype == torch.bfloat16
    assert plane.filled.shape == (10,) and not plane.filled.any() and cache.planes["draft"] is plane


def test_reserving_nothing_is_possible() -> None:
    world = World(reuse=True)
    seq = world.admit([1, 2, 3])
    assert seq is not None and world.cache.reserve(seq, 0) and list(world.cache.reserved(seq)) == []
    world.cache.commit(seq, [])
    assert seq.cached == 0
    world.cache.check()


def test_check_finds_a_lost_slot_and_a_stolen_line() -> None:
    """The check that all these tests lean on can fail."""
    world = World(reuse=True)
    seq = world.admit(list(range(20)))
    assert seq is not None and world.compute(seq)
    seq.cached -= 1
    with pytest.raises(AssertionError, match="slot"):
        world.cache.check()
    seq.cached += 1
    seq.table = LINES
    with pytest.raises((AssertionError, IndexError)):
        world.cache.check()
