"""`foretell models`: what is built in, fetching it, and what a model is made of and how it runs here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from foretell.cli import exits, report
from foretell.cli.command import Command, help_alone, verb
from foretell.cli.options import DEFAULT_MODEL
from foretell.cli.terminal import fetch, progress
from foretell.engine.llm import LLM
from foretell.models import hub
from foretell.models.open import prepare

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def group(ctx: typer.Context) -> None:
    """List, fetch and describe models.

    Examples:

    \b
      foretell models list
      foretell models show smollm2-135m-instruct --json
    """
    help_alone(ctx)


Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


@app.command("list", cls=Command)
@verb
def list_(json_: Json = False) -> None:
    """The built-in models, and whether they are on this machine.

    Examples:

    \b
      foretell models list
      foretell models list --json
    """
    listing = hub.listing()
    if json_:
        print(json.dumps(listing))
        return
    table = report.plain_table("name", "here", "size", "licence", "description")
    for entry in listing:
        here = "yes" if entry["cached"] else "no"
        table.add_row(entry["name"], here, _megabytes(entry["size"]), entry["licence"], entry["description"])
    report.console().print(table)


@app.command("fetch", cls=Command)
@verb
def fetch_(name: Annotated[str, typer.Argument(help="A built-in model.")] = DEFAULT_MODEL, json_: Json = False) -> None:
    """Download a built-in model, check it, and print where it is.

    Examples:

    \b
      foretell models fetch
      foretell models fetch smollm2-135m-instruct --json
    """
    with progress() as say:
        path = fetch(name, say)
    print(json.dumps({"name": name, "path": path}) if json_ else path)


@app.command("show", cls=Command)
@verb
def show(
    name: Annotated[str, typer.Argument(help="A built-in name, a folder, a .gguf file or a hub id.")] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="As of `generate`.")] = "auto",
    json_: Json = False,
) -> None:
    """What a model is made of and how it runs here.

    That includes the check on which exactness rests: that a row's result does not depend on the rows beside it.

    Examples:

    \b
      foretell models show
      foretell models show ./my-model --dtype float32 --json
    """
    with progress() as say:
        if name in hub.BUILTIN:
            fetch(name, say)
        say(f"loading {name}")
        facts = _facts(name, dtype)
    if json_:
        print(json.dumps(facts, default=str))
        return
    table = report.plain_table()
    for key, value in _flat(facts):
        table.add_row(key, str(value))
    report.console().print(table, markup=False)


@app.command("warm", cls=Command)
@verb
def warm(
    name: Annotated[str, typer.Argument(help="A built-in name, a folder, a .gguf file or a hub id.")] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="As of `generate`.")] = "auto",
    texts: Annotated[int, typer.Option(metavar="N", help="Conversations that the model writes; 0: none.")] = 400,
) -> None:
    """Let the drafters learn what the model says, once and for all.

    For `recycling` the model is run on each token of its vocabulary; then, for `suffix` too, it writes some
    conversations with itself. That takes minutes for a model of 135 M parameters and needs no data. The result is kept
    in the cache folder, and these drafters, alone or joined with others, start from it.

    Examples:

    \b
      foretell models warm
      foretell models warm --texts 0
      foretell generate "Why is the sky blue?" --compare
    """
    with progress() as say:
        if name in hub.BUILTIN:
            fetch(name, say)
        say(f"loading {name}")
        llm = LLM(name, drafter="suffix+recycling", dtype=dtype)
        llm.warm(lambda done, total: say(f"{done} of {total}"), texts=texts)


app.command("exits", cls=Command)(exits.command)


def _facts(name: str, dtype: str) -> dict[str, Any]:
    prepared = prepare(name, dtype=dtype)
    path, config = prepared.checkpoint.folder_or_file, prepared.checkpoint.config
    opened = prepared.load()
    text, target = opened.text, opened.target
    return {
        "name": opened.name,
        "path": str(path),
        "size": _size(path),
        "config": None if config is None else asdict(config),
        "tokenizer": text
        and {
            "tokens": len(text.vocab()),
            "special_tokens": text.special_tokens,
            "chat_template": text.template is not None,
        },
        "stop_ids": sorted(target.stop_ids),
        "stop_tokens": [text.token(i) for i in sorted(target.stop_ids)] if text else [],
        "weights_bytes": prepared.size.weights,
        "cache_bytes_per_token": target.kv_bytes(),
        "cache_bytes_of_full_context": target.kv_bytes() * target.max_context,
        "backend": target.backend,
        "native_kernels": target.backend.startswith("native"),
        "exact": target.exact,
        "promise": report.promise(target.exact, report.SAME_TOKENS, 0),
    }


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _flat(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in facts.items():
        if isinstance(value, dict):
            rows += [(f"{key}.{inner}", shown) for inner, shown in value.items()]
        else:
            rows.append((key, _megabytes(value) if key == "size" else value))
    return rows


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
