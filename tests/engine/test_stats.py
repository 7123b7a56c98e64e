"""The figures that are estimated while a request runs: speed-up and wasted time."""

from __future__ import annotations

import pytest

from foretell import LLM, Sampling
from foretell.engine.stats import Stats
from tests.cli.conftest import write_tiny


def test_rates_of_several_requests_are_those_of_their_sums() -> None:
    pooled = Stats.pooled([Stats(decode_s=1.0, plain_s=3.0, wasted_s=0.5), Stats(decode_s=3.0, plain_s=3.0)])
    assert pooled.speedup == 1.5 and pooled.wasted_share == 0.125
    assert pooled.estimates() == {"estimated_speedup": 1.5, "wasted_share": 0.125}


def test_what_is_not_known_is_not_said() -> None:
    assert Stats(decode_s=1.0).estimates() == Stats().estimates() == {"estimated_speedup": None, "wasted_share": None}


def test_the_estimate_needs_no_plain_decoding(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    sampling = Sampling(temperature=0, max_tokens=60)
    llm = LLM(folder, "ngram", draft_tokens=4, max_context=200)
    drafted = llm.generate("one two one two", sampling)[0].stats
    assert drafted.plain_s > 0 and 0 < drafted.wasted_share < 1
    assert drafted.speedup <= 5, "no step can be worth more than the tokens it brought"
    plain = llm.generate("one two one two", Sampling(temperature=0, max_tokens=60, draft_tokens=0))[0].stats
    assert 0 < plain.speedup <= 1 and plain.wasted_share < 1, "it is plain decoding, beside a drafter with no room"
    assert LLM(folder, "none").generate("one", sampling)[0].stats.estimates()["estimated_speedup"] is None
