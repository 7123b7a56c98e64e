"""What speculation gains, from a round's own clock: never from two different moments of a busy machine."""

from __future__ import annotations

from foretell.planner.cost import Costs
from foretell.types import Round


def gain(costs: Costs, round: Round) -> tuple[float, float]:
    """plain_s: what plain decoding would have taken for the round's tokens, had it run at this moment; the table tells
    the share of the forward that it would have needed. wasted_s: the time that went to drafting and verifying nodes
    which were not accepted. Both of all requests together."""
    nodes, requests = len(round.drafts.tokens), len(round.seqs)
    accepted = sum(map(len, round.verdict.accepted))
    rows = round.rows - nodes
    share = costs.forward(rows, round.context, requests) / costs.forward(round.rows, round.context, requests)
    plain = (1 + accepted / requests) * (round.forward_s * share + round.verify_s)
    extra = round.draft_s + round.forward_s * (1 - share)
    return plain, extra * (1 - accepted / nodes) if nodes else round.draft_s
