"""The operations of a decoder layer through the native kernels: float32 arithmetic, bfloat16 or float32 storage.

Every result lies in a buffer that the next call of the same operation overwrites: a step allocates nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell import kernels
from foretell.kv.cache import Cache, Plane
from foretell.machine import cores
from foretell.models.matrix import Matrix, pieces
from foretell.models.ops import AttentionSpec
from foretell.types import Rows

STORAGE = {torch.bfloat16: 0, torch.float32: 1}  # the kernels' numbers of the dtypes


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in blocks of columns: [out / block, in, block]. For bfloat16 the two halves of a block interleave."""

    data: Tensor
    pointer: int
    dtype: int
    outputs: int
    inputs: int


def supported(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels can run a model of this dtype and width of head on this machine."""
    return dtype in STORAGE and head_dim % 16 == 0 and kernels.library() is not None


class Pool:
    """Threads that models of one engine share."""

    def __init__(self, threads: int | None) -> None:
        library = kernels.library()
        assert library is not None, "ask supported() first"
        self._free = library.ft_pool_free
        self.threads = threads or cores()
        self.pointer = library.ft_pool_new(self.threads)

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._free(self.pointer)


class NativeOps:
    """dtype is that of the activations; weights and cache are of the dtype given here."""

    dtype = torch.float32
    backend = "native"

    def __init__(self, dtype: torch.dtype, threads: int | None, pool: Pool | None = None) -> None:
        library = kernels.library()
        assert library is not None, "ask supported() first"
        self._lib = library
        self.cache_dtype = dtype
        self._block, self._lanes = library.ft_block(), library.ft_lanes()
        self.pool = pool or Pool(threads)
        self._pool = self.pool.pointer
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._views: dict[tuple[str, int, int], Tensor] = {}  # of the buffers; slicing costs more than a lookup
        self._rows: Rows
        self._count = 0
        self._where: tuple[int, ...] = ()  # pointers for rope_write: positions, slots
        self._view: tuple[int, ...] = ()  # pointers for attend

    def pack(self, weight: Matrix) -> Packed:
        outputs, inputs = weight.shape
        data = torch.empty(math.ceil(outputs / self._block), inputs, self._block, dtype=self.cache_dtype)
        for start, rows in pieces(weight, self._block):
            blocks, first = math.ceil(len(rows) / self._block), start // self._block
            padded = torch.zeros(blocks * self._block, inputs, dtype=self.cache_dtype)
            padded[: len(rows)] = rows
            if self.cache_dtype == torch.bfloat16:
                padded = padded.view(blocks, 2, self._lanes, inputs).transpose(1, 2).reshape(-1, inputs)
            data[first : first + blocks] = padded.view(blocks, self._block, inputs).transpose(1, 2)
        return Packed(data, data.data_ptr(), STORAGE[self.cache_dtype], outputs, inputs)

    def vector(self, values: Matrix) -> Tensor:
        return values[:].to(self.cache_dtype, copy=True).float().contiguous()

    def start(self, rows: Rows, cache: Cache) -> None:
        count, requests = rows.tokens.numel(), rows.tables.numel()
        owner = self._buffer("owner", count, 1, torch.int32)
        starts = self._buffer("starts", count + 1, 1, torch.int64)
        trail = [None if part is None else part.data_ptr() for part in (rows.trail_indptr, rows.trail)]
        fixed = (rows.indptr.data_ptr(), requests, rows.parents.data_ptr(), rows.slots.data_ptr(), *trail)
        total = self._lib.ft_paths(*fixed, owner.data_ptr(), starts.data_ptr(), None)
        path = self._buffer("path", total, 1, torch.int32)
        self._lib.ft_paths(*fixed, owner.data_ptr(), starts.data_ptr(), path.data_ptr())
        self._rows, self._count = rows, count
        self._where = (rows.positions.data_ptr(), rows.slots.data_ptr())
        self._view = (
            owner.data_ptr(),
            cache.table.data_ptr(),
            cache.table.shape[1],
            rows.tables.data_ptr(),
            rows.context.data_ptr(),
            starts.data_ptr(),
            path.data_ptr(),
        )

    def embed(self, weight: object, tokens: Tensor) -> Tensor:
        assert isinstance(weight, Packed)
        out = self._buffer("hidden", len(tokens), weight.inputs)
        self._lib.ft_embed(weight.pointer, weight.dtype, tokens.data_ptr(), len(tokens), weight.inputs, out.data_ptr())
        return out

    def linear(self, x: Tensor, weight: object, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """With a residual the result replaces it in place."""
        assert isinstance(weight, Packed)
        rows = x.shape[0]
        out = self._buffer("out", rows, weight.outputs) if residual is None else residual
        self._lib.ft_linear(
            self._pool,
            x.data_ptr(),
            x.stride(0),
            rows,
            weight.pointer,
            weight.dtype,
            weight.outputs,
            weight.inputs,
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            weight.outputs,
        )
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        out = self._buffer("norm", rows, width)
        self._lib.ft_norm(self._pool, x.data_ptr(), rows, width, weight.data_ptr(), eps, out.data_ptr())
        return out

    def rope_write(self, qkv: Tensor, layer: int, plane: Plane, spec: AttentionSpec) -> None:
        k, v = plane.k[layer], plane.v[layer]
        self._lib.ft_rope_write(
            self._pool,
            qkv.data_ptr(),
            qkv.stride(0),
            self._count,
            *self._where,
            spec.heads,
            spec.kv_heads,
            spec.dim,
            spec.cos.data_ptr(),
            spec.sin.data_ptr(),
            None if spec.q_norm is None else spec.q_norm.data_ptr(),
            None if spec.k_norm is None else spec.k_norm.data_ptr(),
            spec.eps,
            k.data_ptr(),
            v.data_ptr(),
            STORAGE[self.cache_dtype],
        )

    def attend(self, qkv: Tensor, layer: int, plane: Plane, spec: AttentionSpec) -> Tensor:
        width = spec.heads * spec.dim
        out = self._buffer("attended", self._count, width)
        k, v = plane.k[layer], plane.v[layer]
        self._lib.ft_attend(
            self._pool,
            qkv.data_ptr(),
            qkv.stride(0),
            out.data_ptr(),
            width,
            self._count,
            spec.heads,
            spec.kv_heads,
            spec.dim,
            *self._view,
            spec.window,
            spec.scale,
            k.data_ptr(),
            v.data_ptr(),
            STORAGE[self.cache_dtype],
        )
        return out

    def swiglu(self, x: Tensor) -> Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        out = self._buffer("swiglu", rows, width)
        self._lib.ft_swiglu(self._pool, x.data_ptr(), rows, width, out.data_ptr())
        return out

    def _buffer(self, name: str, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[rows, width], contents undefined; the same memory at the next call with this name."""
        view = self._views.get((name, width, rows))
        if view is None:
            buffer = self._buffers.get((name, width))
            if buffer is None or buffer.shape[0] < rows:
                # twice as many as before at least, so that growing leaves few holes; what no row uses is not touched
                buffer = self._buffers[name, width] = torch.empty(
                    1 << max(5, (rows - 1).bit_length()), width, dtype=dtype
                )
                self._views = {key: old for key, old in self._views.items() if key[:2] != (name, width)}
            view = self._views[name, width, rows] = buffer[:rows]
        return view
