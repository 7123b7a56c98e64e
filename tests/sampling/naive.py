"""The target's law once more, one row in plain Python: what `foretell/sampling/shape.py` must agree with."""

import math
from collections.abc import Sequence

from foretell.types import Sampling


def naive(
    logits: Sequence[float], s: Sampling, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int] = ()
) -> tuple[list[float], bool]:
    """-> (probabilities, whether a cut of top_p or min_p fell within rounding, where two right answers exist)."""
    x = [float(v) for v in logits]
    for token, bias in (s.logit_bias or {}).items():
        x[token] += bias
    for token in {*prompt, *output} if s.repetition_penalty != 1 else ():
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(output):
        x[token] -= s.frequency_penalty * list(output).count(token)
        x[token] -= s.presence_penalty
    if len(output) < s.min_tokens:
        for token in stop_ids:
            x[token] = -math.inf
    top = max(x)
    if s.temperature == 0:
        return [float(i == x.index(top)) for i in range(len(x))], False
    x = [(v - top) / s.temperature for v in x]
    mass = [math.exp(v) for v in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    edge = False
    if s.min_p > 0:
        edge |= any(abs(mass[i] - s.min_p) < 1e-12 and mass[i] != 1 for i in order)
        order = [i for i in order if mass[i] >= s.min_p]
    if s.top_k > 0:
        order = order[: s.top_k]
    if s.top_p < 1:
        total = math.fsum(mass[i] for i in order)
        kept, before = [], 0.0
        for i in order:
            edge |= 0 < abs(before - s.top_p * total) < 1e-12 * total
            if before < s.top_p * total:
                kept.append(i)
            before += mass[i]
        order = kept
    total = math.fsum(mass[i] for i in order)
    alive = set(order)
    return [mass[i] / total if i in alive else 0.0 for i in range(len(x))], edge
