"""`foretell plan`: whether drafting pays, how much of it, up to which load, and what it does to memory and price."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from foretell import drafters
from foretell.bench.plan import LONGEST, TOGETHER, Measured, Rounds, Settings, measure
from foretell.cli import page, plan_report, report
from foretell.cli.amounts import amount
from foretell.cli.command import fail, verb
from foretell.cli.engines import Choice, settings
from foretell.cli.figures import GivenOptions
from foretell.cli.options import DEFAULT_MODEL, ModelOptions, numbers
from foretell.cli.prompts import PromptOptions
from foretell.cli.terminal import Interrupt, bar, load
from foretell.planner.cost import Costs
from foretell.planner.offline import MOST, Beside, Forecast, alpha_of, cost_per_million

CONTEXT = 1024  # tokens, where nothing was run and none is given
A_MODEL, A_DRAFT_MODEL = "MODEL", "DRAFT_MODEL"  # where figures are given and no model is named


@dataclass
class PlanOptions(PromptOptions):
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Of each answer at most.")] = 64
    temperature: Annotated[float, typer.Option(metavar="X", help="0 always takes the likeliest token.")] = 0.0
    seed: Annotated[int, typer.Option(metavar="N", help="Of the first prompt; the next one has the next.")] = 0
    batch: Annotated[
        str, typer.Option(metavar="N,...", help="Requests at once; the advice is for the first of these.")
    ] = "1,2,4,8,16,32,64"
    context: Annotated[
        int | None, typer.Option(metavar="N", help=f"Tokens before the next one; default: as run, or {CONTEXT}.")
    ] = None
    price_per_hour: Annotated[float | None, typer.Option(metavar="X", help="Of the machine, in any currency.")] = None
    html: page.HtmlOption = None
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False

    def batches(self) -> list[int]:
        found = numbers("--batch", self.batch)
        if min(found) < 1:
            raise ValueError(f"--batch takes numbers of requests from 1 on, not {min(found)}")
        return list(dict.fromkeys(found))

    def check(self) -> None:
        """ValueError for what can be known to be wrong before anything is measured."""
        if self.context is not None and self.context < 1:
            raise ValueError(f"--context must be at least 1, not {self.context}")
        if self.price_per_hour is not None and self.price_per_hour < 0:
            raise ValueError(f"--price-per-hour must not be negative, not {self.price_per_hour}")
        page.check(self.html)


@verb
def command(model: ModelOptions, given: GivenOptions, options: PlanOptions) -> None:
    """Whether speculation pays, how much of it, up to which load.

    What is not given is measured: acceptance by running the model on some prompts with a few budgets of draft tokens,
    costs by timing it on this machine. From that: the speed-up to be expected by a fixed number of draft tokens and by
    requests at once, the number of requests from which plain decoding is faster, the acceptance at which both are
    equal, memory, the price of a million tokens, and the options to set, here and in other engines. With --alpha and
    the costs given, nothing is run: any model, any machine.

    Examples:

    \b
      foretell plan
      foretell plan --drafter ngram --set edits --html plan.html
      foretell plan --alpha 0.8,0.7,0.6 --gamma 0.08
      foretell plan --alpha 0.7 --gamma 0.1 --forward-ms 1=12.5,4=18,8=31,16=50 --price-per-hour 2.50
      foretell plan --alpha 0.75 --gamma 0.05 --bandwidth 4.8TB/s --flops 990T --model-size 16GB --kv-bytes 128KiB
    """
    batches = options.batches()[: 1 if given.same_for_all_rows else None]
    options.check()
    longest = Settings(_longest(model.draft_tokens), options.max_tokens, options.temperature, options.seed)
    limit = None if model.memory is None else amount("--memory", model.memory)
    run = given.alpha is None or not given.any_costs
    if not run and options.price_per_hour is not None and not given.seconds:
        raise ValueError("a price needs seconds: add --tokens-per-second, --forward-ms or --bandwidth")
    sized = run or given.bandwidth is not None or given.model_size is not None or limit is not None
    early = sized and (not run or given.bandwidth is not None)
    footprint = given.footprint(model.model, model.draft_model, model.dtype) if early else None
    acceptance = given.acceptance(longest.longest)
    costs: tuple[Costs, Beside] | None = given.costs(footprint) if given.any_costs else None
    result: dict[str, Any] = {}
    found: Measured | None = None
    if run:
        found, result = _measured(model, longest, options)
        footprint = footprint or given.footprint(model.model, model.draft_model, model.dtype)
    acceptance = acceptance or (found.acceptance() if found else None)
    costs = costs or ((found.costs(), found.beside_s) if found else None)
    assert acceptance is not None and costs is not None
    context = options.context or (found.context if found else CONTEXT)
    forecast = Forecast(*costs, acceptance, context)
    seconds = found is not None and not given.any_costs or given.seconds
    result |= {
        "given": given.said(),
        "measured": _what_was_measured(given),
        "load_known": not given.same_for_all_rows,
        "context": context,
        **_forecast(forecast, batches, options.price_per_hour, seconds),
        "runs": [_run(found, run, forecast, given) for run in found.runs] if found else [],
        "memory": footprint and footprint.figures(context, batches, limit),
    }
    result["engines"] = [asdict(setting) for setting in settings(_choice(model, given, forecast, batches[0], run))]
    result["answer"] = plan_report.answer(result)
    if options.json:
        print(json.dumps(result))
    else:
        plan_report.show(result, report.console())
    if options.html is not None:
        page.write(options.html, plan_report.TITLE, plan_report.intro(result), plan_report.sections(result, drawn=True))


def _longest(draft_tokens: str) -> int:
    if draft_tokens == "auto":
        return LONGEST
    [count] = numbers("--draft-tokens", draft_tokens)
    return count


def _measured(model: ModelOptions, settings: Settings, options: PlanOptions) -> tuple[Measured, dict[str, Any]]:
    """What a run on this machine says, and what was run."""
    if model.drafter == "none":
        raise ValueError("drafter 'none' drafts nothing: choose the one to plan for")
    questions = options.chosen()
    drafters.check(model.drafter, model.draft_model is not None)
    llm = load(model, draft_tokens=settings.longest, max_batch=TOGETHER)
    with Interrupt() as interrupt, bar() as progress:
        found = measure(llm, questions, settings, progress, interrupt)
    if found is None:
        fail("stopped before anything was measured", 130)
    return found, {
        **report.subject(llm, model),
        "drafter": model.drafter,
        "rule": model.rule,
        "prompts": len(found.runs[0].parts),
        "complete": found.complete,
        "settings": asdict(settings),
    }


def _what_was_measured(given: GivenOptions) -> list[str]:
    return [
        *(["acceptance"] if given.alpha is None else []),
        *([] if given.any_costs else ["forwards", "drafting"]),
    ]


def _forecast(forecast: Forecast, batches: Sequence[int], price: float | None, seconds: bool) -> dict[str, Any]:
    """The forecast's figures; speeds and prices only where costs are in seconds."""
    lengths = list(forecast.lengths)
    by_batch = []
    for batch in batches:
        best = forecast.best(batch)
        row: dict[str, Any] = {"batch": batch, "draft_tokens": best, "speedup": forecast.speedup(best, batch)}
        for name, length in (("plain", 0), ("drafted", best)):
            speed = forecast.tokens_per_second(length, batch) if seconds else None
            row[f"{name}_tokens_per_second"] = speed
            row[f"{name}_cost_per_million"] = cost_per_million(price, speed) if speed and price is not None else None
        by_batch.append(row)
    tokens = forecast.acceptance.tokens
    return {
        "draft_tokens": lengths,
        "E": list(tokens[1:]),
        "alpha": [alpha_of(tokens[length], length) for length in lengths],
        "batches": by_batch,
        "speedup": {batch: [forecast.speedup(length, batch) for length in lengths] for batch in batches},
        "break_even_alpha": {batch: [forecast.break_even(length, batch) for length in lengths] for batch in batches},
        "stops_paying_at": forecast.stops_at(),
        "looked_up_to": MOST,
    }


def _run(found: Measured, run: Rounds, forecast: Forecast, given: GivenOptions) -> dict[str, Any]:
    """One budget's run: what the plan says of it, and what it was."""
    return {
        "draft_tokens": run.budget,
        "rounds": run.count,
        "tokens": run.tokens,
        "E": run.tokens / run.count,
        "nodes_per_round": run.nodes,
        "forward_ms": 1000 * sum(run.forward) / len(run.forward),
        "beside_ms": 1000 * sum(run.beside) / len(run.beside),
        "predicted_speedup": None if given.any_costs or given.alpha else forecast.speedup(run.budget, 1),
        "measured_speedup": found.speedup(run),
    }


def _choice(model: ModelOptions, given: GivenOptions, forecast: Forecast, batch: int, run: bool) -> Choice:
    named = model.model if run or model.model != DEFAULT_MODEL else A_MODEL
    draft = model.draft_model or (A_DRAFT_MODEL if not run and given.steps_cost and model.drafter == "auto" else None)
    schedule = [] if given.same_for_all_rows else forecast.schedule()
    return Choice(named, model.drafter, draft, forecast.best(batch), schedule)
