"""`foretell bench accept`: how much of what drafters guess is accepted, by kind of prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from foretell import drafters
from foretell.bench.accept import Settings, accept
from foretell.cli import report
from foretell.cli.command import fail, verb
from foretell.cli.options import LoadOptions
from foretell.cli.prompts import PromptOptions
from foretell.cli.terminal import Interrupt, bar, fetched
from foretell.engine.llm import LLM

PLAIN = "none"  # plain decoding, with which the others are compared
DEPTHS = 8  # columns of the table; JSON has all


def training_free() -> list[str]:
    """Drafters that need nothing but the target, and the mixture of all that can be mixed."""
    alone = [name for name, method in drafters.METHODS.items() if method.draft_model is False and name != PLAIN]
    return [*alone, "suffix+recycling+ngram"]


@dataclass
class AcceptOptions:
    names: Annotated[
        list[str],
        typer.Option(
            "--drafter",
            metavar="METHOD",
            help=f"One to measure, several times; default: {', '.join(training_free())}.",
        ),
    ] = field(default_factory=list)
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Of each answer at most.")] = 128
    temperature: Annotated[float, typer.Option(metavar="X", help="0 always takes the likeliest token.")] = 0.0
    seed: Annotated[int, typer.Option(metavar="N", help="Of the first prompt; the next one has the next.")] = 0
    carry: Annotated[
        bool, typer.Option("--carry", help="Let drafters keep what they learn from one prompt to the next.")
    ] = False
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False


@verb
def command(model: LoadOptions, prompts: PromptOptions, options: AcceptOptions) -> None:
    """How much of what drafters guess is accepted, by kind of prompt.

    E is tokens per forward of the model, its own token included; alpha is accepted over drafted tokens. Each drafter
    answers the same prompts, without memory of earlier ones unless --carry is given, and its tokens are compared with
    those of plain decoding. Times are per round of decoding, without the first, which has the prompt in it.

    Examples:

    \b
      foretell bench accept
      foretell bench accept --set edits --draft-tokens 15
      foretell bench accept --drafter ngram --drafter suffix+recycling --kind list --json
      foretell bench accept --questions question.jsonl --per-kind 5 --draft-tokens 15
    """
    settings = Settings(options.max_tokens, options.temperature, options.seed, options.carry)
    questions = prompts.chosen()
    names = list(dict.fromkeys([PLAIN, *(options.names or training_free())]))
    using = [name for name in names if _runs_a_model(name)]
    for name in names:
        drafters.check(name, model.draft_model is not None and name in using)
    if model.draft_model is not None and not using:
        raise ValueError("none of these drafters has a use for --draft-model: leave it out, or add --drafter model")

    def open_with(name: str) -> LLM:
        rest = {"drafter": name, "draft_model": model.draft_model if name in using else None}
        return LLM(**(model.arguments() | rest), max_batch=1)

    fetched(model.model, model.draft_model)
    with Interrupt() as interrupt, bar() as progress:
        result = accept(open_with, names, questions, settings, progress, interrupt)
    kept = report.keeps_tokens(model.rule, options.temperature)
    result |= {
        "rule": model.rule,
        "draft_tokens": model.draft_tokens,
        "promise": report.promise(result["exact"], model.rule, options.temperature),
        "settings": {name: getattr(settings, name) for name in ("max_tokens", "temperature", "seed", "carry")},
    }
    print(json.dumps(result)) if options.json else _print(result)
    if interrupt():
        raise typer.Exit(130)
    if kept and not all(entry["all"]["identical"] for entry in result["drafters"]):
        fail("the tokens differ from those of plain decoding", 1)


def _runs_a_model(name: str) -> bool:
    return name in drafters.METHODS and drafters.METHODS[name].draft_model is not False


def _print(result: dict[str, Any]) -> None:
    console = report.console()
    console.print(f"{result['model']}, backend {result['backend']}: {result['promise']}", markup=False)
    console.print(f"draft tokens {result['draft_tokens']}, rule {result['rule']}", markup=False)
    for entry in result["drafters"]:
        rows = [*entry["kinds"], {"kind": "all", **entry["all"]}]
        console.print()
        console.print(_table(entry["drafter"], rows))
        if entry["all"]["alpha_by_depth"]:
            console.print(_depths(rows))
    console.print()
    console.print(_overview(result["drafters"]))
    console.print(f"\ntokens identical to those of plain decoding: {_identical(result['drafters'])}")
    if not result["complete"]:
        console.print("stopped before the end: these are the runs that were finished")


def _table(drafter: str, rows: list[dict[str, Any]]) -> Any:
    table = report.plain_table(drafter, "prompts", "tokens", "E", "alpha", "nodes", "draft ms", "verify ms", "rest ms")
    for row in rows:
        table.add_row(
            row["kind"],
            str(row["prompts"]),
            str(row["tokens"]),
            f"{row['E']:.3f}",
            f"{row['alpha']:.3f}",
            f"{row['nodes_per_round']:.1f}",
            *(f"{row[name]:.2f}" for name in ("draft_ms", "verify_ms", "rest_ms")),
        )
    return table


def _depths(rows: list[dict[str, Any]]) -> Any:
    count = min(DEPTHS, len(rows[-1]["alpha_by_depth"]))
    table = report.plain_table("alpha at depth", *(str(depth + 1) for depth in range(count)))
    for row in rows:
        shown = [f"{alpha:.3f}" for alpha in row["alpha_by_depth"][:count]]
        table.add_row(row["kind"], *shown, *["-"] * (count - len(shown)))
    return table


def _identical(entries: list[dict[str, Any]]) -> str:
    other = [f"{e['drafter']} ({row['kind']})" for e in entries for row in e["kinds"] if not row["identical"]]
    return f"NO, not with {', '.join(other)}" if other else "yes"


def _overview(entries: list[dict[str, Any]]) -> Any:
    """E of every drafter by kind."""
    kinds = [row["kind"] for row in entries[0]["kinds"]]
    table = report.plain_table("E", *kinds, "all")
    for entry in entries:
        values = {row["kind"]: f"{row['E']:.3f}" for row in entry["kinds"]}
        table.add_row(entry["drafter"], *(values.get(kind, "-") for kind in kinds), f"{entry['all']['E']:.3f}")
    return table
