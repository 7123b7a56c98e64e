"""Help, names, exit codes: everything that needs no model."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from importlib import metadata

import pytest

from foretell.cli import main
from foretell.cli.command import ALIASES, _canonical
from foretell.cli.options import ModelOptions, SamplingOptions
from foretell.drafters import METHODS
from foretell.types import Sampling
from foretell.verify import RULES
from tests.cli.run import foretell

VERBS = [[], ["generate"], ["chat"], ["models"], ["models", "list"], ["models", "fetch"], ["models", "show"]]
VERBS += [["bench"], *(["bench", name] for name in ("decode", "load", "forward", "accept", "replay"))]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_has_examples(verb: list[str]) -> None:
    result = foretell(*verb, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert " ".join(["foretell", *verb]) in result.stdout.partition("Examples:")[2]


@pytest.mark.parametrize("group", [[], ["models"], ["bench"]], ids=" ".join)
def test_a_group_alone_prints_its_help(group: list[str]) -> None:
    result = foretell(*group)
    assert result.exit_code == 0 and result.stdout == foretell(*group, "--help").stdout


def test_version() -> None:
    try:
        version = metadata.version("foretell")
    except metadata.PackageNotFoundError:
        pytest.skip("foretell runs from its source, uninstalled")
    assert foretell("--version").stdout == f"{version}\n"


def test_help_names_methods_and_rules() -> None:
    text = foretell("generate", "--help").stdout
    assert all(name in text for name in [*METHODS, *RULES])


def test_options_are_the_fields() -> None:
    names = {field.name for field in dataclasses.fields(SamplingOptions)}
    given_otherwise = {
        "logprobs",
        "draft_tokens",
        "prediction",
        "private",
    }  # of `generate`, of the model, by code alone
    assert names == {field.name for field in dataclasses.fields(Sampling)} - given_otherwise
    for group in (SamplingOptions, Sampling):
        assert {f.name: f.default for f in dataclasses.fields(group) if f.name == "max_tokens"} == {"max_tokens": 256}
    assert SamplingOptions().sampling() == Sampling()
    assert ModelOptions().arguments()["draft_tokens"] == "auto"
    assert ModelOptions(draft_tokens="7").arguments()["draft_tokens"] == 7


def test_every_alias_leads_to_an_option() -> None:
    text = foretell("generate", "--help").stdout
    for alias, name in ALIASES.items():
        assert f"{name} " in text
        assert f"{alias} " not in text.partition("Options:")[2]  # they are understood, not shown


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--num-speculative-tokens", "--draft-tokens"),
        ("--num_speculative_tokens=4", "--draft-tokens=4"),
        ("--draft-max", "--draft-tokens"),
        ("-md", "--draft-model"),
        ("--max_tokens=3", "--max-tokens=3"),
        ("--n-predict=3", "--max-tokens=3"),
        ("--temp", "--temperature"),
        ("plain_text", "plain_text"),
        ("-n", "-n"),
        ("---_", "---_"),
        ("a_b=c_d", "a_b=c_d"),
        ("--stop=a_b", "--stop=a_b"),
    ],
)
def test_aliases(given: str, meant: str) -> None:
    assert _canonical(given) == meant


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["hi", "--temperature", "-1"], "temperature must be 0"),
        (["hi", "--top-p", "2"], "top_p must be above 0"),
        (["hi", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["hi", "--logit-bias", "x=1"], "--logit-bias takes a token id and a number"),
        (["hi", "--logit-bias", "3"], "--logit-bias takes a token id and a number"),
        (["hi", "--drafter", "magic"], "drafter 'magic' is not one of none, ngram"),
        (["hi", "--rule", "magic"], "no rule 'magic'"),
        (["hi", "--dtype", "float8"], "dtype 'float8'"),
        (["hi", "--draft-tokens", "many"], "draft_tokens must be"),
        (["hi", "--draft-tokens", "-2"], "draft_tokens must be"),
        (["hi", "--threads", "0"], "threads must be a whole number of at least 1"),
        (["hi", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["hi", "--logprobs", "2"], "--logprobs needs --json"),
    ],
)
def test_bad_values_exit_2_with_one_line(arguments: list[str], reason: str) -> None:
    result = foretell("generate", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["generate"], "foretell generate: Missing argument"),
        (["generate", "hi", "--no-such"], "foretell generate: No such option"),
        (["generate", "hi", "--max-tokens", "x"], "foretell generate: Invalid value"),
        (["no-such-verb"], "foretell: No such command"),
    ],
)
def test_what_cannot_be_parsed_exits_2_with_one_line(
    arguments: list[str], start: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["foretell", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    out, error = capsys.readouterr()
    assert exit.value.code == 2
    assert error.startswith(start) and error.count("\n") == 1 and out == ""


def test_main_leaves_bugs_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("foretell.cli.app", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main()


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (None, 0)])
def test_main_exit_codes(
    error: type[BaseException] | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(**_: object) -> None:
        if error:
            raise error

    stand_in: Callable[..., None] = end
    monkeypatch.setattr("foretell.cli.app", stand_in)
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == code
    assert capsys.readouterr() == ("", "")
