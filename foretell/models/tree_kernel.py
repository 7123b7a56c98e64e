"""Attention of a GPU's block of rows as one Triton kernel: each row walks its own keys where they lie in the cache.

A row's program knows that row alone: its slots in order of position, of a committed text or of a branch of a tree,
`TILE` at a time with a running maximum, as many tiles as its length needs. So its result cannot depend on the rows
beside it, nor on how far their texts reach. In Triton's interpreter (TRITON_INTERPRET=1) it runs on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foretell.models.ops import AttentionSpec

TILE = 64  # keys at a time
QUERIES = 16  # queries of a product at least: what a tensor core takes


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,  # [R, >= kv * group * dim], the queries first
    keys,  # int64 [A, T]
    lengths,  # int64 [A]
    k,  # [slots, kv, dim], as v is
    v,
    out,  # [R, kv * group * dim]
    q_line,  # elements from one line to the next, of each
    keys_line,
    slot_line,
    head_line,
    out_line,
    scale,
    window,  # 0: all keys
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    group, place = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    within = place < DIM
    own = (group[:, None] < GROUP) & within[None, :]
    at = (head * GROUP + group)[:, None] * DIM + place[None, :]
    queries = tl.load(q + row * q_line + at, mask=own, other=0.0).to(tl.float32) * scale
    length = tl.load(lengths + row)
    first = tl.maximum(length - window, 0) if window > 0 else length * 0
    most = tl.full([QUERIES], -3.0e38, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(first // TILE * TILE, length, TILE):
        time = start + tl.arange(0, TILE)
        seen = (time < length) & (time >= first)
        slots = tl.load(keys + row * keys_line + time, mask=seen, other=0)
        lines = slots[:, None] * slot_line + head * head_line + place[None, :]
        visible = seen[:, None] & within[None, :]
        tile_k = tl.load(k + lines, mask=visible, other=0.0).to(tl.float32)
        tile_v = tl.load(v + lines, mask=visible, other=0.0).to(tl.float32)
        scores = tl.dot(queries, tl.trans(tile_k), input_precision="ieee")
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(most, tl.max(scores, 1))
        weights, faded = tl.exp(scores - top[:, None]), tl.exp(most - top)
        total = total * faded + tl.sum(weights, 1)
        sums = sums * faded[:, None] + tl.dot(weights, tile_v, input_precision="ieee")
        most = top
    result = sums / total[:, None]
    tl.store(out + row * out_line + at, result.to(out.dtype.element_ty), mask=own)


def attend(
    qkv: Tensor, keys: Tensor, lengths: Tensor, cached: tuple[Tensor, Tensor], out: Tensor, spec: AttentionSpec
) -> None:
    """qkv: [R, W], a row's queries first; keys: int64 [A, T], the slots of a row's keys in order of position; lengths:
    int64 [A], how many they are; cached: keys and values [slots, kv, dim] of equal strides; out: [R, heads * dim], of
    which the first A rows are written."""
    k, v = cached
    group = spec.heads // spec.kv_heads
    _attend[(len(keys), spec.kv_heads)](
        qkv,
        keys,
        lengths,
        k,
        v,
        out,
        qkv.stride(0),
        keys.stride(0),
        k.stride(0),
        k.stride(1),
        out.stride(0),
        spec.scale,
        spec.window,
        GROUP=group,
        DIM=spec.dim,
        WIDTH=triton.next_power_of_2(spec.dim),
        TILE=TILE,
        QUERIES=max(QUERIES, triton.next_power_of_2(group)),
        enable_fp_fusion=True,
    )
