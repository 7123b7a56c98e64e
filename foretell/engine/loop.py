"""THE loop: draft, compute, verify, commit - for every method, one request or many, prompt chunks included."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from foretell.drafters.base import Drafter, NoDrafter
from foretell.engine.commit import commit
from foretell.engine.request import Request
from foretell.engine.rows import build_rows, keys, lines, mean_context
from foretell.engine.stats import Lookout
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.planner.cost import Costs
from foretell.planner.fixed import FixedPlanner
from foretell.planner.gain import gain
from foretell.sampling.shape import Shaper
from foretell.scheduler import Scheduler
from foretell.types import Plan, Planner, Round, Seen
from foretell.verify.rule import Rule


class Engine:
    """Runs requests side by side; they join and leave at any step and never notice one another."""

    def __init__(
        self,
        target: Target,
        cache: Cache,
        drafter: Drafter,
        rule: Rule,
        planner: Planner,
        *,
        max_batch: int = 32,
        max_rows: int = 256,
        costs: Costs | None = None,
    ) -> None:
        self.costs = costs  # of the target's forward; without them there is no estimate of what plain decoding takes
        self.target, self.cache, self.drafter, self.rule, self.planner = target, cache, drafter, rule, planner
        self.scheduler = Scheduler(cache, max_batch, max_rows)
        self.requests: dict[int, Request] = {}
        self.lookout = Lookout()
        target.attach(cache, "target")
        drafter.attach(cache)

    def add(self, request: Request) -> None:
        self.requests[request.seq.id] = request
        self.scheduler.add(request.seq)

    def remove(self, request: Request) -> None:
        """End a request, finished or not. Harmless if it is gone already."""
        if self.requests.pop(request.seq.id, None) is not None:
            self.scheduler.remove(request.seq)
            self._forget(request)
            request.abort()

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Plain decoding, for requests that begin and end inside: neither drafter nor planner takes any time."""
        drafter, planner = self.drafter, self.planner
        self.drafter, self.planner = NoDrafter(), FixedPlanner(0, 0)
        try:
            yield
        finally:
            self.drafter, self.planner = drafter, planner

    def step(self) -> None:
        """One forward of the target for everyone who can take part. Events are in the requests' outboxes after it."""
        started_at = time.perf_counter()
        plan = self.scheduler.plan(self.planner)
        self._announce(plan)
        seqs = [plan.seqs[i] for i in plan.ready]
        budgets = [plan.budgets[i] for i in plan.ready]
        self.drafter.prices = self.planner.prices
        proposed = self.drafter.propose(seqs, budgets, self.rule.draw)
        drafts = self.planner.trim(seqs, proposed)
        drafted_at = time.perf_counter()
        rows, where = build_rows(plan, drafts, self.cache, self.target.vocab_size), lines(plan, drafts)
        out = self.target.forward(rows, self.cache, taps=self.drafter.taps)
        computed_at = time.perf_counter()
        nodes = drafts.judged()
        verdict = self.rule.verify(Shaper(out.logits, nodes, seqs), nodes, keys(seqs))
        kept = commit(plan, nodes, verdict, out.logits, self.cache, self.requests)
        committed_at = time.perf_counter()
        seen = Seen(plan.seqs, rows, kept, out.taps, out.logits, *where)
        self.drafter.observe(seen)
        done_at = time.perf_counter()
        clock = (started_at, drafted_at, computed_at, committed_at, done_at)
        round = Round(seqs, budgets, proposed.sizes(), nodes, verdict, len(rows.tokens), mean_context(rows), clock)
        self.planner.observe(round)
        self.lookout.round(budgets, verdict.accepted)
        self._finish(seen, round)

    def _forget(self, request: Request) -> None:
        request.stats.add_members(self.drafter.shares(request.seq))
        self.drafter.forget(request.seq)

    def _announce(self, plan: Plan) -> None:
        for seq in plan.preempted:
            self._forget(self.requests[seq.id])
        for seq in plan.admitted:
            self.drafter.admit(seq)
            stats = self.requests[seq.id].stats
            if stats.rounds == 0:
                stats.cached_tokens = seq.cached

    def _finish(self, seen: Seen, round: Round) -> None:
        """Book the step's time and riders, and let finished requests go."""
        plain, wasted = gain(self.costs, round) if self.costs and round.seqs else (0.0, 0.0)
        for seq, riders in zip(seen.seqs, seen.riders, strict=True):
            request = self.requests[seq.id]
            stats = request.stats
            stats.riders += len(riders)
            if len(seq.tokens) == seq.prompt_len or stats.rounds == 1:
                stats.prefill_s += round.total_s
            else:
                stats.decode_s += round.total_s
                stats.plain_s += plain
                stats.wasted_s += wasted
            stats.draft_s += round.draft_s
            stats.verify_s += round.forward_s + round.verify_s
            if request.finish_reason is not None:
                self.remove(request)
