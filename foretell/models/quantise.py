"""Weights as int8: one scale for each output channel, symmetric, rounded to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [out, in], floating -> int8 [out, in] and float32 [out], whose product is the weight that computes.
    ValueError if a value is not finite."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / LARGEST
    if not bool(scales.isfinite().all()):
        raise ValueError("a weight is not finite, int8 cannot hold it: load the model with dtype 'float32'")
    scales = torch.where(scales > 0, scales, 1.0)
    return (wide / scales[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales
