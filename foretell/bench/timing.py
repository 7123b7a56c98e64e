"""When the tokens of an answer came, in the same terms for every engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PLAIN, DRAFTED = "plain", "drafted"  # foretell's own two ways to decode, beside the peers' names


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's tokens. first: how many the first round brought, first_s seconds after the request was made; the
    last one came after last_s."""

    token_ids: Sequence[int]
    first: int
    first_s: float
    last_s: float

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> Answer:
        return Answer(value["token_ids"], value["first"], value["first_s"], value["last_s"])

    @property
    def per_token_s(self) -> float | None:
        """Of the tokens after the first round; None if there are none."""
        rest = len(self.token_ids) - self.first
        return (self.last_s - self.first_s) / rest if rest > 0 else None


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one engine on one prompt: medians over the repetitions. per_token_s: None where nothing followed the first
    round."""

    tokens: int
    first_s: float
    per_token_s: float | None

    @staticmethod
    def of(answers: Sequence[Answer]) -> Speed:
        times = [answer.per_token_s for answer in answers]
        known = [time for time in times if time is not None]
        return Speed(
            len(answers[0].token_ids),
            statistics.median(answer.first_s for answer in answers),
            statistics.median(known) if known else None,
        )


def figures(speeds: Sequence[Speed]) -> dict[str, float]:
    """Of several prompts: the median times, and the speed of decoding, in which a prompt has the weight of its tokens.
    Nought where nothing was measured."""
    each = [speed.per_token_s for speed in speeds if speed.per_token_s is not None]
    return {
        "ttft_ms": 1000 * statistics.median(speed.first_s for speed in speeds) if speeds else 0.0,
        "tpot_ms": 1000 * statistics.median(each) if each else 0.0,
        "tokens_per_second": 1 / seconds if (seconds := mean_s(speeds)) else 0.0,
    }


def mean_s(speeds: Sequence[Speed]) -> float:
    """Seconds per token after the first round; a prompt has the weight of its tokens. 0 where nothing was measured."""
    measured = [(speed.tokens, speed.per_token_s) for speed in speeds if speed.per_token_s is not None]
    tokens = sum(count for count, _ in measured)
    return sum(count * seconds for count, seconds in measured) / tokens if tokens else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed, one of the values; 0 if there are none."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1] if values else 0.0
