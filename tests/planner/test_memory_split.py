"""The arithmetic of a limit of memory, on models that are numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.planner.memory import BASE, LEAST_CONTEXT, SLOT, Needs, in_bytes, refusal, shown, split
from foretell.types import Kept, ModelSize

TARGET = ModelSize(
    weights=10**8, kv=20_000, vocab_size=1000, max_context=4096, position=100, row=10_000, wanted=50_000, key=3, seen=7
)
DRAFT = ModelSize(weights=10**7, kv=5_000, vocab_size=1000, max_context=2048, position=50, row=1_000, wanted=8_000)
KEPT = Kept(fixed=10**6, per_request=10**4, per_token=300, nodes=4, runs=True)
NEEDS = Needs(TARGET, DRAFT, KEPT, noise=1 << 20, laws=True)


def test_parts_by_hand() -> None:
    parts = NEEDS.parts(context=512, batch=2)
    rows, wanted = 256 + 2 + 2 * 4, 2 * 5
    work = rows * (10_000 + 3 * 512) + wanted * 50_000 + 7 * 512
    noise = 16 * 1000 * 2 * 5
    assert parts == {
        "weights": 10**8 + 100 * 512,
        "draft_weights": 10**7 + 50 * 2048,
        "workspace": BASE + work + 8000 * (2 * 2 + 6) + noise + 4 * 2 * 512,
        "drafting": 10**6 + 2 * 10**4 + 256 * 1_000 + 2 * 8_000 + 8000 * 2 * 2 + 8000 * 2 * 2 * 4,
    }
    assert NEEDS.slot() == 20_000 + 5_000 + 300 + SLOT
    plain = Needs(TARGET, kept=Kept(nodes=0)).parts(512, 2)
    assert plain["draft_weights"] == plain["drafting"] == 0


def test_a_draft_of_other_tokens_has_a_cache_of_its_own() -> None:
    other = Needs(TARGET, DRAFT, KEPT, translates=True)
    assert other.slot() - Needs(TARGET, DRAFT, KEPT).slot() == SLOT
    more = other.parts(512, 2)["drafting"] - Needs(TARGET, DRAFT, KEPT).parts(512, 2)["drafting"]
    assert more == 120 * 2000 + 4 * 2 * 512


@given(
    limit=st.integers(10**7, 10**9),
    context=st.integers(LEAST_CONTEXT, 5000),
    batch=st.integers(1, 80),
    draft=st.booleans(),
)
def test_never_more_than_the_limit_and_never_less_than_there_is_room_for(
    limit: int, context: int, batch: int, draft: bool
) -> None:
    needs = NEEDS if draft else Needs(TARGET, kept=Kept(nodes=3))
    slots = needs.slots(limit, context, batch)
    if slots >= context:
        found = split(needs, slots, context, batch, limit)
        assert found.peak <= limit
        assert found.peak == found.weights + found.draft_weights + found.workspace + found.drafting + found.cache
        assert slots == batch * context or found.peak + needs.slot() > limit
        assert found.full_requests == slots // context >= 1
    longest, most = needs.largest_context(limit, batch, context), needs.largest_batch(limit, context, batch)
    assert (longest == context) == (most == batch) == (slots >= context)
    if longest:
        assert needs.slots(limit, longest, batch) >= longest
        assert longest == context or needs.slots(limit, longest + 1, batch) <= longest
    if most:
        assert needs.slots(limit, context, most) >= context
        assert most == batch or needs.slots(limit, context, most + 1) < context
    assert (limit >= needs.least()) == (needs.slots(limit, LEAST_CONTEXT, 1) >= LEAST_CONTEXT)


def test_the_refusal_names_what_fits() -> None:
    needs = Needs(TARGET, kept=Kept(nodes=0))
    limit = 150_000_000
    sentence = refusal(needs, limit, 4096, 32)
    for places in (32, 1):
        assert f"max_context {needs.largest_context(limit, places, 4096)} with max_batch {places}" in sentence
    assert "\n" not in sentence and sentence.count(": ") == 1
    most = needs.largest_batch(limit, 200, 5000)
    assert 1 < most < 5000 and f"max_context 200 with max_batch {most}" in refusal(needs, limit, 200, 5000)
    assert shown(needs.least()) in refusal(needs, 10**8, 4096, 32)


def test_the_draft_share_is_that_of_its_bytes_per_token() -> None:
    found = split(NEEDS, NEEDS.slots(250_000_000, 1024, 32), 1024, 32)
    assert found.kv * found.slots + found.draft_kv * found.slots <= found.cache
    assert found.draft_kv * found.slots / (found.kv * found.slots) == DRAFT.kv / TARGET.kv


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 << 30),
        ("500MB", 500_000_000),
        (" 1.5 gb ", 1_500_000_000),
        ("7", 7),
        ("3b", 3),
        ("2KiB", 2048),
        (1 << 40, 1 << 40),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert in_bytes(text) == size


def test_sizes_for_people() -> None:
    assert shown(412_340_000) == "412.3 MB" and shown(12_345_000_000) == "12.35 GB"
    assert str(split(NEEDS, 3000, 1000, 4, 10**9)).startswith("218.6 MB of 1000.0 MB: weights 100.1 MB, draft model")
