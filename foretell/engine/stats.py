"""Counters of one request: what was drafted, what of it was accepted, and where the time went."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Always 0 <= accepted <= drafted, and emitted <= accepted + rounds, equal unless a stop cut the text.

    rounds: verifications, plain ones included. drafted: nodes the drafter proposed. accepted: those on the target's
    path. riders: rows computed beside the nodes for the drafter's sake alone. emitted: tokens generated. *_by_depth:
    index 0 is the first token after the root. accepted_by_node: in how many rounds the node of that place in the
    drafter's own order was accepted; a drafter that proposes its best nodes first would have had the sum of the first k
    accepted with a budget of k. prefill_s: time of the steps before the first token, decode_s: of those
    after it; draft_s, verify_s: their parts spent in the drafter, and in the target's forward with verification. A step
    shared by several requests counts for each. cached_tokens: prompt tokens found in the prefix cache. by_member: of
    a drafter of several members, [drafted, accepted] nodes that each guessed; a node may be several members'. plain_s:
    what plain decoding would have taken in place of decode_s, by the measured costs of this machine; wasted_s: the part
    of decode_s that went to drafts which were not accepted; both 0 where the costs are not known.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    riders: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_node: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    plain_s: float = 0.0
    wasted_s: float = 0.0
    cached_tokens: int = 0
    by_member: dict[str, list[int]] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float:
        """alpha: accepted / drafted, 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """E: tokens of a target forward, its own token included."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def speedup(self) -> float:
        """Decoding against plain decoding, estimated; 0 where the costs are not known. The estimate is made in every
        step from its own clock (`planner.gain`): the time outside drafting, and of the forward the share that its rows
        without the drafts would have needed by the table of costs, for as many steps as it brought tokens. Nothing is
        decoded plainly for it."""
        return self.plain_s / self.decode_s if self.decode_s else 0.0

    @property
    def wasted_share(self) -> float:
        """The part of decoding that went to drafts which were not accepted, estimated likewise."""
        return self.wasted_s / self.decode_s if self.decode_s else 0.0

    def estimates(self) -> dict[str, float | None]:
        """Both, for a report; None where the costs are not known."""
        known = self.plain_s > 0
        return {
            "estimated_speedup": self.speedup if known else None,
            "wasted_share": self.wasted_share if known else None,
        }

    def count_round(self, parents: Sequence[int], accepted: Sequence[int]) -> None:
        """One verification of a tree (parents, -1 is the root), of which the path of the `accepted` nodes was kept."""
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.rounds += 1
        self.drafted += len(depths)
        self.accepted += len(accepted)
        for depth in depths:
            _grow(self.drafted_by_depth, depth + 1)
            self.drafted_by_depth[depth] += 1
        _grow(self.accepted_by_depth, len(self.drafted_by_depth))
        _grow(self.accepted_by_node, len(depths))
        for depth, node in enumerate(accepted):
            self.accepted_by_depth[depth] += 1
            self.accepted_by_node[node] += 1

    def add_members(self, shares: Mapping[str, Sequence[int]]) -> None:
        for name, counts in shares.items():
            mine = self.by_member.setdefault(name, [0, 0])
            for i, count in enumerate(counts):
                mine[i] += count

    @staticmethod
    def pooled(parts: Iterable[Stats]) -> Stats:
        """The sums: rates of the result are those of all rounds together, never averages of ratios."""
        total = Stats()
        for part in parts:
            for name in ("rounds", "drafted", "accepted", "emitted", "riders", "cached_tokens"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            for name in ("prefill_s", "decode_s", "draft_s", "verify_s", "plain_s", "wasted_s"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            total.add_members(part.by_member)
            for name in ("accepted_by_depth", "drafted_by_depth", "accepted_by_node"):
                mine, theirs = getattr(total, name), getattr(part, name)
                _grow(mine, len(theirs))
                for i, count in enumerate(theirs):
                    mine[i] += count
        return total


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))


class Lookout:
    """Notices a drafter that gains nothing: says so once, when none of its drafts was accepted in `ROUNDS` rounds that
    had room for some (a draft model that is another's, a head of other weights)."""

    ROUNDS = 50

    def __init__(self) -> None:
        self._rounds = 0

    def round(self, room: Sequence[int], accepted: Iterable[Sequence[int]]) -> None:
        """room: nodes each request might have had."""
        if self._rounds >= self.ROUNDS:
            return
        self._rounds = 0 if any(accepted) else self._rounds + sum(n > 0 for n in room)
        if self._rounds >= self.ROUNDS:
            logging.getLogger("foretell").warning(
                "none of the drafts was accepted in %d rounds: this drafter costs time and gains nothing here; drafter "
                "'none' is as good",
                self._rounds,
            )
