"""A plan in words, tables and plots: the same sections on the terminal and as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from foretell.cli import report
from foretell.cli.amounts import size
from foretell.report.page import Section, Table
from foretell.report.plots import Axes, Curve, bars, lines

TITLE = "Does speculation pay?"
SLIGHT = 1.05  # a speed-up that runs differ by anyway
CURVES = 6  # of a plot at most


def answer(result: dict[str, Any]) -> str:
    """The plan in one sentence."""
    first = result["batches"][0]
    batch, best, gain = first["batch"], first["draft_tokens"], first["speedup"]
    requests = "one request" if batch == 1 else f"{batch} requests at once"
    if best == 0:
        tried = max(result["speedup"][batch])
        length = result["draft_tokens"][result["speedup"][batch].index(tried)]
        return f"Speculation off: for {requests} plain decoding is fastest; {_tokens(length)} would give {tried:.2f}x."
    stop, most = result["stops_paying_at"], result["looked_up_to"]
    load = f"; it pays up to {most} requests" if stop is None else f"; from {stop} requests on plain decoding is faster"
    load = load if result["load_known"] else ""
    slight = ", a gain that is hard to tell from noise" if gain < SLIGHT else ""
    return f"Draft {_tokens(best)} a round: {gain:.2f}x as fast as plain decoding for {requests}{slight}{load}."


def origin(result: dict[str, Any]) -> list[str]:
    """Where the figures come from."""
    lines = []
    if result["measured"]:
        settings = result["settings"]
        what = " and ".join([", ".join(result["measured"][:-1]), result["measured"][-1]][-len(result["measured"]) :])
        lines.append(
            f"Measured: {what}, with {report.subject_line(result)}; drafter {result['drafter']}, rule "
            f"{result['rule']}, {result['prompts']} prompts, at most {settings['max_tokens']} tokens each, temperature "
            f"{settings['temperature']:g}."
        )
        if not result["complete"]:
            lines.append(f"{report.STOPPED[0].upper()}{report.STOPPED[1:]}.")
    if result["given"]:
        lines.append(f"Given: {', '.join(result['given'])}.")
    if not result["load_known"]:
        lines.append(
            "A forward is taken to cost the same whatever its rows; to see how many requests pay, give --forward-ms by "
            "rows, or --bandwidth and --flops."
        )
    lines.append(f"{result['context']:.0f} tokens before the next one.")
    return lines


def intro(result: dict[str, Any]) -> list[str]:
    return [result["answer"], *origin(result)]


def sections(result: dict[str, Any], drawn: bool = False) -> list[Section]:
    """drawn: with plots; ValueError if matplotlib is missing."""
    found = [
        _by_batch(result),
        _by_length(result),
        _break_even(result),
        *([_runs(result)] if result["runs"] else []),
        *([_memory(result)] if result["memory"] else []),
        *_engines(result),
    ]
    plots = {0: _prices, 1: _speedups, 2: _break_evens} if drawn else {}
    return [replace(s, figure=plots[i](result)) if i in plots else s for i, s in enumerate(found)]


def show(result: dict[str, Any], console: Console) -> None:
    """On the terminal."""
    console.print(result["answer"], style="bold", markup=False, highlight=False)
    for line in origin(result):
        console.print(line, markup=False, highlight=False)
    for section in sections(result):
        console.print(f"\n{section.heading}", style="bold", markup=False, highlight=False)
        for line in section.text:
            console.print(line, markup=False, highlight=False)
        if section.table is not None:
            table = report.plain_table(*section.table.headers)
            for row in section.table.rows:
                table.add_row(*row)
            console.print(table)
        if section.code:
            print(section.code)  # as it is: to be copied, so never wrapped


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _by_batch(result: dict[str, Any]) -> Section:
    priced = any(row["plain_cost_per_million"] is not None for row in result["batches"])
    timed = any(row["plain_tokens_per_second"] is not None for row in result["batches"])
    headers = ["requests", "draft tokens", "speed-up"]
    headers += ["plain tok/s", "drafted tok/s"] if timed else []
    headers += ["plain / million", "drafted / million"] if priced else []
    rows = []
    for row in result["batches"]:
        cells = [str(row["batch"]), str(row["draft_tokens"] or "off"), f"{row['speedup']:.2f}x"]
        cells += [f"{row[f'{name}_tokens_per_second']:.1f}" for name in ("plain", "drafted")] if timed else []
        cells += [f"{row[f'{name}_cost_per_million']:.4g}" for name in ("plain", "drafted")] if priced else []
        rows.append(cells)
    text = ["The best number of draft tokens for each; tokens per second are those of all requests together."]
    return Section("By requests at once", text, Table(headers, rows))


def _shown(result: dict[str, Any]) -> list[int]:
    """Lengths that tables show: all small ones, some of the others."""
    lengths = result["draft_tokens"]
    return [n for n in lengths if n <= 8 or n % 4 == 0 or n == lengths[-1]]


def _by_length(result: dict[str, Any]) -> Section:
    batches = list(result["speedup"])
    lengths = _shown(result)
    rows, heat = [], []
    for n in lengths:
        gains = [result["speedup"][batch][n - 1] for batch in batches]
        rows.append([str(n), f"{result['E'][n - 1]:.2f}", *(f"{gain:.2f}" for gain in gains)])
        heat.append([0.0, *map(report.heat, gains)])
    best = {row["batch"]: row["draft_tokens"] for row in result["batches"]}
    marks = [(lengths.index(best[b]), 2 + i) for i, b in enumerate(batches) if best[b] in lengths]
    text = [
        "Speed-up over plain decoding at so many requests at once, of a fixed number of draft tokens; without "
        "--draft-tokens a controller chooses one in every step, 0 included. E: tokens of a forward, the model's own "
        "included.",
    ]
    return Section("By draft tokens", text, Table(["draft tokens", "E", *map(_column, batches)], rows, heat, marks))


def _column(batch: int) -> str:
    return f"at {batch}"


def _requests(batch: int) -> str:
    return f"{batch} request{'' if batch == 1 else 's'}"


def _break_even(result: dict[str, Any]) -> Section:
    batches = list(result["break_even_alpha"])
    rows = []
    for n in _shown(result):
        needed = [result["break_even_alpha"][batch][n - 1] for batch in batches]
        rows.append([str(n), _alpha(result["alpha"][n - 1]), *map(_alpha, needed)])
    text = [
        "The acceptance alpha at which chains, always drafted whole, are as fast as plain decoding; a dash where none "
        "is enough. Here: the alpha that E above comes to."
    ]
    return Section("Break-even", text, Table(["draft tokens", "here", *map(_column, batches)], rows))


def _alpha(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _runs(result: dict[str, Any]) -> Section:
    headers = ["draft tokens", "E", "nodes", "forward ms", "beside ms", "predicted", "measured"]
    rows = []
    for run in result["runs"]:
        predicted = run["predicted_speedup"]
        rows.append(
            [
                str(run["draft_tokens"] or "none"),
                f"{run['E']:.3f}",
                f"{run['nodes_per_round']:.1f}",
                f"{run['forward_ms']:.2f}",
                f"{run['beside_ms']:.2f}",
                "-" if predicted is None else f"{predicted:.2f}x",
                f"{run['measured_speedup']:.2f}x",
            ]
        )
    text = ["What was run for one request, by its rounds of decoding, and the speed-up that this plan predicts for it."]
    return Section("Predicted and measured", text, Table(headers, rows))


def _memory(result: dict[str, Any]) -> Section:
    memory = result["memory"]
    rows = [["weights", size(memory["weights"])]]
    if memory["draft_weights"]:
        rows.append(["weights of the draft model", size(memory["draft_weights"])])
    rows.append(["keys and values of a token", size(memory["kv"])])
    if memory["draft_kv"]:
        rows.append(["of the draft model", size(memory["draft_kv"])])
    for row in memory["batches"]:
        fits = f", at most {row['largest_context']} tokens each fit" if "largest_context" in row else ""
        rows.append([f"{_requests(row['batch'])} of {memory['context']:.0f} tokens{fits}", size(row["bytes"])])
    limit = "" if memory["limit"] is None else f" Limit: {size(memory['limit'])}."
    return Section(
        "Memory", [f"Weights, keys and values; what a step computes in comes on top.{limit}"], Table(["", "size"], rows)
    )


def _engines(result: dict[str, Any]) -> list[Section]:
    return [
        Section(
            f"Options for {setting['engine']}",
            [f"Note: {setting['note']}."] if setting["note"] else [],
            code=setting["code"],
        )
        for setting in result["engines"]
    ]


def _speedups(result: dict[str, Any]) -> str:
    curves = [Curve(_requests(batch), gains) for batch, gains in list(result["speedup"].items())[:CURVES]]
    axes = Axes("Speed-up by draft tokens and requests at once", "draft tokens a round", "speed-up", level=1.0)
    return lines(axes, result["draft_tokens"], curves)


def _break_evens(result: dict[str, Any]) -> str:
    needed = list(result["break_even_alpha"].items())[: CURVES - 1]
    curves = [Curve("here", _numbers(result["alpha"]))]
    curves += [Curve(f"to break even, {_requests(batch)}", _numbers(alphas)) for batch, alphas in needed]
    return lines(Axes("Break-even alpha", "draft tokens a round", "alpha"), result["draft_tokens"], curves)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _prices(result: dict[str, Any]) -> str:
    rows = result["batches"]
    if rows[0]["plain_tokens_per_second"] is None:
        return ""
    priced = rows[0]["plain_cost_per_million"] is not None
    what = "cost_per_million" if priced else "tokens_per_second"
    y = "price of a million tokens" if priced else "tokens per second, all requests"
    curves = [
        Curve(label, [row[f"{name}_{what}"] for row in rows])
        for label, name in (("plain", "plain"), ("with drafts", "drafted"))
    ]
    return bars(Axes(f"{y} by requests at once", "requests at once", y), [str(row["batch"]) for row in rows], curves)
