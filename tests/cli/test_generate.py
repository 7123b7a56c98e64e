"""`foretell generate` on a tiny model: text, JSON, comparison, terminals, signals."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from foretell import LLM, Sampling
from foretell.cli import terminal
from foretell.cli.terminal import ACCEPTED, OFF
from foretell.engine.request import Event
from tests.cli.conftest import write_tiny
from tests.cli.run import PROGRAM, Terminal, foretell

GREEDY = ("--temperature", "0")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, max_batch=1)


def test_text_is_that_of_the_engine(tiny: Path, llm: LLM) -> None:
    result = foretell("generate", "abc abc abc", "--model", tiny, "-n", 40, "--seed", 3)
    assert result.exit_code == 0
    [expected] = llm.chat([{"role": "user", "content": "abc abc abc"}], Sampling(seed=3, max_tokens=40))
    assert result.stdout.rstrip("\n") == expected.text.rstrip("\n")
    assert result.stderr == "" and "\x1b[" not in result.stdout


def test_raw_and_system_and_standard_input(tiny: Path, llm: LLM) -> None:
    options = ("--model", tiny, "-n", 5, "--json", *GREEDY)
    raw = json.loads(foretell("generate", "--raw", "-", *options, input="ab\ncd").stdout)
    assert llm.tokenizer is not None and raw["prompt_token_ids"] == llm.tokenizer.encode("ab\ncd")
    asked = json.loads(foretell("generate", "hi", "--system", "Be brief.", *options).stdout)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert asked["prompt_token_ids"] == llm.encode_chat(messages)
    refused = foretell("generate", "--raw", "hi", "--system", "Be brief.", *options)
    assert refused.exit_code == 2 and "--system needs --chat" in refused.stderr
    assert foretell("generate", "", *options).exit_code == 2


def test_memory_is_kept_shown_and_refused(tiny: Path) -> None:
    options = ("generate", "abc", "--model", tiny, "-n", 4, "--max-context", 500)
    answer = json.loads(foretell(*options, "--json", "--memory", "200MB").stdout)
    memory = answer["memory"]
    assert memory["limit"] == 200_000_000 and memory["peak"] <= memory["limit"] and memory["full_requests"] == 1
    shown = foretell(*options, "--stats", "--memory", "200MB").stderr
    assert "of 200.0 MB: weights" in shown and "1 request at full length" in shown
    refused = foretell(*options, "--memory", "1MB")
    assert refused.exit_code == 2 and "memory 1.0 MB is not enough" in refused.stderr
    wrong = foretell(*options, "--memory", "lots")
    assert wrong.exit_code == 2 and wrong.stderr.count("\n") == 1 and "not 'lots'" in wrong.stderr


def test_json_is_complete(tiny: Path) -> None:
    result = foretell("generate", "abc", "--model", tiny, "-n", 12, "--json", "--logprobs", 2, "--seed", 5)
    answer = json.loads(result.stdout)
    assert answer["finish_reason"] == "length" and answer["seed"] == 5
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == 12
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in answer["logprobs"])
    stats = answer["stats"]
    assert stats["emitted"] == 12 and stats["rounds"] + stats["accepted"] == 12
    assert stats["alpha"] == (stats["accepted"] / stats["drafted"] if stats["drafted"] else 0)
    assert stats["E"] == 12 / stats["rounds"] and stats["tokens_per_second"] > 0
    assert stats["estimated_speedup"] == stats["plain_s"] / stats["decode_s"]
    assert stats["wasted_share"] == stats["wasted_s"] / stats["decode_s"] < 1
    assert sum(stats["accepted_by_depth"]) == stats["accepted"]
    assert sum(stats["drafted_by_depth"]) == stats["drafted"]
    assert {"text", "backend", "exact", "promise", "model"} <= answer.keys()


def test_options_reach_the_request(tiny: Path) -> None:
    always = json.loads(
        foretell("generate", "abc", "-m", tiny, "--json", "-n", 6, "--logit-bias", "65=100", *GREEDY).stdout
    )
    assert always["token_ids"] == [65] * 6
    stopped = json.loads(
        foretell("generate", "abc", "-m", tiny, "--json", "--logit-bias", "65:100", "--stop-token-id", 65).stdout
    )
    assert stopped["token_ids"] == [65] and stopped["finish_reason"] == "stop"
    shorter = json.loads(
        foretell("generate", "abc", "-m", tiny, "--json", "-n", 30, "--num_speculative_tokens=1", *GREEDY).stdout
    )
    assert len(shorter["stats"]["drafted_by_depth"]) <= 1


def test_a_model_without_tokenizer_takes_and_gives_ids(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "bare", tokenizer=False)
    result = foretell("generate", "1, 2 3", "--token-ids", "--model", folder, "-n", 4, *GREEDY)
    assert result.exit_code == 0 and len(result.stdout.split()) == 4
    answer = json.loads(foretell("generate", "1 2 3", "--token-ids", "-m", folder, "-n", 4, "--json", *GREEDY).stdout)
    assert answer["token_ids"] == [int(word) for word in result.stdout.split()]
    refused = foretell("generate", "hello", "-m", folder)
    assert refused.exit_code == 2 and "no tokenizer" in refused.stderr
    refused = foretell("generate", "1 x", "--token-ids", "-m", folder)
    assert refused.exit_code == 2 and "'x' is not a token id" in refused.stderr


def test_stats(tiny: Path) -> None:
    result = foretell("generate", "abc", "--model", tiny, "-n", 20, "--stats", "--seed", 11)
    for name in ("rounds", "drafted", "accepted", "alpha", "E (", "by depth", "tokens/s", "prefill", "cached prompt"):
        assert name in result.stderr
    assert re.search(r"^speed-up over plain decoding \(estimated\) +\d+\.\d\dx *$", result.stderr, re.M)
    assert re.search(r"^spent on rejected drafts \(estimated\) +\d+\.\d ms, \d+\.\d % *$", result.stderr, re.M)
    assert re.search(r"^seed +11 *$", result.stderr, re.M)
    assert "bit-identical to plain decoding: checked on this machine\n" in result.stderr
    assert "rounds" not in result.stdout


def test_no_estimate_without_a_drafter(tiny: Path) -> None:
    options = ("generate", "abc", "--model", tiny, "-n", 4, "--drafter", "none")
    assert re.search(r"^speed-up over plain decoding \(estimated\) +- *$", foretell(*options, "--stats").stderr, re.M)
    stats = json.loads(foretell(*options, "--json").stdout)["stats"]
    assert stats["estimated_speedup"] is None and stats["wasted_share"] is None


def test_the_estimate_beside_what_was_measured(tiny: Path) -> None:
    shown = foretell("generate", "abc abc", "-m", tiny, "-n", 24, "--compare", *GREEDY).stderr
    assert re.search(r"^speed-up +\d", shown, re.M) and re.search(r"^speed-up, as estimated [a-z ]+ \d", shown, re.M)


def test_compare(tiny: Path) -> None:
    result = foretell("generate", "abc abc abc", "-m", tiny, "-n", 48, "--compare", "--json", "--temperature", 0.5)
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    compared = answer["compare"]
    assert compared["identical"] and compared["first_difference"] is None
    assert compared["plain_token_ids"] == answer["token_ids"]
    assert compared["speedup"] == compared["tokens_per_second"] / compared["plain_tokens_per_second"]


def test_compare_exits_1_if_promised_tokens_differ(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.bench.compare.first_difference", lambda a, b: 3)
    options = ("-m", tiny, "-n", 8, "--compare")
    result = foretell("generate", "abc", *options, *GREEDY)
    assert result.exit_code == 1
    assert "differ from token 3 on" in result.stderr and "the tokens differ" in result.stderr
    result = foretell("generate", "abc", *options, "--rule", "ratio", "--temperature", 1)
    assert result.exit_code == 0 and "keeps the distribution" in result.stderr


def test_a_prediction(tiny: Path, tmp_path: Path) -> None:
    common = ("generate", "hello", "-m", tiny, "--temperature", 0, "-n", 40, "--ignore-eos", "--json")
    plain = json.loads(foretell(*common, "--drafter", "none").stdout)
    file = tmp_path / "expected.txt"
    file.write_text("some text that is not the answer")
    done = json.loads(foretell(*common, "--prediction", file).stdout)
    assert done["token_ids"] == plain["token_ids"] and done["stats"]["by_member"]["prediction"][0] > 0
    missing = foretell(*common, "--prediction", tmp_path / "nothing.txt")
    assert missing.exit_code == 2 and "--prediction: " in missing.stderr and missing.stderr.count("\n") == 1
    wrong = foretell(*common, "--prediction", file, "--drafter", "ngram")
    assert wrong.exit_code == 2 and "needs drafter 'prediction'" in wrong.stderr


def test_compare_of_a_single_token(tiny: Path) -> None:
    result = foretell("generate", "abc", "-m", tiny, "-n", 1, "--compare")
    assert result.exit_code == 0 and "identical" in result.stderr


def test_colours_only_where_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.colours()
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.colours()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.colours()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert not terminal.colours()


def test_writer_colours_by_token_and_keeps_controls_off(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    writer = terminal.Writer(llm.tokenizer, colour=True)
    a, b, escape = (llm.tokenizer.encode(letter)[0] for letter in "ab\x1b")
    writer.write(Event("ab", [a, b], [True, False]))
    writer.write(Event("\x1ba", [escape, a], [False, False]))
    writer.write(Event("b", [b, a], [True, True], "stop"))  # a stop string took the last token's text
    writer.end()
    assert capsys.readouterr().out == f"{ACCEPTED}a{OFF}ba{ACCEPTED}b{OFF}\n"


def test_terminal(tiny: Path) -> None:
    run = Terminal("generate", "abc abc", "-m", tiny, "-n", 150, "--ignore-eos", "--stats", *GREEDY)
    code, seen = run.end()
    assert code == 0
    assert ACCEPTED in seen and "guessed by the drafter" in seen
    assert "rounds" in seen


def test_ctrl_c_ends_with_what_is_there(tiny: Path) -> None:
    run = Terminal("generate", "abc abc", "-m", tiny, "-n", 4000, "--ignore-eos", "--stats", env={"NO_COLOR": "1"})
    run.until("\n")  # the spinner's line at least
    run.until("\ufffd")  # random bytes: the answer is on its way
    run.send("\x03")
    code, seen = run.end()
    assert code == 130
    assert "Traceback" not in seen and "rounds" in seen
    assert ACCEPTED not in seen


def test_a_reader_that_leaves(tiny: Path) -> None:
    command = [*PROGRAM, "generate", "abc abc", "-m", str(tiny), "-n", "4000", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(8)
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""


def test_json_of_an_interrupted_run(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.Interrupt, "__call__", lambda self: True)
    result = foretell("generate", "abc", "-m", tiny, "--json", "--compare")
    answer = json.loads(result.stdout)
    assert result.exit_code == 130
    assert answer["finish_reason"] == "abort" and answer["token_ids"] == [] and "compare" not in answer


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_a_draft_model(tiny: Path, rule: str) -> None:
    options = ("-m", tiny, "-md", tiny, "--rule", rule, "--draft-max", 3, "-n", 40, "--json", "--compare", *GREEDY)
    answer = json.loads(foretell("generate", "abc", *options).stdout)
    assert answer["compare"]["identical"]
    assert answer["stats"]["alpha"] > 0.9  # the model guesses itself
    assert len(answer["stats"]["accepted_by_depth"]) == 3
