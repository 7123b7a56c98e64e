"""`foretell bench`: measurements, each from one run with the engines taking turns."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from foretell.bench.against import OTHERS, Other, other
from foretell.bench.decode import DRAFTED, OTHER, PLAIN, Settings, decode
from foretell.bench.prompts import PROMPTS
from foretell.cli import accept, forward, replay, report
from foretell.cli.command import Command, help_alone, verb
from foretell.cli.options import ModelOptions
from foretell.cli.terminal import load, progress
from foretell.engine.llm import LLM
from foretell.models import hub
from foretell.models.open import DTYPES

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def group(ctx: typer.Context) -> None:
    """Measure drafters: speed on this machine, and how much of what they guess is accepted.

    Examples:

    \b
      foretell bench decode
      foretell bench accept
      foretell bench replay gpt-4o-airline.json
    """
    help_alone(ctx)


@dataclass
class BenchOptions:
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Of each answer at most.")] = 64
    temperature: Annotated[float, typer.Option(metavar="X", help="0 always takes the likeliest token.")] = 0.0
    seed: Annotated[int, typer.Option(metavar="N", help="Of every run.")] = 0
    repetitions: Annotated[int, typer.Option(metavar="N", help="Of every prompt; medians are shown.")] = 3
    kinds: Annotated[
        list[str],
        typer.Option("--kind", metavar="KIND", help=f"Only this kind of prompt, several times: {', '.join(PROMPTS)}."),
    ] = field(default_factory=list)
    against: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help=f"The same weights in another engine too: {', '.join(OTHERS)}."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False

    def settings(self) -> Settings:
        return Settings(self.max_tokens, self.temperature, self.seed, self.repetitions, self.kinds)


app.command("accept", cls=Command)(accept.command)
app.command("replay", cls=Command)(replay.command)
app.command("forward", cls=Command)(forward.command)


@app.command("decode", cls=Command)
@verb
def decode_(model: ModelOptions, options: BenchOptions) -> None:
    """How fast one request decodes, and where the time goes.

    Plain and speculative decoding take turns on the same prompts; speeds are medians of tokens per second after
    the first token. Beside them: whether the tokens are identical, what a forward costs by its number of rows, and
    the share of a step that is spent outside the model's forward.

    Examples:

    \b
      foretell bench decode
      foretell bench decode --against transformers --max-tokens 128
      foretell bench decode --kind code --kind edit --draft-tokens 8 --json
    """
    settings = options.settings()
    llm = load(model)
    with progress() as say:
        rival = _other(options, model, say) if options.against else None
        result = {**_subject(llm, model, options), **decode(llm, settings, rival, say)}
    if options.json:
        print(json.dumps(result))
    else:
        _print(result, report.console())


def _other(options: BenchOptions, model: ModelOptions, say: Any) -> Other:
    assert options.against is not None
    say(f"loading {model.model} in {options.against}")
    dtype = DTYPES["bfloat16" if model.dtype == "auto" else model.dtype]
    return other(options.against, hub.resolve(model.model), dtype, model.threads)


def _subject(llm: LLM, model: ModelOptions, options: BenchOptions) -> dict[str, Any]:
    """What was measured."""
    return {
        "model": llm.name,
        "backend": llm.target.backend,
        "exact": llm.target.exact,
        "promise": report.promise(llm.target.exact, model.rule, options.temperature),
        "drafter": type(llm.drafter).__name__,
        "draft_tokens": model.draft_tokens,
        "rule": model.rule,
        "dtype": model.dtype,
        "threads": model.threads,
        "against": options.against,
    }


def _print(result: dict[str, Any], console: Console) -> None:
    against = result["against"]
    speeds = report.plain_table(
        "prompt", "tokens", "plain tok/s", "drafted tok/s", "speed-up", "alpha", "E", "tokens identical",
        *((f"{against} tok/s", "plain / it", "drafted / it") if against else ()),
    )  # fmt: skip
    total = result["total"]
    rows = [*result["prompts"], {"kind": "all", "first_difference": None if total["identical"] else "", **total}]
    for row in rows:
        speeds.add_row(*_cells(row, bool(against)))
    machine = result["machine"]
    console.print(f"{result['model']} on {machine['processor']}, {machine['cores']} cores", markup=False)
    console.print(f"backend {result['backend']}, {result['drafter']}, rule {result['rule']}: {result['promise']}")
    console.print()
    console.print(speeds)
    console.print()
    console.print(_forward_table(result))
    outside = result["outside_forward"]
    console.print(
        f"\nshare of a step outside the model's forward: plain {100 * outside[PLAIN]:.1f} %, "
        f"drafted {100 * outside[DRAFTED]:.1f} %"
    )


def _cells(row: dict[str, Any], against: bool) -> list[str]:
    cells = [
        row["kind"],
        str(row["tokens"]),
        report.speed(row[f"{PLAIN}_tokens_per_second"]),
        report.speed(row[f"{DRAFTED}_tokens_per_second"]),
        report.speed(row["speedup"], "x"),
        f"{row['alpha']:.3f}",
        f"{row['E']:.3f}",
        "yes" if row["first_difference"] is None else "NO",
    ]
    if against:
        cells.append(report.speed(row[f"{OTHER}_tokens_per_second"]))
        cells += [report.speed(row[f"{engine}_against_other"], "x") for engine in (PLAIN, DRAFTED)]
    return cells


def _forward_table(result: dict[str, Any]) -> Any:
    sizes = list(result["forward_ms"])
    table = report.plain_table(f"rows of a forward (context {result['forward_context']})", *sizes)
    table.add_row("ms", *(f"{result['forward_ms'][size]:.2f}" for size in sizes))
    table.add_row("times one row", *(f"{result['forward_ratio'][size]:.2f}" for size in sizes))
    return table
