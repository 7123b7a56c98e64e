"""THE loop: draft, compute, verify, commit - for every method, one request or many, prompt chunks included."""

from __future__ import annotations

import time

from foretell.drafters.base import Drafter
from foretell.engine.commit import commit
from foretell.engine.request import Request
from foretell.engine.rows import build_rows, keys, lines
from foretell.engine.stats import Lookout
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.sampling.shape import Shaper
from foretell.scheduler import Scheduler
from foretell.types import Plan, Planner, Seen
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
    ) -> None:
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

    def step(self) -> None:
        """One forward of the target for everyone who can take part. Events are in the requests' outboxes after it."""
        clock = [time.perf_counter()]
        plan = self.scheduler.plan(self.planner)
        self._announce(plan)
        seqs = [plan.seqs[i] for i in plan.ready]
        budgets = [plan.budgets[i] for i in plan.ready]
        drafts = self.drafter.propose(seqs, budgets, self.rule.draw)
        clock.append(time.perf_counter())
        rows, where = build_rows(plan, drafts, self.cache, self.target.vocab_size), lines(plan, drafts)
        out = self.target.forward(rows, self.cache, taps=self.drafter.taps)
        clock.append(time.perf_counter())
        nodes = drafts.judged()
        verdict = self.rule.verify(Shaper(out.logits, nodes, seqs), nodes, keys(seqs))
        clock.append(time.perf_counter())
        kept = commit(plan, nodes, verdict, out.logits, self.cache, self.requests)
        seen = Seen(plan.seqs, rows, kept, out.taps, out.logits, *where)
        self.drafter.observe(seen)
        self.planner.observe(seqs, nodes, verdict)
        self.lookout.round(budgets, verdict.accepted)
        self._finish(seen, clock)

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

    def _finish(self, seen: Seen, clock: list[float]) -> None:
        """Book the step's time and riders, and let finished requests go."""
        started, drafted, computed, verified = clock
        for seq, riders in zip(seen.seqs, seen.riders, strict=True):
            request = self.requests[seq.id]
            stats = request.stats
            stats.riders += len(riders)
            took = time.perf_counter() - started
            if len(seq.tokens) == seq.prompt_len or stats.rounds == 1:
                stats.prefill_s += took
            else:
                stats.decode_s += took
            stats.draft_s += drafted - started
            stats.verify_s += verified - drafted
            if request.finish_reason is not None:
                self.remove(request)
