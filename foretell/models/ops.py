"""The operations of a decoder layer, and their PyTorch version: any dtype, any machine, the reference of the others.

Both versions keep one promise: the result at a row depends on that row's own path alone, bit for bit, not on the rows
computed with it. PyTorch's matrix products choose another order of summation for another shape, so here every product
has one shape, whatever is computed: linear layers see `ROWS` rows, padded; attention gathers each row's keys in order
of position (design, section 3) and works through them in tiles of `KEYS`, whose sums are then added in order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kv.cache import Cache, Plane
from foretell.models.device import CPU
from foretell.models.matrix import Matrix, pieces
from foretell.models.quantise import quantise
from foretell.types import Output, Rows

ROWS = 16  # rows of every product with a weight
KEYS = 64  # keys of every product of attention
ELEMENTS = 32767  # PyTorch cuts larger elementwise work between threads, anywhere, and computes at a cut differently


class AttentionSpec:
    """What is fixed about one layer's attention."""

    __slots__ = ("cos", "dim", "eps", "heads", "k_norm", "kv_heads", "q_norm", "scale", "sin", "window")

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        rope: tuple[Tensor, Tensor],  # cos, sin: [max_context, dim / 2]
        norms: tuple[Tensor | None, Tensor | None],  # q_norm, k_norm: [dim]
        eps: float,
        window: int | None,
    ) -> None:
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.cos, self.sin = rope
        self.q_norm, self.k_norm = norms
        self.eps, self.window = eps, window or 0
        self.scale = dim**-0.5


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights, packed for its ops."""

    number: int  # in the model, and of its keys and values in the cache
    input_norm: Tensor
    qkv: object  # [(heads + 2 kv_heads) * dim, H]
    qkv_bias: Tensor | None
    o: object  # [H, heads * dim]
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: object  # [2 I, H]
    gate_up_bias: Tensor | None
    down: object  # [H, I]
    down_bias: Tensor | None
    attention: AttentionSpec


class Decoder(Protocol):
    """A model's layers, as what runs them sees them; between its calls lie those of its operations."""

    vocab_size: int

    def hidden(self, tokens: Tensor, layers: Sequence[int], taps: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """tokens: [R], of the rows that were started -> [R, H] after these layers, and the input of those tapped."""
        ...

    def logits(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x: [R, H] -> [L, V]; rows: int64 [L], those of x that are wanted, None is all."""
        ...


class Ops:
    """x and results are [R, width] in `dtype`; a weight is whatever `pack` made of an [out, in] matrix, of which it
    keeps nothing and at no time has much more than its result in memory."""

    dtype: torch.dtype
    cache_dtype: torch.dtype
    backend: str
    device = CPU  # of weights, keys and values

    def runner(self) -> Runner:
        """What takes rows through a decoder, over one plane."""
        return Runner(self)

    def pack(self, weight: Matrix) -> object:
        raise NotImplementedError

    def vector(self, values: Matrix) -> Tensor:
        raise NotImplementedError

    def start(self, rows: Rows, cache: Cache) -> None:
        """Prepare what all layers of one forward share."""
        raise NotImplementedError

    def embed(self, weight: object, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def linear(self, x: Tensor, weight: object, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        raise NotImplementedError

    def norm(self, x: Tensor, weight: Tensor, eps: float, rows: Tensor | None = None) -> Tensor:
        """rows: int64 [L], those of x that are wanted, in their order; None is all."""
        raise NotImplementedError

    def rope_write(self, qkv: Tensor, layer: int, plane: Plane, spec: AttentionSpec) -> None:
        """Turn q and k of qkv [R, (heads + 2 kv_heads) * dim] by their positions, in place; store k and v."""
        raise NotImplementedError

    def attend(self, qkv: Tensor, layer: int, plane: Plane, spec: AttentionSpec) -> Tensor:
        raise NotImplementedError

    def swiglu(self, x: Tensor) -> Tensor:
        """x: [R, 2 I], gate then up -> [R, I]."""
        raise NotImplementedError

    def run(self, x: Tensor, layers: Sequence[Layer], plane: Plane) -> Tensor:
        """Decoder layers in turn; x: [R, H], which may be overwritten."""
        for layer in layers:
            i, spec = layer.number, layer.attention
            qkv = self.linear(self.norm(x, layer.input_norm, spec.eps), layer.qkv, layer.qkv_bias, None)
            self.rope_write(qkv, i, plane, spec)
            x = self.linear(self.attend(qkv, i, plane, spec), layer.o, layer.o_bias, x)
            gate_up = self.linear(self.norm(x, layer.post_norm, spec.eps), layer.gate_up, layer.gate_up_bias, None)
            x = self.linear(self.swiglu(gate_up), layer.down, layer.down_bias, x)
        return x


class Runner:
    """Takes all rows through a decoder at once."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __call__(
        self, decoder: Decoder, rows: Rows, cache: Cache, layers: Sequence[int], taps: Collection[int]
    ) -> Output:
        self._ops.start(rows, cache)
        x, tapped = decoder.hidden(rows.tokens, layers, taps)
        if not rows.want.numel():
            return Output(torch.empty(0, decoder.vocab_size, dtype=self._ops.dtype), tapped)
        return Output(decoder.logits(x, rows.want), tapped)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight that is widened where it is used."""

    values: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out]


class TorchOps(Ops):
    """Activations in the weights' dtype, float32 for int8; softmax, norms and rope in float32 (float64 for a float64
    model)."""

    backend = "torch"

    def __init__(self, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self.device = device
        self._int8 = dtype == torch.int8
        self.dtype = torch.float32 if self._int8 else dtype
        self.cache_dtype = torch.bfloat16 if self._int8 else dtype
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        # of the rows that were started: [R], [R], [R, T], [R]
        self._positions = self._slots = self._keys = self._lengths = self._none = torch.empty(0)
        self._buffers: dict[str, Tensor] = {}

    def pack(self, weight: Matrix) -> Tensor | Quantised:
        if self._int8:
            parts = [quantise(rows) for _, rows in pieces(weight)]
            return Quantised(*(torch.cat(part).to(self.device) for part in zip(*parts, strict=True)))
        data = torch.empty(weight.shape, dtype=self.dtype, device=self.device)
        for start, rows in pieces(weight):
            data[start : start + len(rows)] = rows
        return data

    def vector(self, values: Matrix) -> Tensor:
        return values[:].to(self.device, self.dtype, copy=True)

    def start(self, rows: Rows, cache: Cache) -> None:
        self._positions, self._slots = rows.positions, rows.slots
        keys = key_slots(rows, cache)
        self._lengths = torch.tensor([len(k) for k in keys])  # [R]
        width = -(-int(self._lengths.max()) // KEYS) * KEYS
        padded = np.zeros((len(keys), width), dtype=np.int64)
        for line, slots in zip(padded, keys, strict=True):
            line[: len(slots)] = slots
            line[len(slots) :] = slots[-1]  # a slot that was written: what is not could hold NaN, which no mask hides
        self._keys = torch.from_numpy(padded)  # [R, T]

    def embed(self, weight: object, tokens: Tensor) -> Tensor:
        if isinstance(weight, Quantised):
            return weight.values[tokens].to(self.dtype) * weight.scales[tokens, None]
        assert isinstance(weight, Tensor)
        return weight[tokens]

    def linear(self, x: Tensor, weight: object, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        whole, rows = self._whole(weight), x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % ROWS))
        out = torch.cat([F.linear(part, whole, bias) for part in torch.split(padded, ROWS)])[:rows]
        return out if residual is None else out + residual

    def _whole(self, weight: object) -> Tensor:
        """[out, in], as it computes."""
        if isinstance(weight, Quantised):
            return weight.values.to(self.dtype) * weight.scales[:, None]
        assert isinstance(weight, Tensor)
        return weight

    def norm(self, x: Tensor, weight: Tensor, eps: float, rows: Tensor | None = None) -> Tensor:
        wide = (x if rows is None else x[rows]).to(self.wide)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(self.dtype)

    def rope_write(self, qkv: Tensor, layer: int, plane: Plane, spec: AttentionSpec) -> None:
        parts = qkv.view(len(qkv), -1, spec.dim)
        turned = parts[:, : spec.heads + spec.kv_heads]
        for norm, heads in ((spec.q_norm, slice(0, spec.heads)), (spec.k_norm, slice(spec.heads, None))):
            if norm is not None:
                turned[:, heads] = self.norm(turned[:, heads], norm, spec.eps)
        cos = spec.cos[self._positions].to(self.wide)[:, None]
        sin = spec.sin[self._positions].to(self.wide)[:, None]
        u, v = turned.to(self.wide).chunk(2, dim=-1)
        turned.copy_(torch.cat([u * cos - v * sin, v * cos + u * sin], dim=-1))
        slots = self._slots
        keys, values = parts[: len(slots), spec.heads :].to(self.cache_dtype).chunk(2, dim=1)
        plane.k[layer][slots], plane.v[layer][slots] = keys, values

    def attend(self, qkv: Tensor, layer: int, plane: Plane, spec: AttentionSpec) -> Tensor:
        q = qkv[:, : spec.heads * spec.dim].view(len(qkv), spec.kv_heads, 1, -1, spec.dim).to(self.wide) * spec.scale
        width = self._keys.shape[1]
        time = torch.arange(width)
        out = []
        for part in range(0, len(qkv), ROWS):  # bounds the memory of the gathered keys
            rows = slice(part, part + ROWS)
            k = self._tiles("k", plane.k[layer], self._keys[rows])
            v = self._tiles("v", plane.v[layer], self._keys[rows])
            length = self._lengths[rows, None]
            visible = time < length
            if spec.window:
                visible &= time >= length - spec.window
            scores = (q[rows] @ k.transpose(-1, -2)).transpose(2, 3)  # [r, kv, group, tiles, KEYS]
            flat = scores.flatten(3).masked_fill(~visible[:, None, None], float("-inf")).softmax(-1)
            out.append((flat.view(scores.shape).transpose(2, 3) @ v).sum(2))  # [r, kv, group, dim]
        return torch.cat(out).reshape(len(qkv), -1).to(self.dtype)

    def _tiles(self, name: str, cached: Tensor, keys: Tensor) -> Tensor:
        """cached: [slots, kv, dim]; keys: [r, T] -> [r, kv, T / KEYS, KEYS, dim], valid until the next of that name."""
        rows, width = keys.shape
        gathered = self._buffer("gathered", (rows * width, *cached.shape[1:]), cached.dtype)
        torch.index_select(cached, 0, keys.flatten(), out=gathered)
        tiles = gathered.view(rows, width // KEYS, KEYS, *cached.shape[1:]).permute(0, 3, 1, 2, 4)
        return self._buffer(name, tiles.shape, self.wide).copy_(tiles)

    def _buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Contents undefined; the same memory at the next call with this name: what grows with the text, taken anew in
        every layer, would leave holes of all sizes behind."""
        count = math.prod(shape)
        if self._buffers.get(name, self._none).numel() < count:
            with torch.inference_mode(False):  # a tensor made in that mode can be written in that mode alone
                self._buffers[name] = torch.empty(1 << (count - 1).bit_length(), dtype=dtype)
        return self._buffers[name][:count].view(shape)

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.cat([F.silu(part) for part in torch.split(gate, max(1, ELEMENTS // gate.shape[1]))]) * up


def key_slots(rows: Rows, cache: Cache) -> list[np.ndarray]:
    """int [positions + 1] each: the slots of a row's keys in order of position, its own last."""
    keys: list[np.ndarray] = []
    parents, slots = rows.parents.tolist(), rows.slots.tolist()
    ends = rows.indptr.tolist()
    for b, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        committed = cache.table[int(rows.tables[b]), : int(rows.context[b])].numpy()
        for r in range(start, end):
            if parents[r] >= 0:
                before = keys[start + parents[r]]
            elif rows.trail is not None and rows.trail_indptr is not None:
                trail = rows.trail[int(rows.trail_indptr[r]) : int(rows.trail_indptr[r + 1])].numpy()
                before = np.concatenate((committed, trail))
            else:
                before = committed
            keys.append(np.append(before, slots[r]))
    return keys
