"""Memory for weights."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from foretell.models import arena as module
from foretell.models.arena import LINE, Arena


def test_parts_are_apart_and_outlive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4096)
    arena = Arena()
    shapes = [(3, 5), (7,), (2, 3, 4), (0, 9), (900,), (5000,), (1,)]
    parts = [arena.empty(shape, dtype) for shape in shapes for dtype in (torch.int8, torch.bfloat16, torch.float32)]
    for i, part in enumerate(parts):
        part.fill_(i)
    del arena
    gc.collect()
    for i, part in enumerate(parts):
        assert (part == i).all() and part.is_contiguous() and part.data_ptr() % LINE == 0
    assert [tuple(part.shape) for part in parts[::3]] == shapes


def test_without_large_pages_it_is_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert Arena().empty((3, 4), torch.bfloat16).fill_(2).sum() == 24
