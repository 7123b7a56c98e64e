"""The same number of draft nodes in every round."""

from __future__ import annotations

from collections.abc import Sequence

from foretell.types import Drafts, Round, Seq


def room(seq: Seq, most: int, max_context: int) -> int:
    """Nodes that a request may have in a round: `most`, fewer where it asks so or its end is near."""
    asked = seq.sampling.draft_tokens
    limit = most if asked is None else min(asked, most)
    left = min(seq.sampling.max_tokens - seq.generated, max_context - len(seq.tokens))
    return max(0, min(limit, left - 1))  # the round's last token is the target's own


class FixedPlanner:
    """At most `draft_tokens` nodes, fewer where the request asks so or its end is near."""

    prices: Sequence[float] = ()

    def __init__(self, draft_tokens: int, max_context: int) -> None:
        self.draft_tokens, self.max_context = draft_tokens, max_context

    def budgets(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        return [room(seq, self.draft_tokens, self.max_context) for seq in seqs]

    def trim(self, seqs: Sequence[Seq], drafts: Drafts) -> Drafts:
        return drafts

    def observe(self, round: Round) -> None:
        """Nothing that was seen changes a fixed number."""
