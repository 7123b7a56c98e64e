"""Memory for weights in large pages where the system has them: a forward reads all of it, page after page."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 128 << 20  # bytes asked of the system at once; what is not used of them is never touched
LINE = 64  # bytes that tensors are aligned to


class Arena:
    """Hands out parts of large stretches of memory, each of which lives as long as any of its tensors."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As `torch.empty`."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if not hasattr(mmap, "MADV_HUGEPAGE") or size == 0:
            return torch.empty(shape, dtype=dtype)
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk, self._used = mmap.mmap(-1, max(CHUNK, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0
            try:
                self._chunk.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without them
        part = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=self._used)
        self._used += math.ceil(size / LINE) * LINE
        return part.view(tuple(shape))
