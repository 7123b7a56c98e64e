"""The options that choose the prompts of a measurement, the same for all verbs that take them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.questions import SETS, Question, gsm8k, humaneval, of_kinds, own, spec_bench


def _file(help: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(metavar="FILE", help=help)
    return option


@dataclass
class PromptOptions:
    set: Annotated[
        str | None, typer.Option(metavar="SET", help=f"Prompts that come with the program: {', '.join(SETS)}.")
    ] = None
    questions: Annotated[Path | None, _file("Prompts in the form of Spec-Bench's question.jsonl.")] = None
    humaneval: Annotated[Path | None, _file("Functions to complete, in the form of HumanEval.jsonl or .jsonl.gz.")] = (
        None
    )
    gsm8k: Annotated[Path | None, _file("Word problems in the form of GSM8K's test.jsonl.")] = None
    per_kind: Annotated[int, typer.Option(metavar="N", help="At most so many of each kind from these files.")] = 10
    prompts: Annotated[
        Path | None, _file('Own prompts, all of them: one a line, or .jsonl lines {"kind": ..., "prompt": ...}.')
    ] = None
    kinds: Annotated[
        list[str], typer.Option("--kind", metavar="KIND", help="Only prompts of this kind, several times.")
    ] = field(default_factory=list)

    def chosen(self) -> list[Question]:
        """The prompts of all places that are named, of the first set where none is. ValueError if there are none."""
        found: list[Question] = []
        if self.set is not None and self.set not in SETS:
            raise ValueError(f"there is no set of prompts {self.set!r}: choose from {', '.join(SETS)}")
        if self.set is not None or not any((self.questions, self.humaneval, self.gsm8k, self.prompts)):
            found += SETS[self.set or next(iter(SETS))]()
        for path, read in ((self.questions, spec_bench), (self.humaneval, humaneval), (self.gsm8k, gsm8k)):
            if path is not None:
                found += read(path, self.per_kind)
        if self.prompts is not None:
            found += own(self.prompts)
        return of_kinds(found, self.kinds)
