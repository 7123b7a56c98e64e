"""Who runs, in which order, with how many rows; who gives way when slots run out; and that everyone gets to the end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from foretell.kv.cache import Cache
from foretell.planner.fixed import FixedPlanner
from foretell.scheduler import Scheduler
from foretell.types import Plan, Room, Sampling, Seq


class Budget(FixedPlanner):
    """A planner that wants the same for everyone, and notes who it was asked about."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, 0)
        self.nodes = nodes
        self.asked: list[int] = []

    def budgets(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        self.asked = [seq.id for seq in seqs]
        return [self.nodes] * len(seqs)


class Slots:
    """A room that only counts."""

    def __init__(self, slots: int, places: int = 99) -> None:
        self.slots, self.places = slots, places
        self.held: dict[int, int] = {}  # request id -> committed and reserved

    @property
    def available(self) -> int:
        return self.slots - sum(self.held.values())

    def admit(self, seq: Seq) -> bool:
        if len(self.held) == self.places:
            return False
        self.held[seq.id] = 0
        return True

    def reserve(self, seq: Seq, n: int) -> bool:
        if n > self.available + self.held[seq.id] - seq.cached:
            return False
        self.held[seq.id] = seq.cached + n
        return True

    def release(self, seq: Seq) -> None:
        del self.held[seq.id]
        seq.cached = 0

    def commit(self, seq: Seq, n: int) -> None:
        seq.cached += n
        self.held[seq.id] = seq.cached


def make(id: int, prompt: int, most: int = 20) -> Seq:
    return Seq(id, [1] * prompt, prompt, Sampling(max_tokens=most), 0)


def scheduler(room: Room, seqs: Sequence[Seq] = (), max_batch: int = 8, max_rows: int = 16) -> Scheduler:
    made = Scheduler(room, max_batch, max_rows)
    for seq in seqs:
        made.add(seq)
    return made


def carry_out(plan: Plan, room: Slots, accepted: int = 0) -> None:
    """What the engine does with a plan: chunks are cached, ready requests get their next tokens."""
    for i, seq in enumerate(plan.seqs):
        kept = plan.chunks[i]
        if i in plan.ready:
            taken = min(accepted, plan.budgets[i])
            seq.tokens += [1] * (taken + 1)
            kept += taken
        room.commit(seq, kept)


def ids(seqs: Sequence[Seq]) -> list[int]:
    return [seq.id for seq in seqs]


def test_requests_run_in_order_of_arrival_up_to_max_batch() -> None:
    room, seqs = Slots(999), [make(i, 3) for i in range(5)]
    s = scheduler(room, seqs, max_batch=3)
    plan = s.plan(Budget(0))
    assert ids(plan.seqs) == ids(plan.admitted) == [0, 1, 2] and ids(list(s.waiting)) == [3, 4]
    assert list(plan.chunks) == [3, 3, 3] and plan.ready == [0, 1, 2]
    carry_out(plan, room)
    s.remove(seqs[1])
    plan = s.plan(Budget(0))
    assert ids(plan.seqs) == [0, 2, 3] and ids(plan.admitted) == [3] and list(plan.chunks) == [1, 1, 3]


def test_prompts_are_computed_in_chunks_of_max_rows() -> None:
    room, seqs = Slots(999), [make(0, 40), make(1, 10), make(2, 5)]
    s, planner = scheduler(room, seqs), Budget(4)
    seen = []
    while any(len(seq.tokens) == seq.prompt_len for seq in seqs):
        plan = s.plan(planner)
        assert planner.asked == [plan.seqs[i].id for i in plan.ready], "drafts only where the root is computed"
        assert all(plan.budgets[i] == (4 if i in plan.ready else 0) for i in range(len(plan.seqs)))
        seen.append(list(zip(ids(plan.seqs), plan.chunks, strict=True)))
        carry_out(plan, room)
    assert seen == [[(0, 16)], [(0, 16)], [(0, 8), (1, 8)], [(0, 1), (1, 2), (2, 5)]]


def test_a_lone_token_is_never_starved_by_prompts() -> None:
    """A long prompt that arrived earlier takes all rows of a step, and those who decode go on all the same."""
    room, seqs = Slots(9999), [make(0, 500), *(make(i, 1) for i in range(1, 6))]
    s = scheduler(room, seqs, max_rows=4)
    for step in range(20):
        plan = s.plan(Budget(0))
        assert ids(plan.seqs) == [0, 1, 2, 3, 4, 5]
        assert list(plan.chunks) == [4, 1, 1, 1, 1, 1]
        carry_out(plan, room)
        assert [seq.generated for seq in seqs[1:]] == [step + 1] * 5


def test_a_prompt_gets_the_rows_that_lone_tokens_leave() -> None:
    room, seqs = Slots(9999), [*(make(i, 1) for i in range(3)), make(3, 50)]
    plan = scheduler(room, seqs, max_rows=8).plan(Budget(0))
    assert list(plan.chunks) == [1, 1, 1, 5] and plan.ready == [0, 1, 2]


def test_nobody_waits_for_more_room_than_it_needs() -> None:
    """A waiting request joins once its prompt fits beside what the others still have to compute, no sooner."""
    room, seqs = Slots(30), [make(0, 12), make(1, 17), make(2, 2)]
    s = scheduler(room, seqs, max_rows=4)
    plan = s.plan(Budget(0))
    assert ids(s.running) == [0, 1] and ids(list(s.waiting)) == [2], "12 and 17 are pledged: 2 more do not fit"
    carry_out(plan, room)
    s.remove(seqs[1])
    assert ids(s.plan(Budget(0)).admitted) == [2]


def test_no_free_place_is_no_admission() -> None:
    s = scheduler(Slots(99, places=1), [make(0, 2), make(1, 2)])
    assert ids(s.plan(Budget(0)).seqs) == [0] and ids(list(s.waiting)) == [1]


def test_drafts_are_given_up_before_anyone_is_preempted() -> None:
    """Whoever's drafts they are: a preempted request has to compute all of its tokens anew, a draft costs a guess."""
    for slots in range(6, 30):
        room, seqs = Slots(slots), [make(i, 2) for i in range(3)]
        plan = scheduler(room, seqs).plan(Budget(8))
        assert ids(plan.seqs) == [0, 1, 2] and not plan.preempted, f"{slots} slots hold the rows of all three"
        assert sum(plan.budgets) == min(24, slots - 6), "and what is left is for drafts"
        assert room.available == slots - 6 - sum(plan.budgets)


def test_the_last_to_arrive_is_preempted_first_and_comes_back_first() -> None:
    room, seqs = Slots(12), [make(i, 3) for i in range(5)]
    s = scheduler(room, seqs)
    first = s.plan(Budget(0))
    assert ids(first.seqs) == [0, 1, 2, 3] and ids(list(s.waiting)) == [4]
    carry_out(first, room)
    second = s.plan(Budget(5))
    assert ids(second.preempted) == [3] and ids(second.seqs) == [0, 1, 2] and ids(list(s.waiting)) == [3, 4]
    assert seqs[3].cached == 0 and seqs[3].tokens == [1] * 4, "its tokens stay"
    carry_out(second, room)
    assert list(second.budgets) == [0, 0, 0]
    third = s.plan(Budget(0))
    assert ids(third.preempted) == [2] or ids(third.seqs) == [0, 1, 2]
    s.remove(seqs[0])
    s.remove(seqs[1])
    back = s.plan(Budget(0))
    assert ids(s.running)[:2] == [2, 3] and 3 in ids(back.admitted)


def test_who_is_admitted_and_preempted_in_one_step_is_neither() -> None:
    """The drafter hears of a request only if it takes part."""
    room, seqs = Slots(10), [make(0, 4), make(1, 3)]
    s = scheduler(room, seqs[:1])
    carry_out(s.plan(Budget(0)), room)
    s.add(seqs[1])
    grant = room.reserve  # a room that has less than it said
    room.reserve = lambda seq, n: seq.id != 1 and grant(seq, n)  # type: ignore[method-assign]
    plan = s.plan(Budget(0))
    assert (ids(plan.seqs), ids(plan.admitted), ids(plan.preempted)) == ([0], [], [])
    assert ids(list(s.waiting)) == [1] and ids(s.running) == [0]


def test_removal_while_running_waiting_and_gone() -> None:
    room, seqs = Slots(99), [make(i, 3) for i in range(3)]
    s = scheduler(room, seqs, max_batch=2)
    assert not s.idle
    s.plan(Budget(2))
    s.remove(seqs[0])
    assert 0 not in room.held and ids(s.running) == [1]
    s.remove(seqs[2])
    assert ids(list(s.waiting)) == []
    s.remove(seqs[2])  # gone already: harmless
    s.remove(seqs[1])
    assert s.idle and room.available == 99
    plan = s.plan(Budget(2))
    assert list(plan.seqs) == [] and plan.ready == []


def test_memory_error_only_if_a_request_cannot_fit_alone() -> None:
    room, seqs = Slots(6), [make(0, 4), make(1, 2)]
    s = scheduler(room, seqs)
    carry_out(s.plan(Budget(3)), room)
    carry_out(s.plan(Budget(3)), room)  # the second gave way
    assert ids(list(s.waiting)) == [1] and room.held == {0: 5}
    carry_out(s.plan(Budget(3)), room)
    with pytest.raises(MemoryError, match="request 0 needs more slots than the cache has"):
        s.plan(Budget(3))
    s.remove(seqs[0])
    assert ids(s.plan(Budget(3)).seqs) == [1], "the others go on"


@pytest.mark.parametrize("seed", range(60))
def test_everyone_gets_to_the_end_however_small_the_pool(seed: int) -> None:
    """No livelock: the first in line is never preempted and moves in every step, which bounds their number."""
    source = random.Random(seed)
    most = source.randint(2, 8)
    seqs = [make(i, source.randint(1, 30), source.randint(1, most)) for i in range(source.randint(1, 12))]
    largest = max(seq.prompt_len + seq.sampling.max_tokens for seq in seqs)
    room = Slots(largest + source.choice([0, 1, 5, 40]))
    s = scheduler(room, (), source.randint(1, 5), source.randint(1, 12))
    planner = Budget(source.randint(0, 6))
    bound = sum(seq.prompt_len + seq.sampling.max_tokens for seq in seqs)
    left, steps, finished, preempted = list(seqs), 0, [], 0
    while left or not s.idle:
        while left and (s.idle or source.random() < 0.4):
            s.add(left.pop(0))
        arrived = [seq.id for seq in (*s.running, *s.waiting)]
        plan = s.plan(planner)
        steps += 1
        assert steps <= bound, "the scheduler does not get on"
        assert plan.seqs and plan.seqs[0] is s.running[0]
        assert [seq.id for seq in (*s.running, *s.waiting)] == sorted(arrived), "order of arrival is kept for good"
        assert len(s.running) <= s.max_batch
        assert sum(c for c in plan.chunks if c > 1) <= s.max_rows
        assert ids(plan.preempted) == sorted(ids(plan.preempted), reverse=True), "the last goes first"
        assert not plan.preempted or not any(plan.budgets), "drafts were kept while someone lost its place"
        preempted += len(plan.preempted)
        for seq, chunk, budget in zip(plan.seqs, plan.chunks, plan.budgets, strict=True):
            assert chunk >= 1 and room.held[seq.id] == seq.cached + chunk + budget
        carry_out(plan, room, accepted=source.randint(0, 6))
        for seq in list(s.running):
            del seq.tokens[seq.prompt_len + seq.sampling.max_tokens :]
            if seq.generated >= seq.sampling.max_tokens:
                s.remove(seq)
                finished.append(seq.id)
    assert sorted(finished) == ids(seqs) and room.held == {}


@pytest.mark.parametrize("reuse", [True, False])
def test_the_real_cache_is_a_room(reuse: bool) -> None:
    """The same with pages that outlive their request: what is idle counts as room, what is shared does not."""
    source = random.Random(11)
    cache = Cache(70, 4, 64, reuse=reuse)
    s = scheduler(cache, max_batch=4, max_rows=24)
    planner, preempted, hits = Budget(3), 0, 0
    seqs = [Seq(i, [0] * source.randint(1, 50), 0, Sampling(), 0) for i in range(40)]
    for seq in seqs:
        seq.prompt_len = len(seq.tokens)
        s.add(seq)
    for _ in range(3000):
        if s.idle:
            break
        plan = s.plan(planner)
        preempted += len(plan.preempted)
        hits += sum(seq.cached for seq in plan.admitted)
        for i, seq in enumerate(plan.seqs):
            assert len(cache.reserved(seq)) == plan.chunks[i] + plan.budgets[i]
            if i in plan.ready:
                seq.tokens.append(0)
            cache.commit(seq, range(plan.chunks[i]))
            if seq.generated == 10:
                s.remove(seq)
        cache.check()
    assert s.idle and all(seq.generated == 10 for seq in seqs)
    assert preempted > 0 and (hits > 100) == reuse
