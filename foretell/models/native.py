"""The operations of a decoder layer through the native kernels: float32 arithmetic over bfloat16, float32 or int8.

Every result lies in a buffer that the next call of the same operation overwrites: a step allocates nothing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell import kernels
from foretell.kv.cache import Cache, Plane
from foretell.machine import cores
from foretell.models.arena import Arena
from foretell.models.matrix import Matrix, pieces
from foretell.models.ops import AttentionSpec, Layer, Ops
from foretell.models.quantise import quantise
from foretell.types import Rows

STORAGE = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2}  # the kernels' numbers of the dtypes


@dataclass(frozen=True, slots=True)
class Layout:
    """How the kernels here want a matrix: [blocks of outputs, steps, block, depth], where a step takes `depth` inputs
    and inputs are padded to a multiple of `whole`. halves: the two halves of a block interleave."""

    block: int
    depth: int
    whole: int
    halves: bool


def layout(dtype: torch.dtype) -> Layout:
    """Of matrices in this storage dtype. Ask `supported()` first."""
    library = kernels.library()
    assert library is not None
    numbers = (ctypes.c_int64 * 4)()
    library.ft_layout(STORAGE[dtype], numbers)
    block, depth, whole, halves = numbers
    return Layout(block, depth, whole, bool(halves))


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in its layout, and for int8 a scale for each output."""

    data: Tensor
    scales: Tensor | None  # float32 [out], padded
    outputs: int
    inputs: int

    @property
    def dtype(self) -> int:
        return STORAGE[self.data.dtype]


class _Struct(ctypes.Structure):
    """A structure of kernels.cpp, with the same fields in the same order. It does not own what it points to."""

    def __init__(self, **values: object) -> None:
        super().__init__(**{name: _pointer(value) for name, value in values.items()})


def _pointer(value: object) -> object:
    return value.data_ptr() if isinstance(value, Tensor) else value


def _fields(pointers: str = "", whole: str = "", real: str = "") -> list[tuple[str, type]]:
    kinds = ((pointers, ctypes.c_void_p), (whole, ctypes.c_int64), (real, ctypes.c_double))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _Weight(_Struct):
    _fields_ = _fields("data scales bias", "dtype n k")


class _Layer(_Struct):
    _fields_ = [
        *((name, _Weight) for name in ("qkv", "o", "gate_up", "down")),
        *_fields("input_norm post_norm q_norm k_norm cos sin", "number heads kv_heads dim window", "eps scale"),
    ]


class _Step(_Struct):
    _fields_ = _fields(
        "positions slots owner tables lines context path_start path k v normed qkv attended gate_up gated",
        "rows hidden inner table_width layer_bytes per_head cache_dtype",
    )


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


class NativeOps(Ops):
    """dtype is that of the activations; weights are of the dtype given here, and the cache too, but for int8, which
    has a bfloat16 one."""

    dtype = torch.float32

    def __init__(self, dtype: torch.dtype, threads: int | None, pool: Pool | None = None) -> None:
        library = kernels.library()
        assert library is not None, "ask supported() first"
        self._lib = library
        self.weight_dtype = dtype
        self.cache_dtype = torch.bfloat16 if dtype == torch.int8 else dtype
        self.backend = f"native-{library.ft_instructions(STORAGE[dtype]).decode()}"
        self._layout, self._arena = layout(dtype), Arena()
        self.pool = pool or Pool(threads)
        self._pool = self.pool.pointer
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._views: dict[tuple[str, int, int], Tensor] = {}  # of the buffers; slicing costs more than a lookup
        self._structs: dict[int, tuple[Layer, _Layer]] = {}  # by id of the layer, which is kept with its structure
        self._runs: dict[tuple[int, ...], object] = {}  # by ids of its layers
        self._count = 0
        self._where: tuple[int, ...] = ()  # pointers for rope_write: positions, slots
        self._view: tuple[int, ...] = ()  # pointers for attend

    def pack(self, weight: Matrix) -> Packed:
        (outputs, inputs), own = weight.shape, self._layout
        block, steps = own.block, math.ceil(inputs / own.whole) * own.whole // own.depth
        blocks = math.ceil(outputs / block)
        data = self._arena.empty((blocks, steps, block, own.depth), self.weight_dtype)
        scales = torch.ones(blocks * block) if self.weight_dtype == torch.int8 else None
        for start, rows in pieces(weight, block):
            padded = torch.zeros(math.ceil(len(rows) / block) * block, steps * own.depth)
            padded[: len(rows), :inputs] = rows
            if scales is not None:
                padded, scales[start:][: len(padded)] = quantise(padded)
            if own.halves:
                padded = padded.view(-1, 2, block // 2, steps).transpose(1, 2).reshape(-1, steps)
            piece = padded.view(-1, block, steps, own.depth).transpose(1, 2)
            data[start // block :][: len(piece)] = piece
        return Packed(data, scales, outputs, inputs)

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
        self._count = count
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
        self._lib.ft_embed(
            weight.data.data_ptr(),
            weight.dtype,
            None if weight.scales is None else weight.scales.data_ptr(),
            tokens.data_ptr(),
            len(tokens),
            weight.inputs,
            out.data_ptr(),
        )
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
            weight.data.data_ptr(),
            weight.dtype,
            weight.outputs,
            weight.inputs,
            None if weight.scales is None else weight.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
        )
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float, rows: Tensor | None = None) -> Tensor:
        # picked by the kernel: PyTorch would wake threads of its own for it, which then spin beside the kernels
        count, picked = (x.shape[0], None) if rows is None else (rows.numel(), rows.data_ptr())
        width = x.shape[1]
        out = self._buffer("norm", count, width)
        self._lib.ft_norm(self._pool, x.data_ptr(), picked, count, width, weight.data_ptr(), eps, out.data_ptr())
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
            k.stride(1),
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
            k.stride(1),
            STORAGE[self.cache_dtype],
        )
        return out

    def swiglu(self, x: Tensor) -> Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        out = self._buffer("swiglu", rows, width)
        self._lib.ft_swiglu(self._pool, x.data_ptr(), rows, width, out.data_ptr())
        return out

    def run(self, x: Tensor, layers: Sequence[Layer], plane: Plane) -> Tensor:
        """`Ops.run`, the same numbers, in one call: thirty layers of nine calls each would cost a millisecond."""
        if not layers:
            return x
        spec, first = layers[0].attention, layers[0]
        assert isinstance(first.gate_up, Packed) and isinstance(first.qkv, Packed)
        count, inner = x.shape[0], first.gate_up.outputs // 2
        positions, slots = self._where
        owner, tables, width, lines, context, path_start, path = self._view
        step = _Step(
            rows=count,
            hidden=x.shape[1],
            inner=inner,
            positions=positions,
            slots=slots,
            owner=owner,
            tables=tables,
            table_width=width,
            lines=lines,
            context=context,
            path_start=path_start,
            path=path,
            k=plane.k,
            v=plane.v,
            layer_bytes=plane.k.stride(0) * plane.k.itemsize,
            per_head=plane.k.stride(2),
            cache_dtype=STORAGE[self.cache_dtype],
            normed=self._buffer("norm", count, x.shape[1]),
            qkv=self._buffer("qkv", count, first.qkv.outputs),
            attended=self._buffer("attended", count, spec.heads * spec.dim),
            gate_up=self._buffer("out", count, 2 * inner),
            gated=self._buffer("swiglu", count, inner),
        )
        self._lib.ft_layers(self._pool, self._pointers(layers), len(layers), ctypes.byref(step), x.data_ptr())
        return x

    def _pointers(self, layers: Sequence[Layer]) -> object:
        """The layers' structures as a C array."""
        key = tuple(map(id, layers))
        if key not in self._runs:
            structs = (self._struct_of(layer) for layer in layers)
            self._runs[key] = (ctypes.c_void_p * len(layers))(*(ctypes.addressof(struct) for struct in structs))
        return self._runs[key]

    def _struct_of(self, layer: Layer) -> _Layer:
        if id(layer) not in self._structs:
            spec = layer.attention
            struct = _Layer(
                qkv=_weight(layer.qkv, layer.qkv_bias),
                o=_weight(layer.o, layer.o_bias),
                gate_up=_weight(layer.gate_up, layer.gate_up_bias),
                down=_weight(layer.down, layer.down_bias),
                input_norm=layer.input_norm,
                post_norm=layer.post_norm,
                q_norm=spec.q_norm,
                k_norm=spec.k_norm,
                cos=spec.cos,
                sin=spec.sin,
                number=layer.number,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                dim=spec.dim,
                window=spec.window,
                eps=spec.eps,
                scale=spec.scale,
            )
            self._structs[id(layer)] = layer, struct
        return self._structs[id(layer)][1]

    def stream(self, weights: Sequence[object]) -> int:
        """Read packed weights from end to end with all threads, and do nothing with them; how many bytes that were."""
        tensors = [weight.data for weight in weights if isinstance(weight, Packed)]
        data = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
        sizes = (ctypes.c_int64 * len(tensors))(*[tensor.nbytes for tensor in tensors])
        self._lib.ft_stream(self._pool, data, sizes, len(tensors))
        return sum(sizes)

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


def _weight(packed: object, bias: Tensor | None) -> _Weight:
    assert isinstance(packed, Packed)
    sizes = {"dtype": packed.dtype, "n": packed.outputs, "k": packed.inputs}
    return _Weight(data=packed.data, scales=packed.scales, bias=bias, **sizes)
