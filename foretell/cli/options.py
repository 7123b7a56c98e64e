"""The options of the verbs that run a model: the fields of `LLM` and `Sampling`, by the same names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from foretell.drafters import METHODS
from foretell.models.device import DEVICES
from foretell.models.hub import BUILTIN
from foretell.models.open import DTYPES
from foretell.types import Sampling
from foretell.verify import RULES

DEFAULT_MODEL = next(iter(BUILTIN))


def _option(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar)


@dataclass
class TargetOptions:
    """Of every verb that opens a model, whether or not anything drafts for it."""

    model: Annotated[
        str,
        _option(
            "--model",
            "-m",
            metavar="NAME",
            help=f"A built-in name ({', '.join(BUILTIN)}), a folder with config.json and safetensors, a .gguf file or "
            "a hub id.",
        ),
    ] = DEFAULT_MODEL
    dtype: Annotated[
        str, _option("--dtype", metavar="DTYPE", help=f"What it computes in: auto, {', '.join(DTYPES)}.")
    ] = "auto"
    device: Annotated[
        str, _option("--device", metavar="DEVICE", help=f"What it computes on: {', '.join(DEVICES)}.")
    ] = "auto"
    threads: Annotated[
        int | None, _option("--threads", "-t", metavar="N", help="Processor threads; default: all it may use.")
    ] = None
    max_context: Annotated[
        int | None,
        _option("--max-context", metavar="N", help="Tokens of prompt and answer together; default: the model's limit."),
    ] = None
    memory: Annotated[
        str | None,
        _option(
            "--memory",
            metavar="SIZE",
            help="Weights, workspace and cache stay inside it: bytes, or such as 12GiB or 500MB; default: no limit.",
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """For `LLM`, which checks them."""
        return dict(vars(self))


@dataclass
class LoadOptions(TargetOptions):
    """Of every verb that opens a model, whatever drafts for it."""

    draft_model: Annotated[
        str | None, _option("--draft-model", metavar="NAME", help="A smaller model that drafts.")
    ] = None
    draft_tokens: Annotated[
        str,
        _option("--draft-tokens", metavar="N", help="At most this many drafted tokens a round; 0: plain decoding."),
    ] = "auto"
    rule: Annotated[
        str,
        _option("--rule", metavar="RULE", help=f"How drafts are verified, all lossless: {', '.join(RULES)}."),
    ] = next(iter(RULES))

    def arguments(self) -> dict[str, Any]:
        number = self.draft_tokens.lstrip("-").isdigit()
        return {**vars(self), "draft_tokens": int(self.draft_tokens) if number else self.draft_tokens}


@dataclass
class ModelOptions(LoadOptions):
    drafter: Annotated[
        str,
        _option("--drafter", metavar="METHOD", help=f"What guesses the next tokens: {', '.join(METHODS)}."),
    ] = "auto"


@dataclass
class SamplingOptions:
    max_tokens: Annotated[int, _option("--max-tokens", "-n", metavar="N", help="Length of the answer at most.")] = 256
    temperature: Annotated[float, _option("--temperature", metavar="X", help="0 always takes the likeliest token.")] = (
        1.0
    )
    top_k: Annotated[int, _option("--top-k", metavar="N", help="Sample from the N likeliest tokens; 0: from all.")] = 0
    top_p: Annotated[float, _option("--top-p", metavar="X", help="Sample from the fewest tokens of this mass.")] = 1.0
    min_p: Annotated[
        float, _option("--min-p", metavar="X", help="Drop tokens below this share of the best one's probability.")
    ] = 0.0
    seed: Annotated[
        int | None, _option("--seed", metavar="N", help="Repeats a run; default: a new one, shown by --stats.")
    ] = None
    stop: Annotated[
        list[str], _option("--stop", metavar="TEXT", help="End before this text; may be given several times.")
    ] = field(default_factory=list)
    stop_token_ids: Annotated[
        list[int], _option("--stop-token-id", metavar="ID", help="End after this token; may be given several times.")
    ] = field(default_factory=list)
    ignore_eos: Annotated[bool, _option("--ignore-eos", help="Go on after the model's own end of text.")] = False
    min_tokens: Annotated[int, _option("--min-tokens", metavar="N", help="No end before this many tokens.")] = 0
    repetition_penalty: Annotated[
        float, _option("--repetition-penalty", metavar="X", help="On tokens of prompt and answer; 1: none.")
    ] = 1.0
    presence_penalty: Annotated[
        float, _option("--presence-penalty", metavar="X", help="On tokens that the answer has.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _option("--frequency-penalty", metavar="X", help="On tokens of the answer, for each time.")
    ] = 0.0
    logit_bias: Annotated[
        list[str],
        _option("--logit-bias", metavar="ID=X", help="Add X to a token's logit; may be given several times."),
    ] = field(default_factory=list)

    def sampling(self, **more: Any) -> Sampling:
        """ValueError if a value is out of range."""
        return Sampling(**{**vars(self), "logit_bias": dict(map(_bias, self.logit_bias)) or None, **more})


def _bias(text: str) -> tuple[int, float]:
    token, equals, value = text.replace(":", "=", 1).partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ValueError(f"--logit-bias takes a token id and a number, as in 42=-5, not {text!r}") from None


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers with commas between them. ValueError if the option of that name was given something else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} takes whole numbers with commas between them, as in 1,4,16, not {text!r}") from None
