"""Prompts from files in the forms of published sets, and the options that choose among them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from foretell.bench.load import distinct
from foretell.bench.questions import Question, gsm8k, humaneval
from foretell.cli.prompts import PromptOptions
from tests.cli.run import foretell

FUNCTION = 'def one(x):\n    """Return x."""\n'


def test_humaneval_is_read_packed_and_plain(tmp_path: Path) -> None:
    plain, packed = tmp_path / "h.jsonl", tmp_path / "h.jsonl.gz"
    lines = "\n".join(json.dumps({"task_id": i, "prompt": FUNCTION + "#" * i}) for i in range(3))
    plain.write_text(lines)
    packed.write_bytes(gzip.compress(lines.encode()))
    found = humaneval(plain, 2)
    assert found == humaneval(packed, 2) and len(found) == 2 and len(humaneval(plain, 10)) == 3
    assert {question.kind for question in found} == {"humaneval"}
    assert found[1].text.split("```python\n")[1] == FUNCTION + "#```"


def test_gsm8k(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(
        '{"question": "How many?", "answer": "#### 3"}\n\n{"question": "And now\u2028then?", "answer": ""}\n'
    )
    assert gsm8k(path, 5) == [Question("gsm8k", "How many?"), Question("gsm8k", "And now\u2028then?")]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.jsonl", b'{"question": "q"}', 'line 1: it needs a "prompt"'),
        ("a.jsonl", b'{"prompt": ""}', 'line 1: it needs a "prompt"'),
        ("a.jsonl.gz", b"not packed", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "p"}')[:-9], "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b"\xff\xfe"), "cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=reason):
        humaneval(path, 3)


def test_places_are_joined(tmp_path: Path) -> None:
    functions, problems, mine = tmp_path / "h.jsonl", tmp_path / "g.jsonl", tmp_path / "mine.txt"
    functions.write_text("\n".join(json.dumps({"prompt": FUNCTION}) for _ in range(4)))
    problems.write_text("\n".join(json.dumps({"question": "?"}) for _ in range(4)))
    mine.write_text("\n".join("abcd"))
    options = PromptOptions(humaneval=functions, gsm8k=problems, prompts=mine, per_kind=3)
    assert [question.kind for question in options.chosen()] == ["humaneval"] * 3 + ["gsm8k"] * 3 + ["mine"] * 4
    options.kinds = ["gsm8k"]
    assert len(options.chosen()) == 3
    assert [q.kind for q in PromptOptions(set="edits", prompts=mine).chosen()] == ["edit"] * 10 + ["mine"] * 4
    with pytest.raises(ValueError, match="per-kind must be at least 1"):
        PromptOptions(gsm8k=problems, per_kind=0).chosen()
    mine.write_text("\n")
    with pytest.raises(ValueError, match="there are no prompts"):
        PromptOptions(prompts=mine).chosen()


def test_no_two_of_distinct_begin_alike() -> None:
    found = distinct([Question("a", "Why?"), Question("b", "How?")], 5)
    assert [q.text for q in found] == ["Why?", "How?", "2. Why?", "2. How?", "3. Why?"]
    assert [q.kind for q in found] == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize("verb", ["accept", "decode", "load"])
def test_a_missing_file_is_one_sentence(verb: str) -> None:
    for option in ("--questions", "--humaneval", "--gsm8k", "--prompts"):
        result = foretell("bench", verb, option, "/nowhere.jsonl")
        assert result.exit_code == 2 and "/nowhere.jsonl cannot be read" in result.stderr
        assert result.stderr.count("\n") == 1
