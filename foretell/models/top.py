"""The likeliest tokens of many rows of logits, fast."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foretell import kernels


def top_tokens(logits: Tensor, k: int) -> np.ndarray:
    """logits: [L, V] -> int32 [L, k], the likeliest first, ties by lower id."""
    library = kernels.library() if logits.dtype == torch.float32 and logits.is_contiguous() else None
    if library is None:
        order: np.ndarray = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k].int().numpy()
        return order
    out = np.empty((len(logits), k), dtype=np.int32)
    library.ft_top(logits.data_ptr(), logits.shape[0], logits.shape[1], k, out.ctypes.data)
    return out
