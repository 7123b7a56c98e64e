"""A plan and its drafts as the rows of one forward: uncached tokens, then nodes, then riders. Never pads."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from foretell.kv.cache import Cache
from foretell.types import Drafts, Keys, Plan, Rows, Seq, tensor


def build_rows(plan: Plan, drafts: Drafts, cache: Cache, vocab_size: int) -> Rows:
    """drafts: one tree for each ready request. ValueError if a drafter broke its contract."""
    trees, riders_of, ready = drafts.trees(), drafts.ridden(), plan.ready
    if len(trees) != len(ready):
        raise ValueError(f"the drafter returned {len(trees)} trees for {len(ready)} requests")
    if len(riders_of) != len(trees):
        raise ValueError(f"the drafter returned {len(trees)} trees and counted the riders of {len(riders_of)}")
    drafted = dict(zip(ready, zip(trees, riders_of, strict=True), strict=True))
    indptr = [0]
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    slots: list[int] = []
    judged: list[int] = []
    ridden: list[int] = []
    for i, (seq, chunk) in enumerate(zip(plan.seqs, plan.chunks, strict=True)):
        base = len(tokens)
        tokens += seq.tokens[seq.cached : seq.cached + chunk]
        positions += range(seq.cached, seq.cached + chunk)
        parents += range(-1, chunk - 1)
        if i in drafted:
            (tree_tokens, tree_parents), riders = drafted[i]
            _check_tree(tree_tokens, tree_parents, riders, plan.budgets[i], vocab_size)
            tokens += tree_tokens
            judged += range(base + chunk - 1, len(tokens) - riders)
            ridden += range(len(tokens) - riders, len(tokens))
            for parent in tree_parents:
                parents.append(chunk + parent)  # the root's row is chunk - 1
                positions.append(positions[base + chunk + parent] + 1)
        slots += cache.reserved(seq)[: len(tokens) - base]
        indptr.append(len(tokens))
    return Rows(
        indptr=tensor(indptr, np.int32),
        tokens=tensor(tokens, np.int64),
        positions=tensor(positions, np.int64),
        parents=tensor(parents, np.int32),
        slots=tensor(slots, np.int64),
        want=tensor(judged + ridden, np.int64),
        tables=tensor([seq.table for seq in plan.seqs], np.int32),
        context=tensor([seq.cached for seq in plan.seqs], np.int32),
    )


def mean_context(rows: Rows) -> float:
    """Tokens that a row sees, on average."""
    positions: list[int] = rows.positions.tolist()
    return sum(positions) / len(positions) + 1


def lines(plan: Plan, drafts: Drafts) -> tuple[list[range], list[range]]:
    """`Seen.judged` and `Seen.riders` of these rows, while nothing of them is committed."""
    sizes, counts = [0] * len(plan.seqs), [0] * len(plan.seqs)
    for i, (tokens, _), riders in zip(plan.ready, drafts.trees(), drafts.ridden(), strict=True):
        sizes[i], counts[i] = 1 + len(tokens) - riders, riders
    ends = list(accumulate(sizes + counts, initial=0))
    spans = [range(a, b) for a, b in pairwise(ends)]
    return spans[: len(sizes)], spans[len(sizes) :]


def _check_tree(tokens: list[int], parents: list[int], riders: int, budget: int, vocab_size: int) -> None:
    if not 0 <= riders <= len(tokens):
        raise ValueError(f"the drafter returned {len(tokens)} drafts and said that {riders} of them are riders")
    if len(tokens) > budget:
        kind = "nodes and riders" if riders else "nodes"
        raise ValueError(f"the drafter returned {len(tokens)} {kind} where at most {budget} were asked for")
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"the drafter proposed token {token}, outside the vocabulary of {vocab_size}")
        if not -1 <= parent < i:
            kind = "node" if i < len(tokens) - riders else "rider"  # riders come last: none is a node's parent
            raise ValueError(f"the drafter gave {kind} {i} the parent {parent}, which does not come before it")


def keys(seqs: list[Seq]) -> Keys:
    """Where each request's root row draws its noise."""
    return Keys(
        seed=[seq.seed for seq in seqs],
        position=[len(seq.tokens) for seq in seqs],
        round=[seq.rounds for seq in seqs],
        temperature=[seq.sampling.temperature for seq in seqs],
    )
