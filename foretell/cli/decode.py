"""`foretell bench decode`: how fast one request decodes, plain, with drafts, and in other engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from foretell.bench.decode import Settings, decode
from foretell.bench.timing import DRAFTED, PLAIN
from foretell.cli import page, peers, report
from foretell.cli.command import verb
from foretell.cli.options import ModelOptions
from foretell.cli.prompts import PromptOptions
from foretell.report.page import Section, Table
from foretell.report.plots import Axes, Curve, bars


@dataclass
class DecodeOptions:
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Of each answer at most.")] = 64
    temperature: Annotated[float, typer.Option(metavar="X", help="0 always takes the likeliest token.")] = 0.0
    seed: Annotated[int, typer.Option(metavar="N", help="Of every run.")] = 0
    repetitions: Annotated[int, typer.Option(metavar="N", help="Of every prompt; medians are shown.")] = 3
    html: page.HtmlOption = None
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False


@verb
def command(model: ModelOptions, prompts: PromptOptions, options: DecodeOptions, others: peers.PeerOptions) -> None:
    """How fast one request decodes, and where the time goes.

    Plain and speculative decoding, and the engines named by --peers, take turns on the same prompts. TTFT is the time
    to the first token with nothing cached, TPOT the time per token after it; both are medians. tok/s is of the tokens
    after the first. Beside them: whether the tokens are identical, tokens per forward (E), accepted over drafted tokens
    (alpha), and the share of a step that is spent outside the model's forward. Beside the measured speed-up: the
    estimate that the engine makes as it runs, without decoding plainly, and the share of the time that, by the same
    estimate, went to rejected drafts (wasted).

    Peers run in processes of their own, greedily, with the same weights, token ids, number of tokens and threads. They
    round differently, so their answers may part from foretell's: how many tokens agree is shown. One that is not
    installed is left out.

    Examples:

    \b
      foretell bench decode
      foretell bench decode --kind code --kind edit --draft-tokens 8 --json
      foretell bench decode --questions question.jsonl --humaneval HumanEval.jsonl.gz -n 128 --html decode.html
      foretell bench decode --peers transformers,llama.cpp --peer-python llama.cpp=other/bin/python
    """
    settings = Settings(options.max_tokens, options.temperature, options.seed, options.repetitions)
    bench = peers.Bench("How fast one request decodes", partial(decode, settings=settings), _sections)
    peers.measure(bench, model, prompts, options, others)


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [*result["kinds"], {"kind": "all", **result["all"]}]


def _sections(result: dict[str, Any], drawn: bool) -> list[Section]:
    """What there is to show; drawn: with plots."""
    sections = [_ours(result, drawn), _latency(result)]
    names = [name for name, figures in result["all"]["peers"].items() if figures is not None]
    if names:
        sections += [_theirs(result, names), _by_kind(result, names, drawn)]
    return sections


def _ours(result: dict[str, Any], drawn: bool) -> Section:
    headers = [
        "prompts", "number", "tokens", "plain tok/s", "drafted tok/s", "speed-up", "estimated", "wasted", "E", "alpha",
        "identical",
    ]  # fmt: skip
    cells = [
        [
            row["kind"],
            str(row["prompts"]),
            str(row["tokens"]),
            *(report.speed(row[engine]["tokens_per_second"]) for engine in (PLAIN, DRAFTED)),
            report.speed(row["speedup"], "x"),
            *report.estimates(row),
            f"{row['E']:.3f}",
            f"{row['alpha']:.3f}",
            "yes" if row["identical"] else "NO",
        ]
        for row in _rows(result)
    ]
    outside = result["outside_forward"]
    text = [
        f"Outside the model's forward: {100 * outside[PLAIN]:.1f} % of a plain step, {100 * outside[DRAFTED]:.1f} % of "
        "a drafted one."
    ]
    curves = [(engine, [row[engine]["tokens_per_second"] for row in _rows(result)]) for engine in (PLAIN, DRAFTED)]
    return Section("Plain and speculative decoding", text, Table(headers, cells), _bars(result, curves, drawn))


def _latency(result: dict[str, Any]) -> Section:
    figures = [(engine, name) for name in ("ttft_ms", "tpot_ms") for engine in (PLAIN, DRAFTED)]
    headers = ["medians, ms", *(f"{engine} {name[:4].upper()}" for engine, name in figures)]
    cells = [[row["kind"], *(report.speed(row[engine][name]) for engine, name in figures)] for row in _rows(result)]
    return Section("Latency", (), Table(headers, cells))


def _theirs(result: dict[str, Any], names: Sequence[str]) -> Section:
    headers = ["peer", "tok/s", "TTFT ms", "TPOT ms", "plain / it", "drafted / it", "prompts", "same tokens"]
    rows = []
    for name in names:
        found = result["all"]["peers"][name]
        rows.append(
            [
                name,
                *(report.speed(found[key]) for key in ("tokens_per_second", "ttft_ms", "tpot_ms")),
                *(report.speed(found[f"{engine}_ratio"], "x") for engine in (PLAIN, DRAFTED)),
                str(found["prompts"]),
                f"{found['agreed_tokens']} of {found['tokens']}",
            ]
        )
    text = ["Ratios are foretell's speed over the peer's, on the prompts that both answered."]
    return Section("Beside other engines", text, Table(headers, rows))


def _by_kind(result: dict[str, Any], names: Sequence[str], drawn: bool) -> Section:
    rows = _rows(result)
    ratios = [[(row["peers"][name] or {}).get("drafted_ratio", 0.0) for row in rows] for name in names]
    table = Table(
        ["drafted / peer", *(row["kind"] for row in rows)],
        [[name, *(report.speed(r, "x") for r in line)] for name, line in zip(names, ratios, strict=True)],
        heat=[[report.heat(ratio) for ratio in line] for line in ratios],
    )
    curves = [(engine, [row[engine]["tokens_per_second"] for row in rows]) for engine in (PLAIN, DRAFTED)]
    curves += [(name, [(row["peers"][name] or {}).get("tokens_per_second", 0.0) for row in rows]) for name in names]
    return Section("Speculative decoding over each engine", (), table, _bars(result, curves, drawn))


def _bars(result: dict[str, Any], curves: Sequence[tuple[str, list[float]]], drawn: bool) -> str:
    if not drawn:
        return ""
    axes = Axes("Tokens per second of each engine by kind of prompt", "", "tokens/s")
    return bars(axes, [row["kind"] for row in _rows(result)], [Curve(name, values) for name, values in curves])
