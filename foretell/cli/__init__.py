"""The command line: one file per verb, which parses and prints; what it prints is computed elsewhere."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from foretell.cli import bench, chat, generate, models, plan
from foretell.cli.command import Command, close_stdout, help_alone

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False
) -> None:
    """Faster text from a language model, and never another text.

    Examples:

    \b
      foretell generate "Why is the sky blue?" --stats
      foretell chat
      foretell COMMAND --help
    """
    if version:
        print(metadata.version("foretell"))
        raise typer.Exit
    help_alone(ctx)


app.command("generate", cls=Command)(generate.command)
app.command("chat", cls=Command)(chat.command)
app.command("plan", cls=Command)(plan.command)
app.add_typer(models.app, name="models")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """The `foretell` program. Exit codes: 0, 1 (it failed), 2 (bad arguments), 130 (Ctrl-C), 141 (broken pipe)."""
    code = 0
    try:
        code = app(prog_name="foretell", standalone_mode=False) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        close_stdout()
        code = 141
    except Exception as error:
        # typer's own errors: it brings its own copy of click, or uses the installed one, depending on its version
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        reason = " ".join(str(error.format_message()).split())
        if reason:
            print(f"{context.command_path if context else 'foretell'}: {reason}", file=sys.stderr)
        code = getattr(error, "exit_code", 1)
    sys.exit(code)
