"""Options for other engines: of the right method and number, and such that a shell and YAML read them back."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import typer

from foretell.cli import app
from foretell.cli.engines import Choice, settings

SCHEDULE = [(1, 3, 4), (4, 9, 2), (10, 64, 0)]


def of(
    drafter: str = "ngram", draft_model: str | None = None, length: int = 4, model: str = "org/big"
) -> dict[str, str]:
    schedule = SCHEDULE if length else [(1, 64, 0)]
    return {s.engine: s.code for s in settings(Choice(model, drafter, draft_model, length, schedule))}


def config(code: str) -> dict[str, object]:
    words = shlex.split(code)
    found: dict[str, object] = json.loads(words[words.index("--speculative-config") + 1])
    return found


def test_ngram() -> None:
    found = of("ngram")
    expected = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 4}
    assert config(found["vLLM"]) == expected and shlex.split(found["vLLM"])[:3] == ["vllm", "serve", "org/big"]
    assert "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5" in found["SGLang"], "it counts the root"
    assert "decoding_type: NGram\n" in found["TensorRT-LLM"] and "max_draft_len: 4" in found["TensorRT-LLM"]
    assert found["TensorRT-LLM"].endswith("max_concurrency: 9"), "the last batch that drafting pays for"
    assert found["llama.cpp"] == "llama-server -m big.gguf --spec-type ngram-simple --spec-ngram-simple-size-m 4"


@pytest.mark.parametrize("drafter", ["suffix", "auto", "ngram+suffix", "suffix+recycling+ngram"])
def test_suffix(drafter: str) -> None:
    found = of(drafter)
    assert config(found["vLLM"]) == {"method": "suffix", "num_speculative_tokens": 4}
    assert "decoding_type: SA\n" in found["TensorRT-LLM"]
    notes = {s.engine: s.note for s in settings(Choice("m", drafter, None, 4, [(1, 64, 4)]))}
    assert all("it has no suffix matching" in notes[engine] for engine in ("SGLang", "llama.cpp"))


def test_a_draft_model() -> None:
    found = of("model", "org/small", 2)
    assert config(found["vLLM"]) == {"method": "draft_model", "model": "org/small", "num_speculative_tokens": 2}
    assert (
        "STANDALONE --speculative-draft-model-path org/small --speculative-num-steps 2 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 3"
    ) in found["SGLang"]
    assert "decoding_type: DraftTarget\n  speculative_model: org/small\n" in found["TensorRT-LLM"]
    assert found["llama.cpp"].endswith("--spec-type draft-simple --spec-draft-model small.gguf --spec-draft-n-max 2")


def test_off() -> None:
    found = of("ngram", length=0)
    assert found["foretell"].endswith("--drafter none")
    assert all(code == "" for engine, code in found.items() if engine != "foretell")


@pytest.mark.parametrize("drafter", ["recycling", "lookahead", "early_exit"])
def test_what_no_other_engine_has(drafter: str) -> None:
    found = settings(Choice("m", drafter, None, 4, SCHEDULE))
    assert all(not s.code and f"nothing like drafter '{drafter}' there" in s.note for s in found[1:])


def test_lengths_by_batch_are_named_where_vllm_takes_them() -> None:
    [note] = [s.note for s in settings(Choice("m", "ngram", None, 4, SCHEDULE)) if s.engine == "vLLM"]
    assert '"num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 9, 2], [10, 64, 0]]' in note
    [note] = [s.note for s in settings(Choice("m", "ngram", None, 4, [(1, 64, 4)])) if s.engine == "vLLM"]
    assert note == ""


@pytest.mark.parametrize("name", ["it's a model", 'with "quotes"', "a b/c d.gguf", "$(touch x)"])
def test_names_reach_the_shell_as_they_are(name: str) -> None:
    found = of("model", name, model=name)
    assert shlex.split(found["vLLM"])[2] == name and config(found["vLLM"])["model"] == name
    assert name in shlex.split(found["SGLang"]) and name in shlex.split(found["foretell"])
    assert shlex.split(found["TensorRT-LLM"].splitlines()[0])[1] == name


@pytest.mark.parametrize(("drafter", "draft_model"), [("ngram", None), ("auto", None), ("model", "small")])
def test_our_own_options_parse(drafter: str, draft_model: str | None) -> None:
    words = shlex.split(of(drafter, draft_model)["foretell"])[1:]
    command = typer.main.get_command(app)
    context = command.commands[words[0]].make_context("foretell", words[1:])  # type: ignore[attr-defined]
    assert context.params["draft_tokens"] == "4" and context.params["draft_model"] == draft_model
    assert draft_model or context.params["drafter"] == drafter


def test_only_names_that_are_documented() -> None:
    """Every option printed for another engine, so that a new one is looked up before it is added here."""
    texts = [of(drafter, draft) for drafter, draft in (("ngram", None), ("suffix", None), ("model", "small"))]
    options = {
        o for text in texts for engine in list(text)[1:] for o in re.findall(r"(?<![\w-])--[\w-]+", text[engine])
    }
    assert options == {
        "--speculative-config",
        "--model",
        "--speculative-algorithm",
        "--speculative-num-draft-tokens",
        "--speculative-draft-model-path",
        "--speculative-num-steps",
        "--speculative-eagle-topk",
        "--config",
        "--spec-type",
        "--spec-ngram-simple-size-m",
        "--spec-draft-model",
        "--spec-draft-n-max",
    }
