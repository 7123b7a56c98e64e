"""`foretell bench load`: throughput and latency with several requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from foretell.bench.load import FEWEST, Settings, load
from foretell.bench.timing import DRAFTED, PLAIN
from foretell.cli import page, peers, report
from foretell.cli.command import verb
from foretell.cli.options import ModelOptions, numbers
from foretell.cli.prompts import PromptOptions
from foretell.report.page import Section, Table
from foretell.report.plots import Axes, Curve, lines

DEFAULT = Settings()


@dataclass
class RequestOptions:
    concurrency: Annotated[str, typer.Option(metavar="N,N,...", help="How many requests are kept running.")] = ",".join(
        map(str, DEFAULT.levels)
    )
    requests: Annotated[int, typer.Option(metavar="N", help=f"For each of those places; {FEWEST} in all at least.")] = (
        DEFAULT.requests
    )
    repetitions: Annotated[int, typer.Option(metavar="N", help="Of all of it.")] = DEFAULT.repetitions
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Of each answer at most.")] = (
        DEFAULT.max_tokens
    )
    temperature: Annotated[float, typer.Option(metavar="X", help="0 always takes the likeliest token.")] = 0.0
    seed: Annotated[int, typer.Option(metavar="N", help="Of the first request; the next one has the next.")] = 0
    html: page.HtmlOption = None
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False


@verb
def command(model: ModelOptions, prompts: PromptOptions, options: RequestOptions, others: peers.PeerOptions) -> None:
    """Throughput and latency with 1 to 64 requests at once.

    So many requests are kept running: one begins when another ends. Plain and speculative decoding, and the engines
    named by --peers that run several requests at once, take turns on the same prompts. All prompts differ, and a
    request drafts from its own text alone. tok/s is of all answers together, prompts included in the time; TTFT is the
    time to a request's first token, TPOT per token after it. Every answer is compared with plain decoding's. Beside the
    measured speed-up: the estimate that the engine makes as it runs, of decoding without the prompts, and the share of
    the time that, by the same estimate, went to rejected drafts (wasted).

    Examples:

    \b
      foretell bench load
      foretell bench load --concurrency 1,8,32 --questions question.jsonl --html load.html
      foretell bench load --concurrency 16 --peers vllm --peer-python vllm=other/bin/python --json
    """
    settings = Settings(
        numbers("--concurrency", options.concurrency),
        options.requests,
        options.repetitions,
        options.max_tokens,
        options.temperature,
        options.seed,
    )
    bench = peers.Bench("Several requests at once", partial(load, settings=settings), _sections, max(settings.levels))
    peers.measure(bench, model, prompts, options, others)


def _engines(result: dict[str, Any]) -> dict[str, list[dict[str, float] | None]]:
    """Of every engine that ran, the figures at each level."""
    levels = result["levels"]
    found = {engine: [row[engine] for row in levels] for engine in (PLAIN, DRAFTED)}
    found |= {name: [row["peers"][name] for row in levels] for name in result["peers"]}
    return {name: figures for name, figures in found.items() if any(figures)}


def _sections(result: dict[str, Any], drawn: bool) -> list[Section]:
    """What there is to show; drawn: with plots."""
    sections = [_ours(result, drawn), _latency(result, drawn)]
    names = [name for name in _engines(result) if name not in (PLAIN, DRAFTED)]
    return [*sections, _ratios(result, names)] if names else sections


def _ours(result: dict[str, Any], drawn: bool) -> Section:
    headers = [
        "at once", "requests", "tokens", "plain tok/s", "drafted tok/s", "speed-up", "estimated", "wasted", "E",
        "alpha", "identical",
    ]  # fmt: skip
    cells = [
        [
            str(row["concurrency"]),
            str(row["requests"]),
            str(row["tokens"]),
            *(report.speed(row[engine]["tokens_per_second"]) for engine in (PLAIN, DRAFTED)),
            report.speed(row["speedup"], "x"),
            *report.estimates(row[DRAFTED]),
            f"{row[DRAFTED]['E']:.3f}",
            f"{row[DRAFTED]['alpha']:.3f}",
            "yes" if row["identical"] else "NO",
        ]
        for row in result["levels"]
    ]
    return Section("Throughput", (), Table(headers, cells), _lines(result, "tokens_per_second", "tokens/s", drawn))


def _latency(result: dict[str, Any], drawn: bool) -> Section:
    names = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
    headers = ["at once", "engine", "TTFT ms p50", "p99", "TPOT ms p50", "p99"]
    cells = []
    for i, row in enumerate(result["levels"]):
        for engine, levels in _engines(result).items():
            figures = levels[i]
            if figures is not None:
                cells.append([str(row["concurrency"]), engine, *(report.speed(figures[name]) for name in names)])
    return Section("Latency", (), Table(headers, cells), _lines(result, "tpot_ms_p50", "TPOT, ms (median)", drawn))


def _ratios(result: dict[str, Any], names: Sequence[str]) -> Section:
    """Ours over each peer's, level by level."""
    engines = _engines(result)
    headers, ratios = ["at once"], [list[float]() for _ in result["levels"]]
    for name in names:
        headers += [f"{name} tok/s", f"plain / {name}", f"drafted / {name}"]
        for line, figures in zip(ratios, engines[name], strict=True):
            line += [(figures or {}).get(key, 0.0) for key in ("tokens_per_second", "plain_ratio", "drafted_ratio")]
    cells = [
        [str(row["concurrency"]), *(report.speed(value, "x" if i % 3 else "") for i, value in enumerate(line))]
        for row, line in zip(result["levels"], ratios, strict=True)
    ]
    heat = [[report.heat(value) if i % 3 else 0.0 for i, value in enumerate(line)] for line in ratios]
    return Section("Beside other engines", (), Table(headers, cells, heat))


def _lines(result: dict[str, Any], key: str, label: str, drawn: bool) -> str:
    if not drawn or not result["levels"]:
        return ""
    curves = [
        Curve(name, [figures[key] if figures else float("nan") for figures in levels])
        for name, levels in _engines(result).items()
    ]
    axes = Axes(f"{label} by requests at once", "requests at once", label, log=True)
    return lines(axes, [row["concurrency"] for row in result["levels"]], curves)
