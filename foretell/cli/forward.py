"""`foretell bench forward`: what a forward of the model costs, by its rows and beside reading its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from foretell.bench.forward import Settings, forward
from foretell.cli import report
from foretell.cli.command import verb
from foretell.cli.options import TargetOptions, numbers
from foretell.cli.terminal import Interrupt, bar, load

DEFAULT = Settings()


@dataclass
class ForwardOptions:
    rows: Annotated[str, typer.Option(metavar="N,N,...", help="Rows of the forwards.")] = ",".join(
        map(str, DEFAULT.rows)
    )
    context: Annotated[int, typer.Option(metavar="N", help="Tokens before them.")] = DEFAULT.context
    repetitions: Annotated[int, typer.Option(metavar="N", help="Of every forward; medians are shown.")] = (
        DEFAULT.repetitions
    )
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False


@verb
def command(model: TargetOptions, options: ForwardOptions) -> None:
    """What a forward of the model costs by its number of rows.

    Forwards over each number of rows take turns, and between any two of them all threads read the model's packed
    weights once and do nothing with them: a forward of one row cannot be faster than that. Drafting pays as far as a
    forward over some rows costs little more than one over a single row.

    Examples:

    \b
      foretell bench forward
      foretell bench forward --rows 1,5,16 --context 2000 --json
    """
    settings = Settings(numbers("--rows", options.rows), options.context, options.repetitions)
    llm = load(model, drafter="none")
    with Interrupt() as interrupt, bar() as progress:
        result = {**report.subject(llm, model), **forward(llm, settings, progress, interrupt)}
    print(json.dumps(result)) if options.json else _print(result)
    if interrupt():
        raise typer.Exit(130)


def _print(result: dict[str, Any]) -> None:
    console = report.console()
    console.print(report.subject_line(result), markup=False)
    table = report.plain_table("rows", "ms", "times one row", "times streaming")
    for row in result["rows"]:
        ratios = (row[name] or 0 for name in ("times_one_row", "times_streaming"))
        table.add_row(str(row["rows"]), f"{row['ms']:.2f}", *(report.speed(ratio) for ratio in ratios))
    console.print(f"medians of {result['repetitions']} forwards behind {result['context']} tokens")
    console.print()
    console.print(table)
    if result["streaming_ms"]:
        size, ms = result["streaming_bytes"], result["streaming_ms"]
        console.print(f"\nstreaming: {size / 1e6:.0f} MB of weights read in {ms:.2f} ms, {size / ms / 1e6:.1f} GB/s")
    if not result["complete"]:
        console.print(report.STOPPED)
