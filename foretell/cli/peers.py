"""Measurements beside other engines: the options that choose these, and all that is the same whatever is measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from foretell.bench.peers import ALL, FAMILIES, PEERS, Peers, Settings
from foretell.cli import page, report
from foretell.cli.options import ModelOptions
from foretell.cli.prompts import PromptOptions
from foretell.cli.terminal import Interrupt, bar, load
from foretell.report.page import Section


@dataclass
class PeerOptions:
    peers: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help=f"The same weights in other engines: {', '.join(PEERS)}; {ALL}: each."),
    ] = None
    peer_pythons: Annotated[
        list[str],
        typer.Option(
            "--peer-python",
            metavar="NAME=PATH",
            help=f"The Python that has one of {', '.join(FAMILIES)}; several times. Default: this one.",
        ),
    ] = field(default_factory=list)
    peer_draft_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Of peers that look up; default: as their documentation has it.")
    ] = None
    peer_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="A peer that takes longer to load or to answer is left out.")
    ] = 600.0

    def settings(self) -> Settings:
        names = [name.strip() for name in (self.peers or "").split(",") if name.strip()]
        if self.peers is not None and not names:
            raise ValueError(f"--peers names none: choose from {', '.join(PEERS)}, or {ALL!r}")
        pythons = [text.partition("=") for text in self.peer_pythons]
        wrong = next((name + equals for name, equals, path in pythons if not path), None)
        if wrong is not None:
            raise ValueError(f"--peer-python takes a name and a path, as in vllm=venv/bin/python, not {wrong!r}")
        return Settings(
            list(PEERS) if ALL in names else list(dict.fromkeys(names)),
            {name: path for name, _, path in pythons},
            self.peer_draft_tokens,
            self.peer_timeout,
        )


def notes(result: dict[str, Any]) -> list[str]:
    """A line for every peer that was asked for."""
    lines = []
    for name, note in result["peers"].items():
        if "skipped" in note:
            lines.append(f"{name} was left out: {note['skipped']}")
        elif note:
            looked = f", {note['draft_tokens']} drafted tokens a round" if note["draft_tokens"] else ""
            failed = f"; it failed: {note['failed']}" if "failed" in note else ""
            lines.append(f"{name}: version {note['version']}, {note['dtype']}{looked}{failed}")
    return lines


class Shown(Protocol):
    """What options of every measurement say of its report."""

    temperature: float
    html: Path | None
    json: bool


@dataclass(frozen=True, slots=True)
class Bench:
    """title: of its page. run: told the model, the prompts, the opened peers, a progress and when to stop; returns the
    report. sections: what there is to show of it, with plots or without. max_batch: requests at once."""

    title: str
    run: Callable[..., dict[str, Any]]
    sections: Callable[[dict[str, Any], bool], list[Section]]
    max_batch: int = 1


def measure(bench: Bench, model: ModelOptions, prompts: PromptOptions, options: Shown, others: PeerOptions) -> None:
    """Run it, show it, and leave with the exit code that it deserves. ValueError before anything is loaded."""
    rivals, questions = others.settings(), prompts.chosen()
    page.check(options.html)
    llm = load(model, max_batch=bench.max_batch)
    facts = report.subject(llm, model) | report.drafting(llm, model, options.temperature)
    with (
        Interrupt() as interrupt,
        bar() as progress,
        Peers(rivals, llm, model.model, model.dtype, facts["threads"]) as engines,
    ):
        found = bench.run(llm, questions, peers=engines, progress=progress, stopping=interrupt)
    result = facts | found
    sections = bench.sections(result, options.html is not None)
    print(json.dumps(result)) if options.json else _show(result, sections)
    page.write(options.html, bench.title, report.intro(result), [*sections, _how(result)])
    report.leave(result, interrupt())


def _how(result: dict[str, Any]) -> Section:
    """How everything was run, for a page."""
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    return Section("How it was run", [f"Settings: {settings}.", *notes(result)])


def _show(result: dict[str, Any], sections: Sequence[Section]) -> None:
    """The result in a terminal: what was run, its tables, what there is to say of the first one and of the peers."""
    console = report.console()
    for line in report.intro(result):
        console.print(line, markup=False, soft_wrap=True)
    page.show(sections, console)
    console.print()
    for line in [*sections[0].text, *notes(result)]:
        console.print(line, markup=False, soft_wrap=True)
