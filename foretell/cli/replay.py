"""`foretell bench replay`: drafting what an agent said, without running a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from foretell.bench.replay import Settings, replay, trajectories
from foretell.cli import report
from foretell.cli.command import verb
from foretell.cli.options import DEFAULT_MODEL
from foretell.cli.terminal import bar, fetched
from foretell.drafters import SOURCES
from foretell.engine.llm import LLM


@dataclass
class ReplayOptions:
    file: Annotated[Path, typer.Argument(help='Recorded: a list of {"task_id": ..., "traj": [messages]}.')]
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="NAME", help="Whose tokens and chat template are used.")
    ] = DEFAULT_MODEL
    names: Annotated[
        list[str],
        typer.Option(
            "--drafter",
            metavar="METHOD",
            help=f"One to measure, several times: {', '.join(SOURCES)}, or any of them joined by '+'.",
        ),
    ] = field(default_factory=lambda: [*SOURCES, "suffix+recycling+ngram"])
    tasks: Annotated[
        list[int], typer.Option("--task", metavar="N", help="Only this task, several times; default: five of them.")
    ] = field(default_factory=list)
    warm: Annotated[int, typer.Option(metavar="N", help="Trajectories of other tasks that a warm drafter knows.")] = 8
    same_task: Annotated[
        bool, typer.Option("--same-task", help="A warm drafter knows the file's other runs of the same task too.")
    ] = False
    draft_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Drafted tokens a round; default: as many as the drafter may have.")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False


@verb
def command(options: ReplayOptions) -> None:
    """How much of a recorded agent's messages drafters would have guessed.

    Every assistant message is drafted for after the conversation before it, and the recording decides what is
    accepted; tool calls are JSON. The model lends its tokens and its template, and computes nothing, so drafters that
    need its logits show less than they can do. Cold: each conversation is the first one that the drafter sees. Warm:
    it saw conversations about other tasks before, with --same-task also the other runs of the same one.

    Examples:

    \b
      foretell bench replay gpt-4o-airline.json
      foretell bench replay gpt-4o-airline.json --task 3 --drafter suffix --draft-tokens 15 --warm 20 --json
    """
    names = list(dict.fromkeys(options.names))
    stranger = next((part for name in names for part in name.split("+") if part not in SOURCES), None)
    if stranger is not None:
        raise ValueError(f"drafter {stranger!r} needs a model that runs: choose from {', '.join(SOURCES)}")
    settings = Settings(options.tasks, options.warm, options.draft_tokens, options.same_task)
    found = trajectories(options.file)
    fetched(options.model)
    with bar() as progress:
        result = replay(lambda name: LLM(options.model, name, max_batch=1), names, found, settings, progress)
    print(json.dumps(result)) if options.json else _print(result)


def _known(result: dict[str, Any]) -> str:
    return f"{result['warm']} + same task" if result["same_task"] else str(result["warm"])


def _print(result: dict[str, Any]) -> None:
    table = report.plain_table(
        "drafter", "other trajectories", "answers", "messages", "tokens", "E", "alpha", "nodes/round", "draft ms"
    )
    for entry in result["drafters"]:
        for state, known in (("cold", "0"), ("warm", _known(result))):
            for row in [*entry[state]["kinds"], {"kind": "all", **entry[state]["all"]}]:
                table.add_row(
                    entry["drafter"],
                    known,
                    row["kind"],
                    str(row["prompts"]),
                    str(row["tokens"]),
                    f"{row['E']:.3f}",
                    f"{row['alpha']:.3f}",
                    f"{row['nodes_per_round']:.1f}",
                    f"{row['draft_ms']:.2f}",
                )
    console = report.console()
    console.print(f"tasks {', '.join(map(str, result['tasks']))}; prompts: their last {result['context']} tokens")
    console.print()
    console.print(table)
