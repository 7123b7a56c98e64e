"""Counter-based noise: a pure function of (seed, purpose, position, round), the only source of randomness.

NumPy's Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): key = (seed, purpose),
counter = (block, position, round, 0). NumPy counts blocks of four numbers in the lowest word, from 1, so that two
streams never share a block while n < 2^66. Element i does not depend on n: a shorter draw is a prefix of a longer one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # of float64; in the tests of `verify` also of Fraction


class Purpose(IntEnum):
    """What a draw is for. Draws of different purpose are independent, whatever else they share."""

    TARGET = 0  # the target's own token from its own law; round 0 always, so that plain decoding draws the same
    DRAFT = 1  # a node drawn from q under `ratio` and `block`
    ACCEPT = 2  # whether a drawn node is kept
    RESIDUAL = 3  # the token after a rejection


def uniform(seed: int, purpose: Purpose, position: int, round: int, n: int) -> Array:
    """float64 [n], strictly inside (0, 1): the odd multiples of 2^-53, so that 0 and 1 are at equal distance.

    seed, position, round: whole numbers below 2^64.
    """
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, position, round, 0], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(n)
    bits >>= np.uint64(11)
    # 53 random bits plus half a step would round up to 1; the last bit is the half step instead
    bits |= np.uint64(1)
    return bits * 2.0**-53


def gumbel(seed: int, purpose: Purpose, position: int, round: int, n: int) -> Array:
    """float64 [n], -log(-log u): argmax(log p + g) is a draw from p (Maddison et al. 2014)."""
    # not by PyTorch: the threads that it wakes for this would spin beside the kernels that come next
    noise: Array = -np.log(-np.log(uniform(seed, purpose, position, round, n)))
    return noise
