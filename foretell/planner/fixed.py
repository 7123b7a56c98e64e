"""The same number of draft nodes in every round."""

from __future__ import annotations

from collections.abc import Sequence

from foretell.types import Drafts, Seq, Verdict


class FixedPlanner:
    """At most `draft_tokens` nodes, fewer where the request asks so or its end is near."""

    def __init__(self, draft_tokens: int, max_context: int) -> None:
        self.draft_tokens, self.max_context = draft_tokens, max_context

    def budgets(self, seqs: Sequence[Seq]) -> list[int]:
        return [self._budget(seq) for seq in seqs]

    def observe(self, seqs: Sequence[Seq], drafts: Drafts, verdict: Verdict) -> None:
        """Nothing that was seen changes a fixed number."""

    def _budget(self, seq: Seq) -> int:
        asked = seq.sampling.draft_tokens
        limit = self.draft_tokens if asked is None else min(asked, self.draft_tokens)
        left = min(seq.sampling.max_tokens - seq.generated, self.max_context - len(seq.tokens))
        return max(0, min(limit, left - 1))  # the round's last token is the target's own
