"""The likeliest tokens of many rows of logits, fast."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foretell import kernels


def top_tokens(logits: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """logits: [L, V] -> int32 [L, k], the likeliest tokens first, ties by lower id, and float32 [L, k], their logits.
    Of fewer tokens all."""
    library = kernels.library() if logits.dtype == torch.float32 and logits.is_contiguous() else None
    k = min(k, logits.shape[1])
    if library is None:
        values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        return order[:, :k].int().numpy(), values[:, :k].float().numpy()
    tokens = np.empty((logits.shape[0], k), dtype=np.int32)
    values_of = np.empty((logits.shape[0], k), dtype=np.float32)
    library.ft_top(logits.data_ptr(), *logits.shape, k, tokens.ctypes.data, values_of.ctypes.data)
    return tokens, values_of
