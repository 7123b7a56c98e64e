"""The noise is Philox4x64-10 with (seed, purpose) as key and (block, position, round, 0) as counter, and no more."""

import math

import numpy as np
import pytest
from scipy import stats

from foretell.sampling.noise import Purpose, gumbel, uniform

MASK = 2**64 - 1


def philox(key: list[int], counter: list[int]) -> list[int]:
    """Philox4x64-10 of Salmon et al. 2011 on plain ints."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & MASK, (a >> 64) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [c0, c1, c2, c3]


def reference(seed: int, purpose: int, position: int, round: int, n: int) -> list[float]:
    words: list[int] = []
    block = 0
    while len(words) < n:
        block += 1
        words += philox([seed, purpose], [block, position, round, 0])
    return [((w >> 11) | 1) / 2**53 for w in words[:n]]


def test_philox_reference_is_itself_right() -> None:
    # known answers published with Random123
    assert philox([0, 0], [0, 0, 0, 0])[0] == 0x16554D9ECA36314C
    assert philox([MASK, MASK], [MASK] * 4)[0] == 0x87B092C3013FE90B


@pytest.mark.parametrize("seed", [0, 1, 2**63, MASK])
@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize(("position", "round", "n"), [(0, 0, 1), (5, 3, 9), (MASK, MASK, 6), (2**40, 1, 4)])
def test_uniform_is_the_reference(seed: int, purpose: Purpose, position: int, round: int, n: int) -> None:
    assert uniform(seed, purpose, position, round, n).tolist() == reference(seed, purpose, position, round, n)


def test_gumbel_is_of_the_uniform() -> None:
    u = uniform(9, Purpose.TARGET, 4, 0, 1000)
    g = gumbel(9, Purpose.TARGET, 4, 0, 1000)
    assert np.allclose(g, [-math.log(-math.log(x)) for x in u], rtol=1e-14, atol=1e-14)
    assert g.dtype == np.float64


def test_shorter_draws_are_prefixes_bit_for_bit() -> None:
    long = gumbel(7, Purpose.TARGET, 11, 0, 49152)
    for n in (1, 2, 3, 5, 8, 63, 1000, 32769, 49151):
        assert np.array_equal(gumbel(7, Purpose.TARGET, 11, 0, n), long[:n])


def test_streams_differ_in_every_coordinate() -> None:
    streams = {
        tuple(uniform(seed, purpose, position, round, 8))
        for seed in (0, 1, 2**32, 2**63)
        for purpose in Purpose
        for position in (0, 1, 2, 2**32)
        for round in (0, 1, 2**33)
    }
    assert len(streams) == 4 * 4 * 4 * 3
    values = [x for stream in streams for x in stream]
    assert len(set(values)) == len(values)  # no overlap shifted by a block either


def test_ends_are_excluded() -> None:
    assert 0 < ((0 >> 11) | 1) * 2.0**-53
    assert ((MASK >> 11) | 1) * 2.0**-53 < 1
    u = uniform(1, Purpose.ACCEPT, 0, 0, 200_000)
    assert u.min() > 0
    assert u.max() < 1
    assert np.isfinite(gumbel(1, Purpose.ACCEPT, 0, 0, 200_000)).all()


def test_uniformity_and_independence() -> None:
    u = uniform(3, Purpose.DRAFT, 17, 2, 200_000)
    assert stats.kstest(u, "uniform").pvalue > 0.001
    assert stats.kstest(gumbel(3, Purpose.DRAFT, 17, 2, 200_000), "gumbel_r").pvalue > 0.001
    first = np.array([uniform(s, Purpose.ACCEPT, p, 0, 1)[0] for s in range(60) for p in range(60)])
    assert stats.kstest(first, "uniform").pvalue > 0.001
    pairs, _, _ = np.histogram2d(u[:-1], u[1:], bins=10, range=[[0, 1], [0, 1]])
    assert stats.chisquare(pairs.ravel()).pvalue > 0.001
