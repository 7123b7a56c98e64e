"""Weights that are read a few rows at a time, so that loading takes no more memory than what it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

PIECE = 2 << 20  # bytes of a piece as float32: small enough that what is freed goes back to the system


class Matrix(Protocol):
    """What of a tensor a load needs; a tensor is one itself. [out, in], or [n]."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


class Stored:
    """A tensor in a file. read(start, stop): its rows from start to stop."""

    def __init__(self, shape: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        self.shape = tuple(shape)
        self._read = read

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        return self._read(start, stop)


class Stacked:
    """Several of equal width, one under the other."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        self._parts = parts
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        found, base = [], 0
        for part in self._parts:
            first, last = max(start - base, 0), min(stop - base, part.shape[0])
            if first < last:
                found.append(part[first:last])
            base += part.shape[0]
        return found[0] if len(found) == 1 else torch.cat(found)


def pieces(matrix: Matrix, multiple: int = 1) -> Iterator[tuple[int, Tensor]]:
    """All rows in turn, a multiple at a time but for the last: (number of the first one, rows)."""
    width = 4 * (matrix.shape[1] if len(matrix.shape) > 1 else 1)
    size = max(1, PIECE // width // multiple) * multiple
    for start in range(0, matrix.shape[0], size):
        yield start, matrix[start : start + size]
