"""The controller: each step as many nodes as pay, for every request, none included.

What a row costs comes from the measured table, what drafting costs from the clock, what nodes bring from what came of
earlier ones. Drafters of two kinds: those that say of every node how likely it is (`scored`) draft first and lose what
does not pay; for others the number is chosen before, from what nodes at the same place brought. A request whose drafts
do not even pay for the drafting goes without for a while, and tries again now and then.

Decisions see earlier rounds and the clock only. Under `match` they change the speed and nothing else; under the other
rules the law stays and the tokens vary with the load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretell.planner.accept import DECAY, Depths, Scale
from foretell.planner.budget import choose, prices
from foretell.planner.cost import Costs
from foretell.planner.fixed import room
from foretell.types import Drafts, Round, Seq

PACE = 0.05  # weight of the newest step in running means
NAP, LONGEST = 4, 32  # rounds a scored request goes without drafts when they do not pay: at first, and at most
CROWD = 2  # requests at once from which on naps are longer: each pays for its tries, and what they tell is told to all
PROBE = 0.008  # of the time, at most, goes to trying again where drafts are known only by their past
STEADY = 0.1  # weight of the newest drafts in what drafting is worth to a request
REPRICE = 8  # steps of an equal load for which the drafter is told the same prices: they change slowly
FAR = 16  # rows that a correction reaches upwards
VARY = 16  # rounds after which such a drafter's number is varied
FORGET = 0.7  # a try after a pause counts more than usual: the text may have changed


@dataclass(slots=True)
class _State:
    """What is known about one request."""

    net: float  # running mean of the tokens that a round of drafting left after its price
    scale: Scale = field(default_factory=Scale)
    depths: Depths = field(default_factory=Depths)
    nap: int = 0  # rounds still to go without drafts
    length: int = NAP  # of the next nap
    asked: bool = False  # for drafts, in this step
    known: bool = False  # it was asked before: the first time a drafter reads the whole prompt
    probing: bool = False
    rounds: int = 0  # with drafts, of a drafter known by its past


class _Line:
    """seconds = each * requests + more * nodes, fitted to the latest rounds; some hundred of them, since most are alike
    and only those that differ tell the two apart. A few rounds that were never seen, cheap ones, count with them: a
    slow first round must not make nodes so dear that none is ever tried again."""

    KEEP = 0.995
    CHEAP, FEW = (0.02, 0.005), 2  # of a forward, for each request and node; rounds with two nodes, and without any

    def __init__(self, forward: float) -> None:
        """forward: seconds of one over one row."""
        each, more = (share * forward for share in self.CHEAP)
        self._sums = [0.0] * 5  # of requests and nodes with each other, and of both with seconds
        for nodes in (0, 2) * self.FEW:
            self.see(1, nodes, each + more * nodes)
        self._unseen, self._sums = self._sums, [0.0] * 5

    def see(self, requests: float, nodes: float, seconds: float) -> None:
        new = (requests * requests, requests * nodes, nodes * nodes, requests * seconds, nodes * seconds)
        self._sums = [self.KEEP * old + one for old, one in zip(self._sums, new, strict=True)]

    def fit(self) -> tuple[float, float]:
        """each, more; neither negative."""
        rr, rn, nn, ry, ny = (a + b for a, b in zip(self._sums, self._unseen, strict=True))
        determinant = rr * nn - rn * rn  # above 0, since rounds that differ are among them
        each, more = (ry * nn - ny * rn) / determinant, (ny * rr - ry * rn) / determinant
        if more < 0:
            return ry / rr, 0.0
        return (each, more) if each >= 0 else (0.0, ny / nn)


class Controller:
    """most: nodes of a request at most. scored: the drafter gives every node a chance."""

    def __init__(self, costs: Costs, most: int, max_context: int, *, scored: bool) -> None:
        self.costs, self.most, self.max_context, self.scored = costs, most, max_context, scored
        self.prices: Sequence[float] = ()
        self._priced, self._age = (0, 0, 0), 0  # the load that they are for, and for how many steps they have been
        self._states: dict[int, _State] = {}
        self._scale, self._depths = Scale(), Depths()
        self._drafting = _Line(costs.forward(1, 0.0, 1))
        self._slow = 1.0  # seconds of the clock for one of the table
        self._truer: dict[int, float] = {}  # by rows: what a forward takes for what the table says, else 1
        self._rest = 0.0  # seconds of a step outside drafting and forward, for each request
        self._tokens, self._nodes = 1.0, 0.0  # of a request in a step
        self._rate = 0.0  # tokens a second of the table
        self._net = 0.3  # of the latest rounds of all requests, which a new one begins with
        self._rows, self._context = 0, 0.0  # of the step without drafts: rows, tokens that a row more sees

    def budgets(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        """rows: of the step without drafts, these requests' roots among them."""
        self._forget(seqs)
        self._rows = rows
        self._context = sum(len(seq.tokens) for seq in seqs) / max(1, len(seqs))
        self._rate = self._present_rate(len(seqs))
        rooms = [self._room(seq) for seq in seqs]
        if not seqs or not any(rooms):
            return rooms
        if not self.scored:
            return self._by_depth(seqs, rooms)
        load = rows, max(rooms), sum(n > 0 for n in rooms)
        self._age += 1
        if load != self._priced or self._age > REPRICE:
            self._priced, self._age = load, 0
            more, bold = self._drafting.fit()[1] * self._rate / self._slow, max(0.05, self._scale.factor)
            self.prices = [(p + more) / bold for p in prices(self._price, *load[1:])]
        return rooms

    def trim(self, seqs: Sequence[Seq], drafts: Drafts) -> Drafts:
        """The drafts less the nodes that do not pay."""
        if drafts.worth is None or drafts.riders is not None:
            return drafts
        gains = self._gains(seqs, drafts)
        counts = choose(gains, self._price)
        each, more = self._drafting.fit()
        sizes = drafts.sizes()
        price = self._price(sum(counts)) / max(1, sum(counts))
        for seq, row, count, size in zip(seqs, gains, counts, sizes, strict=True):
            state = self._states[seq.id]
            if state.asked:
                spent = self._rate * (each + more * size) / self._slow
                self._judge(state, sum(row[:count]) - price * count - spent, max(1.0, len(seqs) / CROWD))
        return drafts if counts == sizes else drafts.first(counts)

    def observe(self, round: Round) -> None:
        sizes = round.drafts.sizes()
        requests, nodes = len(round.seqs), sum(sizes)
        if not requests:
            return
        self._time(round)
        asked = [self._state(seq) for seq, n in zip(round.seqs, round.asked, strict=True) if n > 0]
        if asked and all(state.known for state in asked):
            self._drafting.see(len(asked), sum(round.drafted), round.draft_s)
        for state in asked:
            state.known = True
            if self.scored and nodes == 0:  # what nobody tries any more is forgotten, or it would never be tried again
                state.scale.see(0.0, 0.0)
                self._scale.see(0.0, 0.0)
        self._rest += PACE * (round.verify_s / self._slow / requests - self._rest)
        accepted = [len(path) for path in round.verdict.accepted]
        self._tokens += PACE * (1 + sum(accepted) / requests - self._tokens)
        self._nodes += PACE * (nodes / requests - self._nodes)
        self._learn(round, sizes)

    def _time(self, round: Round) -> None:
        """Hold the clock against the table: the machine as a whole may be slower now, and a number of rows may cost
        more beside everything else than it did alone."""
        ratio = round.forward_s / self.costs.forward(round.rows, round.context, len(round.seqs))
        truer = self._truer.get(round.rows, 1.0)
        self._slow += PACE * (min(5.0, max(0.2, ratio / truer)) - self._slow)
        self._truer[round.rows] = truer + PACE * (min(2.0, max(0.5, ratio / self._slow)) - truer)

    def _forward(self, rows: int, requests: int) -> float:
        """Seconds of the table, corrected. A number of rows that was not seen yet costs as much more than the nearest
        lower one as the table says."""
        seconds = self.costs.forward(rows, self._context, requests)
        for near in range(rows, max(0, rows - FAR), -1):
            if near in self._truer:
                return seconds + (self._truer[near] - 1) * self.costs.forward(near, self._context, requests)
        return seconds

    def _learn(self, round: Round, sizes: Sequence[int]) -> None:
        worth = None if round.drafts.worth is None else round.drafts.worth.tolist()
        shared = 1 - (1 - DECAY) / len(round.seqs)  # a round of many requests ages what all showed no faster
        start = 0
        for seq, size, path in zip(round.seqs, sizes, round.verdict.accepted, strict=True):
            state = self._state(seq)
            if size and worth is not None:
                said = sum(worth[start : start + size])
                state.scale.see(said, len(path))
                self._scale.see(said, len(path), shared)
            elif size:
                state.depths.see(size, path, FORGET if state.probing else DECAY)
                self._depths.see(size, path, shared)
                if state.probing and path:
                    state.nap = 0  # look again at once
            start += size

    def _forget(self, seqs: Sequence[Seq]) -> None:
        if len(self._states) > 2 * len(seqs) + 64:
            running = {seq.id for seq in seqs}
            self._states = {id: state for id, state in self._states.items() if id in running}

    def _state(self, seq: Seq) -> _State:
        return self._states.setdefault(seq.id, _State(self._net))

    def _room(self, seq: Seq) -> int:
        """Nodes the request may have; 0 while it naps."""
        state = self._state(seq)
        most = room(seq, self.most, self.max_context)
        if self.scored and state.nap > 0:
            state.nap -= 1
            most = 0
        state.asked = most > 0
        return most

    def _present_rate(self, requests: int) -> float:
        """Tokens a second, of the table, at the present load and acceptance; that of plain decoding at least."""
        if not requests:
            return 0.0
        rest = self._rest * requests
        each, more = (seconds / self._slow for seconds in self._drafting.fit())
        plain = requests / (self._forward(requests, requests) + rest)
        if self._nodes < 0.01:
            return plain
        seconds = self._forward(round(requests * (1 + self._nodes)), requests) + rest
        seconds += requests * (each + more * self._nodes)
        return max(plain, requests * self._tokens / seconds)

    def _price(self, nodes: int) -> float:
        """Tokens lost by the time that so many rows more take."""
        return self._rate * (self._forward(self._rows + nodes, 1) - self._forward(self._rows, 1))

    def _gains(self, seqs: Sequence[Seq], drafts: Drafts) -> list[list[float]]:
        assert drafts.worth is not None
        worth, ends = drafts.worth.tolist(), drafts.indptr.tolist()
        gains = []
        for seq, a, b in zip(seqs, ends, ends[1:], strict=False):
            state = self._states.get(seq.id)
            factor, least, row = self._scale.of(state.scale if state else None), 1.0, []
            for chance in worth[a:b]:
                least = min(least, factor * chance)
                row.append(least)
            gains.append(row)
        return gains

    def _judge(self, state: _State, net: float, crowd: float) -> None:
        """net: tokens that this round's drafting leaves. crowd: how many times as long as alone a nap is."""
        self._net += PACE * (net - self._net)
        state.net += STEADY * (net - state.net)
        if state.net < 0 or (crowd > 1 and max(net, self._net) < 0):
            state.nap, state.length, state.net = round(crowd * state.length), min(2 * state.length, LONGEST), 0.0
        elif net > 0:
            state.length = NAP

    def _by_depth(self, seqs: Sequence[Seq], rooms: Sequence[int]) -> list[int]:
        """Budgets from what nodes at the same place brought, and now and then a try where none seems to pay."""
        each, more = (self._rate * seconds / self._slow for seconds in self._drafting.fit())
        states = [self._states[seq.id] for seq in seqs]
        gains = [self._depths.chances(n, state.depths) for n, state in zip(rooms, states, strict=True)]
        counts = choose(gains, lambda n: self._price(n) + more * n)
        for i, (state, row) in enumerate(zip(states, gains, strict=True)):
            share = self._price(max(1, sum(counts))) / max(1, sum(counts))
            if counts[i] and sum(row[: counts[i]]) < counts[i] * (share + more) + each:
                counts[i] = 0
            state.probing = counts[i] == 0 and rooms[i] > 0 and state.nap <= 0
            if state.probing:
                counts[i] = 1
                lost = share + more + each  # tokens that a try costs
                state.nap = max(NAP, math.ceil(lost / PROBE))
            elif counts[i] == 0:
                state.nap -= 1
            else:
                state.nap = 0
                state.rounds += 1
                if state.rounds % VARY == 0:  # what differs is what tells one more node's worth and cost
                    counts[i] = min(rooms[i], counts[i] + 1)
                elif state.rounds % VARY == VARY // 2:
                    counts[i] = max(1, 3 * counts[i] // 4)
        return counts
