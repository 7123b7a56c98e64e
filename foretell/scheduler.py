"""Who takes part in the next step, how many prompt tokens are computed, who has to give up its place. No tensors.

A request is a list of tokens of which the first `cached` are in the cache; prefill is not a mode. Each step, running
requests come first, in order of arrival; then waiting ones join while rows, places and slots are left. When slots run
out, drafts are given up first, then the request that arrived last.
"""

from __future__ import annotations

from collections import deque

from foretell.types import Plan, Planner, Room, Seq


class Scheduler:
    """max_batch: requests running at once. max_rows: rows a step computes beyond drafts, shared by all requests."""

    def __init__(self, room: Room, max_batch: int, max_rows: int) -> None:
        self.room, self.max_batch, self.max_rows = room, max_batch, max_rows
        self.waiting: deque[Seq] = deque()
        self.running: list[Seq] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Seq) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Seq) -> None:
        """The request is over, finished or not: give back what it holds."""
        if seq in self.running:
            self.running.remove(seq)
            self.room.release(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def preempt(self, seq: Seq) -> None:
        """Take the request's place in the cache; it comes back first and computes its tokens anew."""
        self.running.remove(seq)
        self.room.release(seq)
        self.waiting.appendleft(seq)

    def plan(self, planner: Planner) -> Plan:
        """The next step, its slots reserved. `Plan.seqs` is empty only if nothing can run."""
        preempted: list[Seq] = []
        admitted = self._admit()
        chunks = self._chunks()
        order = [seq for seq in self.running if seq.id in chunks]
        decoding = [seq for seq in order if seq.cached + chunks[seq.id] == len(seq.tokens)]
        rows = sum(chunks[seq.id] for seq in order)
        budgets = dict(zip((s.id for s in decoding), planner.budgets(decoding, rows), strict=True))
        spare = self.room.available - rows
        for seq in decoding:  # drafts have what the tokens themselves leave, so no one is preempted for a draft
            budgets[seq.id] = max(0, min(budgets[seq.id], spare))
            spare -= budgets[seq.id]
        reserved: list[Seq] = []
        for seq in order:
            if seq not in self.running:  # gave up its place to an earlier one
                continue
            while not self.room.reserve(seq, chunks[seq.id] + budgets.get(seq.id, 0)):
                last = self.running[-1]
                if last is seq and len(self.running) == 1:
                    raise MemoryError(f"request {seq.id} needs more slots than the cache has")
                self.preempt(last)
                preempted.append(last)
                if last is seq:
                    break
            else:
                reserved.append(seq)
        return Plan(
            seqs=reserved,
            chunks=[chunks[seq.id] for seq in reserved],
            budgets=[budgets.get(seq.id, 0) for seq in reserved],
            admitted=[seq for seq in admitted if seq not in preempted],
            preempted=[seq for seq in preempted if seq not in admitted],
        )

    def _admit(self) -> list[Seq]:
        """Let waiting requests in while there is a place and room for what each still has to compute."""
        admitted: list[Seq] = []
        pledged = sum(len(seq.tokens) - seq.cached for seq in self.running)
        while self.waiting and len(self.running) < self.max_batch:
            seq = self.waiting[0]
            if self.running and pledged + len(seq.tokens) > self.room.available:
                break
            if not self.room.admit(seq):
                break
            pledged += len(seq.tokens) - seq.cached
            self.running.append(self.waiting.popleft())
            admitted.append(seq)
        return admitted

    def _chunks(self) -> dict[int, int]:
        """Uncached tokens each running request computes in this step, by id."""
        chunks: dict[int, int] = {}
        left = self.max_rows
        for seq in self.running:
            tail = len(seq.tokens) - seq.cached
            chunk = 1 if tail == 1 else min(tail, left)  # a lone token always runs: prompts must not starve it
            if chunk > 0:
                chunks[seq.id] = chunk
                left -= chunk
        return chunks
