"""The target's law: raw logits to log p, each row by itself, in float64.

Order of operations, that of vLLM V1 (`v1/sample/sampler.py`): logit_bias; repetition_penalty over prompt and output;
frequency_penalty and presence_penalty over the output; then temperature; min_p; top_k; top_p on what top_k left,
renormalised. (vLLM forbids the stop ids of min_tokens before the bias, here it is after the penalties: a forbidden
token stays forbidden through both, so the law is the same.) The output at a row includes the draft nodes on its own
path, the row's node too: the law at a node is the one plain decoding has after those tokens.
Unlike vLLM, ties are cut by a rule: the likelier token first, then the lower id, so exactly top_k tokens stay and the
support depends on the row alone.

A row is computed on the CPU without looking at any other, so it is the same to the last bit whatever is asked with it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foretell.sampling.noise import Array
from foretell.types import Drafts, Seq

HEAD = 1024  # tokens sorted first when looking for the nucleus


class Shaper:
    """`types.Law` over the logits of one step.

    A row with a NaN or +inf, or one without any finite logit, raises FloatingPointError: the model is broken there.
    A row that the request's own bias and min_tokens leave without a token is a point at the request's lowest stop id
    (the text ends); without a stop id it raises FloatingPointError too.
    """

    def __init__(self, logits: Tensor, drafts: Drafts, seqs: Sequence[Seq]) -> None:
        """logits: [L, V], L = B + N, raw; row `indptr[b] + b` is request b's root, its nodes follow in order."""
        self.logits = logits
        self.seqs = seqs
        self.trees = drafts.trees()
        self.roots = [start + b for b, start in enumerate(drafts.indptr.tolist()[:-1])]

    def __call__(self, rows: Sequence[int]) -> Tensor:
        """rows: [M] -> float64 [M, V] on the CPU, log p up to a constant, the largest entry 0."""
        out = np.empty((len(rows), self.logits.shape[-1]))
        for row, x in zip(rows, out, strict=True):
            b = bisect_right(self.roots, row) - 1
            seq = self.seqs[b]
            raw, bent = numbers(self.logits[row]), bends(seq)
            token = None if bent or seq.sampling.temperature > 0 else certain(raw, seq)
            if token is not None:  # a greedy row need not be widened
                point(x, token)
                continue
            np.copyto(x, raw)
            if bent:
                adjust(x, seq, self.path(b, row - self.roots[b] - 1))
            shape(x, seq)
        return torch.from_numpy(out)

    def path(self, b: int, node: int) -> list[int]:
        """The tokens from request b's first level down to the node; the root (-1) has none. Order does not matter."""
        tokens, parents = self.trees[b]
        path = []
        while node >= 0:
            path.append(tokens[node])
            node = parents[node]
        return path


def bends(seq: Seq) -> bool:
    """Whether `adjust` has anything to do for the request."""
    sampling = seq.sampling
    return bool(sampling.logit_bias) or sampling.penalised or seq.generated < sampling.min_tokens


def adjust(x: Array, seq: Seq, path: Sequence[int]) -> None:
    """In place, float64 [V] raw: bias, penalties and min_tokens; path: the draft tokens before the chosen one."""
    sampling = seq.sampling
    if sampling.logit_bias:
        x[list(sampling.logit_bias)] += np.array(list(sampling.logit_bias.values()), dtype=np.float64)
    if sampling.penalised:
        assert seq.counts is not None, "a request with penalties counts its tokens"
        counts: Array = seq.counts.numpy(force=True)
        output = counts[1].astype(np.float64)
        np.add.at(output, list(path), 1.0)
        if sampling.repetition_penalty != 1:
            seen = np.flatnonzero((counts[0] > 0) | (output > 0))
            old = x[seen]
            x[seen] = np.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
        x -= sampling.frequency_penalty * output
        x -= sampling.presence_penalty * (output > 0)
    if seq.generated + len(path) < sampling.min_tokens:
        x[list(seq.stop_ids)] = -math.inf


def shape(x: Array, seq: Seq) -> None:
    """In place, float64 [V]: after `adjust` -> log p up to a constant with largest entry 0."""
    sampling = seq.sampling
    token = certain(x, seq)
    if token is not None:
        point(x, token)
    else:
        soften(x, sampling.temperature)
        if sampling.min_p > 0:
            x[x < math.log(sampling.min_p)] = -math.inf
        if 0 < sampling.top_k < x.size:
            x[~best_mask(x, sampling.top_k)] = -math.inf
        if sampling.top_p < 1:
            cut = sampling.min_p > 0 or sampling.top_k > 0
            alive: Array | slice = np.flatnonzero(x > -math.inf) if cut else slice(None)
            rest = x[alive]
            rest[~best_mask(rest, nucleus_size(rest, sampling.top_p))] = -math.inf
            x[alive] = rest


def certain(x: Array, seq: Seq) -> int | None:
    """The token, if only one can be chosen from x [V], raw: of a greedy request, or of a row that has none."""
    best = int(x.argmax())  # the first maximum; the first NaN if there is one
    if not math.isfinite(x[best]):
        return ending(x, seq)
    return best if seq.sampling.temperature == 0 else None


def point(x: Array, token: int) -> None:
    """Make x, float64 [V], the point mass at token."""
    x[:] = -math.inf
    x[token] = 0.0


def ending(x: Array, seq: Seq) -> int:
    """The token of a row in which none can be chosen: the lowest stop id, if the request's own wishes left nothing."""
    asked = seq.sampling.logit_bias or seq.generated < seq.sampling.min_tokens
    if np.isneginf(x).all() and asked and seq.stop_ids:
        return min(seq.stop_ids)
    raise FloatingPointError(
        f"request {seq.id}: no token can be chosen, for the model's logits are NaN, infinite or all forbidden"
    )


def soften(x: Array, temperature: float) -> None:
    """In place, float64 [V] with a finite maximum: divided by temperature, shifted to a largest entry of 0.

    The shift comes first: no temperature above 0 can overflow, and target and draft of equal logits stay equal.
    """
    x -= x.max()
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
        x /= temperature


def softmax(x: Array) -> Array:
    """float64 [V] with largest entry 0 -> float64 [V], probabilities; an entry of -inf costs nothing."""
    alive = np.flatnonzero(x > -math.inf)
    mass = np.exp(x[alive])
    p = np.zeros(x.shape)
    p[alive] = mass / mass.sum()
    return p


def numbers(row: Tensor) -> Array:
    """row: [V] of any dtype and device -> [V] of a dtype that numpy knows, the same numbers; not to be written to."""
    array: Array = (row.float() if row.dtype == torch.bfloat16 else row).numpy(force=True)
    return array


def widen(row: Tensor, out: Array) -> None:
    """row: [V] of any dtype and device, copied into out: float64 [V]."""
    np.copyto(out, numbers(row))


def best_mask(x: Array, k: int) -> Array:
    """bool [n], the k largest of x [n], of ties the lower ids; 0 < k <= n."""
    threshold = np.partition(x, x.size - k)[x.size - k]
    mask: Array = x > threshold
    mask[np.flatnonzero(x == threshold)[: k - np.count_nonzero(mask)]] = True
    return mask


def best_ids(x: Array, k: int) -> Array:
    """int64 [k], the ids of the k largest of x [n], larger first, ties by lower id; 0 < k <= n."""
    if k == 1:
        return np.array([x.argmax()])
    ids = np.flatnonzero(best_mask(x, k))
    order: Array = ids[np.argsort(-x[ids], kind="stable")]
    return order


def nucleus_size(x: Array, top_p: float, head: int = HEAD) -> int:
    """How few of the likeliest of x [n], log p up to a constant, have probabilities that reach top_p together.

    An entry stays while those before it hold less than top_p. The `head` largest are a prefix of all in order, and a
    running sum over a prefix is a prefix of the running sum: the shortcut gives what the full sort gives, to the bit.
    """
    enough = top_p * float(np.exp(x).sum())
    size = 0
    for k in (head, x.size):
        largest = np.partition(x, x.size - k)[x.size - k :] if k < x.size else x
        reached = np.cumsum(np.exp(-np.sort(-largest)))
        size = 1 + int(np.searchsorted(reached, enough, side="left"))
        if size <= largest.size:
            break
    return min(size, x.size)  # rounding may leave even the whole below what is enough


def top_logprobs(logits: Tensor, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
    """logits: [V], raw -> log-probability of the token and the n best (id, log-probability), ties by lower id.

    Computed in float64, reported as float32. The model's own law: before penalties and temperature.
    """
    raw = np.empty(logits.shape)
    widen(logits, raw)
    x = raw.copy()
    soften(x, 1.0)
    x -= math.log(np.exp(x).sum())
    x = x.astype(np.float32)
    # ordered by the logits: rounding to float32 must not make ties that were none
    return float(x[token]), [(int(i), float(x[i])) for i in best_ids(raw, min(n, raw.size))] if n else []
