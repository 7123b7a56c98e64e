"""A verdict becomes tokens: cache, stops, statistics, events. The only writer of a running request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from foretell.engine.request import Logprob, Request
from foretell.kv.cache import Cache
from foretell.sampling.shape import top_logprobs
from foretell.types import Drafts, Plan, Seq, Verdict


def commit(
    plan: Plan, drafts: Drafts, verdict: Verdict, logits: Tensor, cache: Cache, requests: Mapping[int, Request]
) -> list[Sequence[int]]:
    """Apply one step. logits: [L, V] raw, of each ready request's root and nodes in turn.

    Returns for each request of the plan the rows, within the request, that are committed now. A request that a stop
    ends keeps no more than its text; it is over (`finish_reason` set), the caller releases it.
    """
    kept: list[Sequence[int]] = [range(chunk) for chunk in plan.chunks]
    base = 0
    for b, (i, (tokens, parents)) in enumerate(zip(plan.ready, drafts.trees(), strict=True)):
        seq, path = plan.seqs[i], verdict.accepted[b]
        request = requests[seq.id]
        request.stats.count_round(parents, path)
        seq.rounds += 1
        new = [tokens[node] for node in path] + [verdict.next_token[b]]
        rows = [base] + [base + 1 + node for node in path]
        taken = _push(request, new, rows, logits)
        kept[i] = [*kept[i], *(plan.chunks[i] + node for node in path[:taken])]
        base += 1 + len(tokens)
    for seq, rows_kept in zip(plan.seqs, kept, strict=True):
        cache.commit(seq, rows_kept)
    return kept


def _push(request: Request, new: Sequence[int], rows: Sequence[int], logits: Tensor) -> int:
    """Give the request its new tokens until it is finished; returns how many of its accepted nodes stay cached."""
    if request.finish_reason is not None:  # an interrupted step ended it but could not let it go
        return 0
    seq = request.seq
    top = seq.sampling.logprobs
    for n, (token, row) in enumerate(zip(new, rows, strict=True)):
        logprob = None
        if top is not None:
            value, best = top_logprobs(logits[row], token, top)
            logprob = Logprob(token, value, tuple(best))
        append(seq, token)
        if not request.push(token, n < len(new) - 1, logprob):
            request.flush()
            return n
    request.flush()
    return len(new) - 1


def append(seq: Seq, token: int) -> None:
    seq.tokens.append(token)
    if seq.counts is not None:
        seq.counts[1, token] += 1
