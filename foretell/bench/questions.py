"""Prompts by kind: those written for this benchmark, files like Spec-Bench's, HumanEval's and GSM8K's, or one's own."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from foretell.bench.prompts import PROMPTS, ids_of
from foretell.engine.llm import LLM
from foretell.models.files import read_text

# Spec-Bench's names for its first kind; every other category is a kind of its own.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
KIND_OF = dict.fromkeys(MT_BENCH, "mt_bench")


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of a kind; for a model with a chat template it is the user's message."""

    kind: str
    text: str


def mixed() -> list[Question]:
    """The prompts of `bench decode`, one of each kind."""
    return [Question(kind, text) for kind, text in PROMPTS.items()]


def edits() -> list[Question]:
    """Files of ten languages, each with a small change to make: the answer is most of the prompt again.

    They are in `edits/`, named by language: what to do, an empty line, the file.
    """
    questions = []
    for file in sorted(resources.files("foretell.bench").joinpath("edits").iterdir(), key=lambda file: file.name):
        task, _, code = file.read_text(encoding="utf-8").partition("\n\n")
        questions.append(Question("edit", f"{task}\n\n```{file.name.partition('.')[0]}\n{code}```"))
    return questions


SETS: dict[str, Callable[[], list[Question]]] = {"mixed": mixed, "edits": edits}


def spec_bench(path: Path, per_kind: int) -> list[Question]:
    """The first turns of a file in the form of Spec-Bench (arXiv 2401.07851), lines with "category" and "turns": at
    most `per_kind` of each kind, of its categories in turn."""
    _check(per_kind)
    chosen: dict[str, dict[str, list[str]]] = {}
    for number, line in _json_lines(path):
        category, turns = line.get("category"), line.get("turns")
        if not isinstance(category, str) or not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ValueError(f'{path}, line {number}: a question needs a "category" and "turns", a list of texts')
        chosen.setdefault(KIND_OF.get(category, category), {}).setdefault(category, []).append(turns[0])
    return [
        Question(kind, text)
        for kind, categories in chosen.items()
        for text in _alternating(list(categories.values()))[:per_kind]
    ]


def humaneval(path: Path, count: int) -> list[Question]:
    """The first functions to complete of a file in the form of HumanEval (arXiv 2107.03374), lines with "prompt"."""
    lead = "Complete this Python function. Answer with the whole function.\n\n"
    return [Question("humaneval", f"{lead}```python\n{prompt}```") for prompt in _field(path, "prompt", count)]


def gsm8k(path: Path, count: int) -> list[Question]:
    """The first questions of a file in the form of GSM8K (arXiv 2110.14168), lines with "question"."""
    return [Question("gsm8k", text) for text in _field(path, "question", count)]


def own(path: Path) -> list[Question]:
    """A file of prompts: lines {"kind": ..., "prompt": ...} if its name ends in .jsonl, else a text on each line.

    Where no kind is named, it is the file's name.
    """
    if path.suffix != ".jsonl":
        return [Question(path.stem, line) for line in read_text(path).split("\n") if line.strip()]
    questions = []
    for number, line in _json_lines(path):
        kind, prompt = line.get("kind", path.stem), line.get("prompt")
        if not isinstance(kind, str) or not isinstance(prompt, str) or not prompt:
            raise ValueError(f'{path}, line {number}: it needs a "prompt", a text, and may have a "kind", another')
        questions.append(Question(kind, prompt))
    return questions


def of_kinds(questions: Sequence[Question], kinds: Sequence[str]) -> list[Question]:
    """Those of the kinds named, all if none is. ValueError for an unknown kind, or if there is no question at all."""
    there = list(dict.fromkeys(question.kind for question in questions))
    unknown = next((kind for kind in kinds if kind not in there), None)
    if unknown is not None:
        raise ValueError(f"there is no kind of prompt {unknown!r} here: choose from {', '.join(there)}")
    if not questions:
        raise ValueError("there are no prompts in what was given")
    return [question for question in questions if not kinds or question.kind in kinds]


def fitted(llm: LLM, questions: Sequence[Question]) -> list[list[int]]:
    """The prompts' token ids. ValueError if one leaves no room for an answer."""
    prompts = [ids_of(llm, question.text) for question in questions]
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    if len(prompts[longest]) >= llm.max_context:
        raise ValueError(
            f"prompt {longest + 1}, of kind {questions[longest].kind!r}, has {len(prompts[longest])} tokens, and the "
            f"context {llm.max_context}: leave it out or raise max_context"
        )
    return prompts


def _alternating(lists: Sequence[Sequence[str]]) -> list[str]:
    """The first of each list, then the second of each, and so on."""
    return [text for row in itertools.zip_longest(*lists) for text in row if text is not None]


def _check(per_kind: int) -> None:
    if per_kind < 1:
        raise ValueError(f"per-kind must be at least 1, not {per_kind}")


def _field(path: Path, name: str, count: int) -> list[str]:
    """A text that every line must have, of the first `count` lines."""
    _check(count)
    texts = []
    for number, line in _json_lines(path)[:count]:
        if not isinstance(line.get(name), str) or not line[name]:
            raise ValueError(f'{path}, line {number}: it needs a "{name}", a text')
        texts.append(line[name])
    return texts


def _text(path: Path) -> str:
    """The file's text, unpacked if its name ends in .gz."""
    if path.suffix != ".gz":
        return read_text(path)
    try:
        return gzip.decompress(path.read_bytes()).decode()
    except (OSError, EOFError, zlib.error, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not empty."""
    found = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number} must hold a JSON object, not {type(value).__name__}")
        found.append((number, value))
    return found
