"""`foretell bench`: measurements, each from one run with the engines taking turns."""

from __future__ import annotations

import typer

from foretell.cli import accept, decode, forward, load, replay
from foretell.cli.command import Command, help_alone

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def group(ctx: typer.Context) -> None:
    """Measure drafters: speed on this machine, and how much of what they guess is accepted.

    Examples:

    \b
      foretell bench decode
      foretell bench load
      foretell bench forward
      foretell bench accept
      foretell bench replay gpt-4o-airline.json
    """
    help_alone(ctx)


app.command("decode", cls=Command)(decode.command)
app.command("load", cls=Command)(load.command)
app.command("forward", cls=Command)(forward.command)
app.command("accept", cls=Command)(accept.command)
app.command("replay", cls=Command)(replay.command)
