"""Figures that someone gives `foretell plan` in place of measured ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from foretell.cli.amounts import amount, count, decimals, points
from foretell.cli.footprint import Footprint, of_models
from foretell.planner.cost import Costs
from foretell.planner.given import Machine, roofline, steps, table
from foretell.planner.offline import Acceptance, Beside, chain


def _option(name: str, metavar: str, help: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, metavar=metavar, help=help)
    return option


@dataclass
class GivenOptions:
    alpha: Annotated[
        str | None, _option("--alpha", "X[,X...]", "Acceptance given: of every drafted token, or by depth.")
    ] = None
    gamma: Annotated[
        float | None,
        _option("--gamma", "X", "Costs given: a step of the drafter over one of the model; 0 for lookups."),
    ] = None
    draft_ms: Annotated[float | None, _option("--draft-ms", "X", "Instead of --gamma: a step of the drafter.")] = None
    forward_ms: Annotated[
        str | None, _option("--forward-ms", "[ROWS=]X,...", "A forward of the model, by its rows: 1=12.5,4=18,8=31.")
    ] = None
    tokens_per_second: Annotated[
        float | None, _option("--tokens-per-second", "X", "Instead: plain decoding of one request.")
    ] = None
    bandwidth: Annotated[
        str | None, _option("--bandwidth", "X", "Instead: bytes a second that the machine reads, as 4.8TB/s.")
    ] = None
    flops: Annotated[str | None, _option("--flops", "X", "With --bandwidth: operations a second, as 990T.")] = None
    model_size: Annotated[
        str | None, _option("--model-size", "X", "Weights, as 16GB; default: by the configuration of --model.")
    ] = None
    parameters: Annotated[
        str | None, _option("--parameters", "N", "As 8B; default: half as many as the weights have bytes.")
    ] = None
    kv_bytes: Annotated[str | None, _option("--kv-bytes", "X", "Keys and values of a token, as 128KiB.")] = None

    @property
    def any_costs(self) -> bool:
        drafting = (self.gamma, self.draft_ms)
        return any(value is not None for value in (*drafting, self.flops, *self._forwards().values()))

    @property
    def seconds(self) -> bool:
        """Whether the costs are in seconds: gamma alone knows of none."""
        return any(value is not None for value in self._forwards().values())

    @property
    def same_for_all_rows(self) -> bool:
        """Whether a forward is given as one number: then nothing is known about many requests."""
        return self.any_costs and self.bandwidth is None and "=" not in (self.forward_ms or "")

    @property
    def steps_cost(self) -> bool:
        """Whether the drafter runs something that takes time."""
        return bool(self.gamma or self.draft_ms)

    def acceptance(self, longest: int) -> Acceptance | None:
        return None if self.alpha is None else chain(decimals("--alpha", self.alpha), longest)

    def costs(self, footprint: Footprint | None) -> tuple[Costs, Beside]:
        """Of forwards, and of rounds beside them; ValueError if they are incomplete, or contradict one another."""
        named = [f"--{name.replace('_', '-')}" for name, value in self._forwards().items() if value is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} exclude one another: both say what a forward takes")
        if self.gamma is not None and self.draft_ms is not None:
            raise ValueError("--gamma and --draft-ms exclude one another: both say what a step of the drafter takes")
        if self.gamma is None and self.draft_ms is None:
            raise ValueError("a forward is given, so say what drafting takes too: --gamma or --draft-ms, 0 for lookups")
        if self.draft_ms is not None and not named:
            raise ValueError("--draft-ms needs the model's own time: --forward-ms, --tokens-per-second or --bandwidth")
        if self.flops is not None and self.bandwidth is None:
            raise ValueError("--flops needs --bandwidth: a forward is bound by one or the other")
        costs = self._forward(footprint)
        return costs, steps(costs, self.gamma or 0.0, None if self.draft_ms is None else self.draft_ms / 1000)

    def footprint(self, model: str, draft_model: str | None, dtype: str) -> Footprint:
        """As given, else of the models; ValueError if one cannot be opened."""
        if self.model_size is None:
            found = of_models(model, draft_model, dtype)
        else:
            found = Footprint(amount("--model-size", self.model_size), 0.0)
        return found if self.kv_bytes is None else replace(found, kv=amount("--kv-bytes", self.kv_bytes))

    def said(self) -> list[str]:
        """The figures that were given, as on the command line."""
        return [f"--{name.replace('_', '-')} {value}" for name, value in vars(self).items() if value is not None]

    def _forwards(self) -> dict[str, str | float | None]:
        names = ("forward_ms", "tokens_per_second", "bandwidth")
        return {name: getattr(self, name) for name in names}

    def _forward(self, footprint: Footprint | None) -> Costs:
        if self.forward_ms is not None:
            return table({rows: ms / 1000 for rows, ms in points("--forward-ms", self.forward_ms).items()})
        if self.tokens_per_second is not None:
            if self.tokens_per_second <= 0:
                raise ValueError(f"--tokens-per-second must be above 0, not {self.tokens_per_second}")
            return table({1.0: 1 / self.tokens_per_second})
        if self.bandwidth is None:
            return table({1.0: 1.0})
        if footprint is None:
            raise ValueError("--bandwidth needs the size of the weights: give --model-size")
        parameters = footprint.weights / 2 if self.parameters is None else count("--parameters", self.parameters)
        flops = None if self.flops is None else amount("--flops", self.flops)
        return roofline(
            Machine(footprint.weights, amount("--bandwidth", self.bandwidth), parameters, flops, footprint.kv)
        )
