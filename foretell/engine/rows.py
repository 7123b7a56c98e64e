"""A plan and its drafts as the rows of one forward: uncached tokens, then nodes. Never pads."""

from __future__ import annotations

import torch

from foretell.kv.cache import Cache
from foretell.types import Drafts, Keys, Plan, Rows, Seq


def build_rows(plan: Plan, drafts: Drafts, cache: Cache, vocab_size: int) -> Rows:
    """drafts: one tree for each ready request. ValueError if a drafter broke its contract."""
    trees = drafts.trees()
    ready = plan.ready
    if len(trees) != len(ready):
        raise ValueError(f"the drafter returned {len(trees)} trees for {len(ready)} requests")
    nodes = dict(zip(ready, trees, strict=True))
    indptr = [0]
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    slots: list[int] = []
    want: list[int] = []
    for i, (seq, chunk) in enumerate(zip(plan.seqs, plan.chunks, strict=True)):
        base = len(tokens)
        tokens += seq.tokens[seq.cached : seq.cached + chunk]
        positions += range(seq.cached, seq.cached + chunk)
        parents += range(-1, chunk - 1)
        if i in nodes:
            node_tokens, node_parents = nodes[i]
            _check_tree(node_tokens, node_parents, plan.budgets[i], vocab_size)
            want += range(base + chunk - 1, base + chunk + len(node_tokens))
            tokens += node_tokens
            for parent in node_parents:
                parents.append(chunk + parent)  # the root's row is chunk - 1
                positions.append(positions[base + chunk + parent] + 1)
        slots += cache.reserved(seq)[: len(tokens) - base]
        indptr.append(len(tokens))
    return Rows(
        indptr=torch.tensor(indptr, dtype=torch.int32),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        parents=torch.tensor(parents, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int64),
        want=torch.tensor(want, dtype=torch.int64),
        tables=torch.tensor([seq.table for seq in plan.seqs], dtype=torch.int32),
        context=torch.tensor([seq.cached for seq in plan.seqs], dtype=torch.int32),
    )


def _check_tree(tokens: list[int], parents: list[int], budget: int, vocab_size: int) -> None:
    if len(tokens) > budget:
        raise ValueError(f"the drafter returned {len(tokens)} nodes where at most {budget} were asked for")
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"the drafter proposed token {token}, outside the vocabulary of {vocab_size}")
        if not -1 <= parent < i:
            raise ValueError(f"the drafter gave node {i} the parent {parent}, which does not come before it")


def keys(seqs: list[Seq]) -> Keys:
    """Where each request's root row draws its noise."""
    return Keys(
        seed=[seq.seed for seq in seqs],
        position=[len(seq.tokens) for seq in seqs],
        round=[seq.rounds for seq in seqs],
        temperature=[seq.sampling.temperature for seq in seqs],
    )
