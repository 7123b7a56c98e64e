"""`foretell plan`: from given figures without any model, and measured on a tiny one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from foretell import LLM
from foretell.cli.amounts import amount, count, decimals, points, size
from foretell.cli.footprint import Footprint, of_models
from foretell.models.open import prepare
from foretell.report import plots
from tests.cli.run import Terminal, foretell

GIVEN = ("--alpha", "0.7", "--gamma", "0.1", "--forward-ms", "1=10,4=12,8=20,16=40")


def planned(*arguments: object) -> dict[str, Any]:
    result = foretell("plan", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*arguments: object) -> str:
    result = foretell("plan", *arguments)
    assert result.exit_code == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1, result.output
    return result.stderr


@pytest.fixture(autouse=True)
def no_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given figures load nothing."""
    if "tiny" not in request.fixturenames:
        monkeypatch.setattr("foretell.cli.plan.load", lambda *_, **__: pytest.fail("a model was loaded"))


def test_given_figures_give_the_formula() -> None:
    found = planned("--alpha", "0.7", "--gamma", "0.1", "--draft-tokens", "6")
    gains = [(1 - 0.7 ** (k + 1)) / 0.3 / (1 + 0.1 * k) for k in range(1, 7)]
    assert found["speedup"]["1"] == pytest.approx(gains) and found["draft_tokens"] == [1, 2, 3, 4, 5, 6]
    best = gains.index(max(gains)) + 1
    assert found["batches"][0]["draft_tokens"] == best and f"Draft {best} tokens a round" in found["answer"]
    assert found["alpha"] == pytest.approx([0.7] * 6) and found["measured"] == [] and not found["load_known"]
    assert len(found["batches"]) == 1 and "requests on" not in found["answer"], "nothing is known about load"
    assert found["batches"][0]["plain_tokens_per_second"] is None


def test_a_slow_drafter_of_high_acceptance_is_turned_off() -> None:
    """Pain A1 (vLLM 15025): the measured steps of a 135M draft for a 1.7B target, nearly everything accepted."""
    steps = ("--alpha", "0.95", "--forward-ms", "1=10,8=10.2", "--draft-ms", "9.8", "--draft-tokens", "8")
    found = planned(*steps)
    assert found["answer"].startswith("Speculation off: for one request plain decoding is fastest; 1 token would give")
    assert [row["draft_tokens"] for row in found["batches"]] == [0] * 7 and found["stops_paying_at"] == 1
    gains = found["speedup"]["1"]
    assert gains == sorted(gains, reverse=True) and gains[-1] < 0.85, "the shorter, the less bad"
    assert all(not e["code"] for e in found["engines"][1:]) and found["engines"][0]["code"].endswith("--drafter none")
    assert "Speculation off" in foretell("plan", *steps).stdout


def test_load_turns_it_off() -> None:
    found = planned(*GIVEN, "--price-per-hour", "3.6")
    assert found["load_known"] and 1 < found["stops_paying_at"] <= 64
    by_batch = {row["batch"]: row for row in found["batches"]}
    assert by_batch[1]["draft_tokens"] > 0 == by_batch[64]["draft_tokens"]
    assert f"from {found['stops_paying_at']} requests on plain decoding is faster" in found["answer"]
    one = by_batch[1]
    assert one["plain_tokens_per_second"] == pytest.approx(100)
    assert one["plain_cost_per_million"] == pytest.approx(3.6 / 3600 / 100 * 1e6)
    assert one["plain_cost_per_million"] / one["drafted_cost_per_million"] == pytest.approx(one["speedup"])


def test_the_advice_is_for_the_first_batch_that_is_named() -> None:
    assert "16 requests at once" in planned(*GIVEN, "--batch", "16,1")["answer"]


def test_a_machine_by_its_data_sheet() -> None:
    sheet = ("--bandwidth", "4.8TB/s", "--flops", "960T", "--model-size", "16GB", "--kv-bytes", "128KiB")
    found = planned("--alpha", "0.75", "--gamma", "0.05", *sheet, "--context", "1000", "--memory", "80GB")
    seconds = 16e9 / 4.8e12 + 1000 * 131072 / 4.8e12
    assert found["batches"][0]["plain_tokens_per_second"] == pytest.approx(1 / seconds)
    fits = int((80e9 - 16e9) / 131072)
    assert [row["largest_context"] for row in found["memory"]["batches"][:2]] == [fits, fits // 2]
    assert found["memory"]["batches"][0]["bytes"] == 16e9 + 1000 * 131072


def test_report_on_the_terminal_has_everything() -> None:
    out = foretell("plan", *GIVEN, "--price-per-hour", "2", "--model-size", "1GB", "--memory", "2GB").stdout
    for heading in ("By requests at once", "By draft tokens", "Break-even", "Memory", "Options for vLLM"):
        assert f"\n{heading}\n" in out
    assert "Given: --alpha 0.7, --gamma 0.1, --forward-ms 1=10,4=12,8=20,16=40" in out
    assert "drafted / million" in out and "--speculative-config" in out


def test_html_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert foretell("plan", *GIVEN, "--html", path).exit_code == 0
    text = path.read_text()
    assert text.startswith("<!DOCTYPE html>") and text.count("<svg") == 3 and "<script" not in text
    assert not re.search(r'(?:src|href)="(?!#)', text) and planned(*GIVEN)["answer"] in text
    assert foretell("plan", *GIVEN, "--html", path).exit_code == 0 and path.read_text() == text, "the same, again"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.html"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--alpha", "1.5", "--gamma", "0.1"), "alpha must lie between 0 and 1"),
        (("--alpha", "high", "--gamma", "0.1"), "--alpha takes a number"),
        (("--alpha", "nan", "--gamma", "0.1"), "alpha must lie between 0 and 1"),
        (("--alpha", "0.5", "--gamma", "-1"), "less than no time"),
        (("--alpha", "0.5", "--forward-ms", "10"), "say what drafting takes too"),
        (("--alpha", "0.5", "--gamma", "0", "--draft-ms", "1"), "--gamma and --draft-ms exclude"),
        (("--alpha", "0.5", "--draft-ms", "1"), "--draft-ms needs the model's own time"),
        (("--alpha", "0.5", "--gamma", "0", "--forward-ms", "ten"), "--forward-ms takes a number, or pairs"),
        (("--alpha", "0.5", "--gamma", "0", "--forward-ms", "0=10"), "at least one row"),
        (("--alpha", "0.5", "--gamma", "0", "--flops", "1T"), "--flops needs --bandwidth"),
        (("--alpha", "0.5", "--gamma", "0", "--bandwidth", "fast"), "as in 12GiB or 4.8TB/s"),
        (("--alpha", "0.5", "--gamma", "0", "--forward-ms", "1", "--tokens-per-second", "9"), "exclude one another"),
        (("--alpha", "0.5", "--gamma", "0", "--tokens-per-second", "0"), "must be above 0"),
        (("--alpha", "0.5", "--gamma", "0", "--price-per-hour", "2"), "a price needs seconds"),
        ((*GIVEN, "--price-per-hour", "-2"), "must not be negative"),
        ((*GIVEN, "--batch", "0"), "from 1 on"),
        ((*GIVEN, "--batch", "many"), "--batch takes whole numbers"),
        ((*GIVEN, "--draft-tokens", "0"), "draft-tokens must be at least 1"),
        ((*GIVEN, "--draft-tokens", "few"), "--draft-tokens takes whole numbers"),
        ((*GIVEN, "--context", "0"), "--context must be at least 1"),
        ((*GIVEN, "--memory", "lots"), "--memory takes a number"),
        ((*GIVEN, "--html", "no/such/folder/plan.html"), "--html takes a file in a folder that there is"),
        (("--drafter", "none"), "drafter 'none' drafts nothing"),
        (("--drafter", "psychic"), "is not one of"),
        (("--prompts", "no-such-file"), "cannot be read"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(arguments: tuple[str, ...], reason: str) -> None:
    assert reason in refused(*arguments)


def test_without_matplotlib_a_page_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(plots.importlib, "import_module", missing)
    assert "pip install 'foretell[report]'" in refused(*GIVEN, "--html", tmp_path / "plan.html")
    assert planned(*GIVEN)["batches"], "without a page it is not needed"


def short(tiny: Path, tmp_path: Path) -> tuple[object, ...]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two one two\nsix six six\n")
    return "--model", tiny, "--max-context", 400, "--prompts", prompts, "--max-tokens", 16, "--draft-tokens", 6


def test_measured(tiny: Path, tmp_path: Path) -> None:
    """Pain A2 (vLLM 21278): predicted and measured speed-up stand side by side."""
    path = tmp_path / "plan.html"
    arguments = (*short(tiny, tmp_path), "--drafter", "ngram", "--price-per-hour", 1, "--html", path)
    found = planned(*arguments)
    assert found["measured"] == ["acceptance", "forwards", "drafting"] and found["given"] == []
    assert found["model"] == "tiny" and found["prompts"] == 2 and found["complete"]
    assert [run["draft_tokens"] for run in found["runs"]] == [0, 2, 6]
    for run in found["runs"]:
        assert run["predicted_speedup"] > 0 and run["measured_speedup"] > 0
    assert found["runs"][0]["predicted_speedup"] == found["runs"][0]["measured_speedup"] == 1
    last = found["runs"][-1]
    assert found["E"][-1] == pytest.approx(last["E"]) and last["nodes_per_round"] <= 6
    assert 0 < found["context"] < 400 and found["memory"]["kv"] > 0
    assert f'"{found["model"]}"' not in found["engines"][1]["code"] and str(tiny) in found["engines"][0]["code"]
    assert "Predicted and measured" in path.read_text()


def test_measured_on_the_terminal(tiny: Path, tmp_path: Path) -> None:
    result = foretell("plan", *short(tiny, tmp_path))
    assert result.exit_code == 0, result.output
    assert "Measured: acceptance, forwards and drafting, with tiny" in result.stdout
    assert re.search(r"^draft tokens +E +nodes +forward ms +beside ms +predicted +measured$", result.stdout, re.M)
    assert result.stderr == "", "no bar where nobody looks at it"


def test_given_acceptance_measured_costs(tiny: Path, tmp_path: Path) -> None:
    found = planned(*short(tiny, tmp_path), "--alpha", "0.5")
    assert found["measured"] == ["forwards", "drafting"] and found["given"] == ["--alpha 0.5"]
    assert found["E"][1] == pytest.approx(1.75)
    assert all(run["predicted_speedup"] is None for run in found["runs"]), "its acceptance is not that of the runs"
    found = planned(*short(tiny, tmp_path), "--gamma", "0.2")
    assert found["measured"] == ["acceptance"] and found["given"] == ["--gamma 0.2"]


def test_ctrl_c_before_anything_was_measured(tiny: Path, tmp_path: Path) -> None:
    terminal = Terminal("plan", *short(tiny, tmp_path), "--max-tokens", 300)
    terminal.until("draft tokens")
    terminal.send("\x03")
    code, rest = terminal.end()
    assert code == 130 and "Traceback" not in rest


def test_amounts() -> None:
    assert amount("x", "12GiB") == 12 * 2**30 and amount("x", "4.8TB/s") == 4.8e12 and amount("x", "990T") == 990e12
    assert amount("x", "16e9") == 16e9 and amount("x", "128KiB") == 131072 and amount("x", " 1.5 kB ") == 1500
    assert count("x", "8B") == 8e9 and count("x", "135M") == 135e6 and count("x", "8e9") == 8e9
    assert decimals("x", "0.5,1") == [0.5, 1] and points("x", "1=2,4=8") == {1: 2, 4: 8} and points("x", "3") == {1: 3}
    assert [size(n) for n in (5, 2048, 3 * 2**30, 5 * 2**40)] == ["5 B", "2.0 KiB", "3.0 GiB", "5.0 TiB"]
    for wrong in ("", "GB", "-1", "1.2.3", "12XB", "1e"):
        with pytest.raises(ValueError, match="--memory takes a number"):
            amount("--memory", wrong)


def test_footprint_is_what_a_model_takes(tiny: Path) -> None:
    """Keys and values of int8 weights are bfloat16."""
    for dtype, each in (("auto", 4), ("bfloat16", 2), ("int8", 2)):
        llm = LLM(tiny, "none", dtype=dtype, max_context=64)
        found = of_models(str(tiny), str(tiny), dtype)
        assert found.kv == found.draft_kv == llm.memory.kv == llm.target.kv_bytes() == 2 * 2 * 2 * 16 * each
        positions = prepare(tiny, dtype=dtype).size.position * 64
        assert found.weights == found.draft_weights == llm.memory.weights - positions
    assert of_models(str(tiny), None, "auto").draft_weights == 0
    assert Footprint(100, 2, 50, 1).tokens(180) == 10 and Footprint(100, 2).tokens(50) == 0
    assert Footprint(100, 2, 50, 1).needed(10, 4) == 150 + 120


def test_measured_acceptance_on_a_given_machine(tiny: Path, tmp_path: Path) -> None:
    """The size of the weights that it reads is given, or the model's own."""
    machine = ("--gamma", "0", "--bandwidth", "1GB/s")
    found = planned(*short(tiny, tmp_path), *machine)
    assert (
        found["measured"] == ["acceptance"] and found["memory"]["weights"] == of_models(str(tiny), None, "auto").weights
    )
    found = planned(*short(tiny, tmp_path), *machine, "--model-size", "1GB", "--kv-bytes", "0")
    assert found["batches"][0]["plain_tokens_per_second"] == pytest.approx(1)
