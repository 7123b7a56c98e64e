"""The GGUF container: metadata and tensors of one file.

Parses the header itself, with bounds checked before every read: the `gguf` package's reader takes
seconds on a large vocabulary and can loop for ever on a damaged length. Dequantisation is that
package's own. Knows nothing of models, tokenizers or tensor names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
# Tensor types that have a torch dtype of their own; all others are dequantised to float32.
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in the file."""

    shape: tuple[int, ...]  # in torch's order: the contiguous dimension last
    kind: GGMLQuantizationType
    offset: int  # from the start of the file
    nbytes: int


class GgufFile:
    """One GGUF file: `metadata` (key -> number, bool, str or list of them) and `tensors` (name -> TensorInfo).

    Damaged, truncated or foreign files raise ValueError at construction, in one sentence that names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        try:
            reader = _Reader(data)
            self.metadata: Mapping[str, Any] = reader.metadata
            self.tensors: Mapping[str, TensorInfo] = dict(reader.tensors())
        except (ValueError, struct.error) as error:
            reason = "it is truncated or corrupted" if isinstance(error, struct.error | UnicodeError) else error
            raise ValueError(f"{path} is not a readable GGUF file: {reason}") from error

    def strings(self, key: str) -> Sequence[str]:
        """A list of strings of the metadata, empty if it is missing; ValueError if it is something else."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{self.path}: {key} is not a list of strings")
        return value

    def dtype(self, name: str) -> torch.dtype:
        """What `tensor` returns: the stored dtype, float32 for a quantised tensor."""
        return _PLAIN.get(self.tensors[name].kind, torch.float32)

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, see `rows`."""
        return self.rows(name, 0, self.tensors[name].shape[0])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of the tensor as stored, dequantised to float32 if it is quantised. Read and not
        mapped: pages of a map count as memory of the process."""
        info = self.tensors[name]
        if len(info.shape) == 1 and stop - start < info.shape[0]:
            return self.tensor(name)[start:stop]  # a block of quantised numbers may reach across
        first, last = (info.nbytes * row // info.shape[0] for row in (start, stop))
        shape = (stop - start, *info.shape[1:])
        raw = np.fromfile(self.path, np.uint8, count=last - first, offset=info.offset + first)
        if len(raw) < last - first:
            raise ValueError(f"{self.path} has become shorter since it was opened")
        if info.kind in _PLAIN:
            return torch.from_numpy(raw).view(_PLAIN[info.kind]).view(shape)
        blocks = raw.reshape(gguf.quant_shape_to_byte_shape(shape, info.kind))
        try:
            with np.errstate(all="ignore"):  # a damaged scale gives infinities, not warnings
                return torch.from_numpy(gguf.quants.dequantize(blocks, info.kind)).view(shape)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: tensor {name} has type {info.kind.name}, which is not supported") from error


class _Reader:
    """A cursor over the header."""

    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.data = data.data
        self.at = 0
        if bytes(self.data[:4]) != b"GGUF":
            raise ValueError("it does not begin with the letters GGUF")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, not 2 or 3")
        self.tensor_count = self.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(self.number("Q")):
            key = self.string()
            if key in self.metadata:
                raise ValueError(f"the key {key!r} occurs twice")
            self.metadata[key] = self.value(self.number("I"))

    def number(self, code: str) -> Any:
        """One little-endian number; struct.error at the end of the file."""
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def span(self, length: int) -> memoryview:
        if length > len(self.data) - self.at:
            raise ValueError("it is truncated or corrupted: a length in its header leads beyond its end")
        self.at += length
        return self.data[self.at - length : self.at]

    def string(self) -> str:
        return str(self.span(self.number("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"it is corrupted: {kind} is not a type of metadata")
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            return list(struct.unpack(f"<{count}{code}", self.span(count * struct.calcsize("<" + code))))
        if kind != _STRING:
            raise ValueError(f"it is corrupted: {kind} is not a type of list")
        return [self.string() for _ in range(count)]

    def tensors(self) -> Iterator[tuple[str, TensorInfo]]:
        """Every tensor, checked to lie inside the file."""
        seen: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(self.tensor_count):
            name = self.string()
            count = self.number("I")
            if not 1 <= count <= _MAX_DIMENSIONS or name in seen:
                raise ValueError(f"it is corrupted: tensor {name!r} occurs twice or has {count} dimensions")
            shape = tuple(self.number("Q") for _ in range(count))[::-1]
            seen[name] = (shape, self.number("I"), self.number("Q"))
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise ValueError(f"its alignment is {alignment!r}, not a multiple of 8")
        start = -(-self.at // alignment) * alignment
        for name, (shape, code, offset) in seen.items():
            try:
                kind = GGMLQuantizationType(code)
            except ValueError:
                raise ValueError(f"tensor {name!r} has type {code}, which is unknown") from None
            block, size = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % block or 0 in shape:
                raise ValueError(f"it is corrupted: tensor {name!r} of type {kind.name} has shape {list(shape)}")
            nbytes = math.prod(shape) // block * size
            if start + offset + nbytes > len(self.data):
                raise ValueError(f"it is truncated: tensor {name!r} ends beyond the end of the file")
            if offset % alignment:
                raise ValueError(f"it is corrupted: tensor {name!r} is not aligned")
            yield name, TensorInfo(shape, kind, start + offset, nbytes)
