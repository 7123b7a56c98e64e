"""The search for layers that draft, on tiny models whose answer is known; what a forward takes is laid down here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretell import LLM, Sampling
from foretell.bench import exits
from foretell.bench.forward import Shape, forward_times
from foretell.bench.prompts import PROMPTS
from foretell.drafters.early_exit import CHOICE, EarlyExitDrafter
from tests.cli.conftest import write_tiny
from tests.cli.run import foretell

PLACES = len(PROMPTS) + 1


def laid_down(llm: LLM, shapes: Sequence[Shape], *, context: int, repetitions: int) -> dict[Shape, list[float]]:
    """Head and each layer take one unit of time, and further rows a tenth of that."""
    units = {shape: 1 + (llm.target.num_layers if shape[1] is None else len(shape[1])) for shape in shapes}
    return {shape: [units[shape] * (0.9 + 0.1 * shape[0])] * repetitions for shape in shapes}


@pytest.fixture(autouse=True)
def steady_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(exits, "forward_times", laid_down)
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("idle", [(2, 3), (0, 4)])
def test_layers_that_add_nothing_are_found_and_drafts_without_them_are_right(
    tmp_path: Path, idle: tuple[int, ...]
) -> None:
    folder = write_tiny(tmp_path / "tiny", layers=6, idle=idle)
    needed = [i for i in range(6) if i not in idle]
    result = foretell("models", "exits", folder, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    best = report["best"]
    assert report["pays"] and best["layers"] == needed and best in report["candidates"]
    assert best["alpha"] == [1.0] * exits.DEPTH and best["E"] == [float(2 + k) for k in range(exits.DEPTH)]
    assert best["gamma"] == pytest.approx(5 / 7)
    k = best["draft_tokens"]
    assert best["predicted_speedup"] == pytest.approx((1 + k) / (1 + 0.1 * k + k * 5 / 7))
    llm = LLM(folder, drafter="early_exit", draft_tokens=k)
    assert isinstance(llm.drafter, EarlyExitDrafter) and list(llm.drafter.layers or ()) == needed
    assert llm.drafter.draft_tokens == k and report["saved"] == str(llm.folder / CHOICE)
    for sampling in (Sampling(temperature=0, max_tokens=40), Sampling(seed=3, max_tokens=40)):
        done = llm.generate("abcabc", sampling)[0]
        assert done.stats.acceptance_rate == 1 and done.stats.drafted > 20


def test_on_a_model_that_needs_its_layers_none_pays_and_the_least_bad_still_runs(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", layers=4)
    shown = foretell("models", "exits", folder)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.count("none pays off here: the best, layers ") == 1 and "predicted" in shown.stdout
    report = json.loads(foretell("models", "exits", folder, "--json").stdout)
    assert not report["pays"] and 0 < report["best"]["predicted_speedup"] <= 1
    assert report["best"]["predicted_speedup"] == max(c["predicted_speedup"] for c in report["candidates"])
    plain = LLM(folder, drafter="none").generate("abc", Sampling(seed=1, max_tokens=30))[0].token_ids
    llm = LLM(folder, drafter="early_exit")
    assert isinstance(llm.drafter, EarlyExitDrafter) and list(llm.drafter.layers or ()) == report["best"]["layers"]
    assert llm.generate("abc", Sampling(seed=1, max_tokens=30))[0].token_ids == plain


def test_what_is_measured_is_what_the_drafter_meets(tmp_path: Path) -> None:
    """Along a text that the model wrote, drafts that start at each place keep as many tokens as is reported."""
    llm = LLM(write_tiny(tmp_path / "tiny", layers=4), drafter="none", max_batch=2)
    prompt = list(range(97, 117))
    answer = llm.generate(prompt, Sampling(temperature=0, max_tokens=90, ignore_eos=True))[0].token_ids
    layers = (0, 1, 3)
    with exits._calibrated(llm, [(prompt + answer, len(prompt))]) as calibration:
        places = calibration.places
        stay = calibration.stay(layers, places)
        right, _ = calibration.score(layers, places)
    assert right / len(places) == pytest.approx(stay[0])
    assert len(places) == 90 - exits.DEPTH + 2 and 0.1 < stay[0] < 1
    kept = [0] * exits.DEPTH
    for _, i in places:
        text = (prompt + answer)[: i + 1]
        llm.engine.drafter = EarlyExitDrafter(llm.target, layers)
        llm.engine.drafter.attach(llm.engine.cache)
        llm.engine.planner.draft_tokens = exits.DEPTH  # type: ignore[attr-defined]
        sampling = Sampling(temperature=0, max_tokens=exits.DEPTH + 1, ignore_eos=True)
        request = llm.submit(text, sampling)
        request.seq.rounds = 1  # else the first round would have no draft
        llm.step()
        llm.cancel(request)
        for k in range(request.stats.accepted):
            kept[k] += 1
    assert [count / len(places) for count in kept] == pytest.approx(stay)


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", layers=3)
    text = tmp_path / "text"
    text.write_text("The river rises from three springs below the hill and runs east to the sea.")
    report = json.loads(foretell("models", "exits", folder, "--text", text, "--json").stdout)
    assert report["text"] == str(text)
    roots = len(text.read_text()) - exits.DEPTH + 1
    assert report["places"] == roots - (roots + 2) // 3
    text.write_text("too short")
    result = foretell("models", "exits", folder, "--text", text)
    assert result.exit_code == 2 and "has 2 places to draft from and needs 24" in result.stderr
    result = foretell("models", "exits", folder, "--text", tmp_path / "nothing")
    assert result.exit_code == 2 and "cannot be read" in result.stderr


def test_a_model_that_runs_whole_is_refused(tmp_path: Path) -> None:
    llm = LLM(write_tiny(tmp_path / "tiny", layers=1), max_batch=PLACES)
    with pytest.raises(ValueError, match="runs whole only: it has no layers to leave out"):
        exits.find(llm, exits.written(llm))


def test_it_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    llm = LLM(write_tiny(tmp_path / "tiny", layers=3), max_batch=PLACES)
    available = llm.engine.cache.available
    exits.find(llm, exits.written(llm))
    assert llm.engine.cache.available == available
    llm.engine.cache.check()


def test_forwards_are_timed_by_rows_and_layers(tmp_path: Path) -> None:
    llm = LLM(write_tiny(tmp_path / "tiny", layers=3), max_batch=1)
    shapes: list[Shape] = [(1, None), (4, None), (1, (0,))]
    times = forward_times(llm, shapes, context=30, repetitions=2)
    assert list(times) == shapes and all(len(t) == 2 and min(t) > 0 for t in times.values())


def test_layers_are_spelled_as_runs() -> None:
    assert exits.spelled([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
