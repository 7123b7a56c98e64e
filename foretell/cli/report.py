"""Figures as tables on stderr, and the one line that says which exactness holds."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from foretell.bench.compare import Comparison
from foretell.bench.host import host
from foretell.bench.run import Run
from foretell.cli.command import fail
from foretell.cli.options import ModelOptions, TargetOptions
from foretell.engine.llm import LLM
from foretell.engine.stats import Stats
from foretell.verify import RULES

STOPPED = "stopped before the end: this is what was finished"
SAME_TOKENS = next(iter(RULES))  # the rule whose tokens are those of plain decoding, whatever the temperature


def keeps_tokens(rule: str, temperature: float) -> bool:
    """Whether the rule promises plain decoding's very tokens, given equal logits."""
    return rule == SAME_TOKENS or temperature == 0


def promise(exact: bool, rule: str, temperature: float) -> str:
    """What holds here, in one line."""
    if not keeps_tokens(rule, temperature):
        what = f"same distribution as plain decoding, other draws (rule {rule!r})"
    elif exact:
        return "bit-identical to plain decoding: checked on this machine"
    else:
        what = "the tokens of plain decoding"
    if exact:
        return what
    return f"{what}, up to rounding: here a row's last bits depend on the rows computed with it"


def subject(llm: LLM, model: TargetOptions) -> dict[str, Any]:
    """What was measured, and on what."""
    machine = host()
    return {
        "model": llm.name,
        "backend": llm.target.backend,
        "exact": llm.target.exact,
        "dtype": model.dtype,
        "threads": model.threads or machine["cores"],
        "machine": machine,
    }


def drafting(llm: LLM, model: ModelOptions, temperature: float) -> dict[str, Any]:
    """What drafts for it, and what holds of the tokens."""
    return {
        "drafter": model.drafter,
        "draft_tokens": model.draft_tokens,
        "rule": model.rule,
        "kept": keeps_tokens(model.rule, temperature),
        "promise": promise(llm.target.exact, model.rule, temperature),
    }


def subject_line(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return (
        f"{result['model']}, backend {result['backend']}, {result['threads']} threads, on {machine['processor']} "
        f"({machine['cores']} cores)"
    )


def intro(result: dict[str, Any]) -> list[str]:
    """What was measured, in lines."""
    drafts = f"drafter {result['drafter']}, draft tokens {result['draft_tokens']}, rule {result['rule']}"
    return [subject_line(result), f"{drafts}: {result['promise']}", *([] if result["complete"] else [STOPPED])]


def leave(result: dict[str, Any], stopped: bool) -> None:
    """End a measurement with the exit code it deserves."""
    if stopped:
        raise typer.Exit(130)
    if result["kept"] and not result["identical"]:
        fail("the tokens differ from those of plain decoding", 1)


def heat(ratio: float) -> float:
    """How good a ratio is, for a page: red where the other engine is faster, green where it is slower."""
    return max(-1.0, min(1.0, math.log2(ratio))) if ratio > 0 else 0.0


def show_stats(run: Run, llm: LLM, rule: str) -> None:
    """A finished run's counters and times, then the exactness that holds, on stderr."""
    show(_stats_table(run, llm))
    print(promise(llm.target.exact, rule, run.request.seq.sampling.temperature), file=sys.stderr)


def _stats_table(run: Run, llm: LLM) -> Table:
    stats = run.request.stats
    table = plain_table()
    table.add_row("rounds", str(stats.rounds))
    table.add_row("drafted", str(stats.drafted))
    table.add_row("accepted", str(stats.accepted))
    if stats.riders:
        table.add_row("riders (rows for the drafter alone)", str(stats.riders))
    table.add_row("alpha (accepted / drafted)", f"{stats.acceptance_rate:.3f}")
    table.add_row("E (tokens per forward, bonus included)", f"{stats.tokens_per_round:.3f}")
    table.add_row("accepted by depth", by_depth(stats))
    if len(stats.by_member) > 1:
        named = (f"{name} {accepted} of {drafted}" for name, (drafted, accepted) in stats.by_member.items())
        table.add_row("accepted by member", ", ".join(named))
    table.add_row("draft", f"{1000 * stats.draft_s:.1f} ms")
    table.add_row("verify", f"{1000 * stats.verify_s:.1f} ms")
    table.add_row("prefill", f"{1000 * run.prefill_s:.1f} ms")
    table.add_row("cached prompt tokens", f"{stats.cached_tokens} of {run.request.seq.prompt_len}")
    table.add_row("tokens", str(stats.emitted))
    table.add_row("tokens/s", speed(run.tokens_per_second))
    table.add_row("speed-up over plain decoding (estimated)", speed(stats.speedup, "x"))
    wasted = f"{1000 * stats.wasted_s:.1f} ms, {share(stats.wasted_share)}" if stats.plain_s else "-"
    table.add_row("spent on rejected drafts (estimated)", wasted)
    table.add_row("seed", str(run.seed))
    table.add_row("backend", llm.target.backend)
    table.add_row("memory", str(llm.memory))
    return table


def comparison_table(run: Run, comparison: Comparison) -> Table:
    stats = run.request.stats
    table = plain_table()
    table.add_row("plain", f"{speed(comparison.plain_speed)} tokens/s")
    table.add_row("with drafts", f"{speed(comparison.drafted_speed)} tokens/s")
    table.add_row("speed-up", speed(comparison.speedup, "x"))
    table.add_row("speed-up, as estimated without plain decoding", speed(stats.speedup, "x"))
    table.add_row("alpha (accepted / drafted)", f"{stats.acceptance_rate:.3f}")
    table.add_row("E (tokens per forward, bonus included)", f"{stats.tokens_per_round:.3f}")
    table.add_row("accepted by depth", by_depth(stats))
    table.add_row("tokens", "identical" if comparison.identical else f"differ from token {comparison.difference} on")
    return table


def plain_table(*headers: str) -> Table:
    """A table without lines; the first column is text, the others are figures."""
    table = Table(box=None, show_header=bool(headers), pad_edge=False, header_style="bold")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i == 0 else "right")
    return table


def console(stderr: bool = False) -> Console:
    """Where nobody looks at it as it is, a table is as wide as it needs to be."""
    plain = Console(stderr=stderr)
    return plain if plain.is_terminal else Console(stderr=stderr, width=160)


def show(table: Table) -> None:
    console(stderr=True).print(table)


def by_depth(stats: Stats) -> str:
    """Accepted of drafted at each depth, the first after the root leftmost."""
    pairs: Sequence[tuple[int, int]] = list(zip(stats.accepted_by_depth, stats.drafted_by_depth, strict=True))
    return "  ".join(f"{accepted}/{drafted}" for accepted, drafted in pairs) or "-"


def speed(value: float, unit: str = "") -> str:
    """A dash where nothing was measured."""
    return f"{value:.2f}{unit}" if value else "-"


def share(value: float | None) -> str:
    """A part of a whole; a dash where it is not known."""
    return "-" if value is None else f"{100 * value:.1f} %"


def estimates(figures: dict[str, Any]) -> list[str]:
    """Cells for `Stats.estimates`."""
    return [speed(figures["estimated_speedup"] or 0.0, "x"), share(figures["wasted_share"])]


def as_json(run: Run, llm: LLM, rule: str) -> dict[str, Any]:
    """A finished run for a program to read."""
    completion = run.completion
    logprobs = completion.logprobs
    return {
        "model": llm.name,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": completion.prompt_token_ids,
        "finish_reason": completion.finish_reason,
        "logprobs": None
        if logprobs is None
        else [{"token_id": p.token_id, "logprob": p.logprob, "top": [list(pair) for pair in p.top]} for p in logprobs],
        "seed": run.seed,
        "stats": run.figures(),
        "backend": llm.target.backend,
        "memory": llm.memory.as_dict(),
        "exact": llm.target.exact,
        "promise": promise(llm.target.exact, rule, run.request.seq.sampling.temperature),
    }
