"""`foretell models exits`: which of a model's layers draft best, measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from foretell.bench import exits
from foretell.bench.prompts import PROMPTS
from foretell.cli import report
from foretell.cli.command import verb
from foretell.cli.options import DEFAULT_MODEL
from foretell.cli.terminal import fetch, progress
from foretell.drafters.early_exit import CHOICE, Choice
from foretell.engine.llm import LLM
from foretell.models import hub
from foretell.models.files import read_text

SHOWN = 4  # depths whose alpha is printed


@verb
def command(
    name: Annotated[str, typer.Argument(help="A built-in name, a folder, a .gguf file or a hub id.")] = DEFAULT_MODEL,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Calibrate on this text; default: what the model itself writes."),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="As of `generate`.")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Find the layers that drafter `early_exit` should use, and say whether they pay.

    The first layers, and all but some: how often they alone say what the whole model says, what they cost, and the
    speed-up that follows from both. That takes some minutes for a model of 135 M parameters. The best choice is kept
    in the cache folder and `early_exit` uses it, also where it does not pay, since it runs only if it is named.

    Examples:

    \b
      foretell models exits
      foretell models exits smollm2-135m-instruct --text README.md --json
    """
    written = None if text is None else read_text(text)
    with progress() as say:
        if name in hub.BUILTIN:
            fetch(name, say)
        say(f"loading {name}")
        llm = LLM(name, drafter="none", dtype=dtype, max_batch=len(PROMPTS) + 1)
        say("writing a text" if written is None else "reading the text")
        texts = exits.written(llm) if written is None else exits.given(llm, written)
        found = exits.find(llm, texts, say)
    path, best = llm.folder / CHOICE, found["best"]
    Choice(tuple(best["layers"]), best["draft_tokens"]).save(path)
    result = {**found, "text": None if text is None else str(text), "saved": str(path)}
    if json_:
        print(json.dumps(result))
    else:
        _print(result, report.console())


def _print(result: dict[str, Any], console: Console) -> None:
    depths = [f"alpha {depth}" for depth in range(1, SHOWN + 1)]
    table = report.plain_table("layers", "of all", "gamma", *depths, "draft tokens", "E", "predicted")
    for row in result["candidates"]:
        drafted = row["draft_tokens"]
        table.add_row(
            exits.spelled(row["layers"]),
            f"{len(row['layers'])} of {result['num_layers']}",
            f"{row['gamma']:.3f}",
            *(f"{alpha:.3f}" for alpha in row["alpha"][:SHOWN]),
            str(drafted),
            f"{row['E'][drafted - 1]:.3f}",
            f"{row['predicted_speedup']:.2f}x",
        )
    ratios = ", ".join(f"{ratio:.2f}" for ratio in result["forward_ratio"].values())
    best = result["best"]
    console.print(table)
    console.print(
        f"\n{result['places']} places; a forward over 2 to {exits.DEPTH + 1} rows takes {ratios} times one row"
    )
    choice = f"layers {exits.spelled(best['layers'])} with {best['draft_tokens']} drafted tokens a round"
    if result["pays"]:
        verdict = f"best: {choice}, {best['predicted_speedup']:.2f}x predicted; `--drafter early_exit` now uses it"
    else:
        verdict = (
            f"none pays off here: the best, {choice}, is predicted to reach {best['predicted_speedup']:.2f}x of plain "
            "decoding; `--drafter early_exit` uses it if you name it all the same"
        )
    console.print(verdict, soft_wrap=True)
