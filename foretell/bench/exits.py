"""Which of a model's layers would draft best for all of them, and whether that pays.

Agreement is measured as drafter `early_exit` meets it: every place of a calibration text is in turn a root behind the
keys and values of the whole model, and only the root and the tokens after it are computed by the chosen layers. Two
kinds of choice are looked at: the first e layers (LayerSkip, 2404.16710), and all but some that are found greedily, the
one whose loss costs least agreement first (after Draft & Verify, 2309.08168, and SWIFT, 2410.06916, whole layers only).
The search sees a third of the places; what is reported comes from the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.bench.forward import fill, forward_times
from foretell.bench.prompts import encoded
from foretell.engine.llm import LLM
from foretell.models.top import top_tokens
from foretell.types import Rows, Sampling, Seq

DEPTH = 8  # drafted tokens a round that predictions go up to
PLACES = 288  # roots
FEWEST = 24  # below that nothing is said
LONGEST = 1024  # tokens of a text
WRITTEN = 64  # tokens of each answer that the model writes for itself
BATCH = 128  # rows of a pass
TRIED = 8  # layers looked at in a step of the search, those that were least missed so far
FINALISTS = 5  # of each kind of choice
CONTEXT = 300  # tokens before the forwards that are timed

Layers = tuple[int, ...]
Text = tuple[list[int], int]  # tokens, and the first of them that counts
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """gamma: seconds of a one-row forward of these layers over one of all. alpha: by depth, of the drafted tokens whose
    forerunners were right. E: tokens per round with 1 to DEPTH drafted. The last two: at the best of these numbers."""

    layers: Layers
    gamma: float
    alpha: list[float]
    E: list[float]
    draft_tokens: int
    predicted_speedup: float


@dataclass(frozen=True, slots=True)
class Costs:
    """In forwards of one row of the whole model."""

    gamma: dict[Layers, float]  # one row through these layers
    verify: list[float]  # [DEPTH]  1 + 1 to 1 + DEPTH rows through all

    def speedups(self, stay: Sequence[float], gamma: float) -> list[float]:
        """stay: [DEPTH], chance that the first k drafted tokens stay -> [DEPTH], speed over plain decoding's."""
        drafted = range(1, len(stay) + 1)
        return [e / (c + k * gamma) for e, c, k in zip(_emitted(stay), self.verify, drafted, strict=True)]


def find(llm: LLM, texts: Sequence[Text], say: Say = lambda line: None) -> dict[str, Any]:
    """The report, ready for JSON. llm: idle, with a place for each text and one more. ValueError if its layers cannot
    be chosen or the texts are too short."""
    count = llm.target.num_layers
    if count < 2:
        raise ValueError(f"{llm.name} runs whole only: it has no layers to leave out")
    with torch.inference_mode(), _calibrated(llm, texts) as calibration:
        places = calibration.places
        search, rest = places[::3], [place for i, place in enumerate(places) if i % 3]
        say("timing")
        rough = measure(llm, [(0,)], 3)
        slope = (1 - rough.gamma[(0,)]) / (count - 1)
        finalists: list[Layers] = []
        for kind in (_exits(count), _skips(calibration, search, rough, say)):
            promise: dict[Layers, float] = {}
            for layers in kind:
                say(f"looking at {spelled(layers)}")
                agreement = calibration.score(layers, search)[0] / len(search)
                promise[layers] = max(rough.speedups(_powers(agreement), 1 - slope * (count - len(layers))))
            finalists += sorted(promise, key=lambda layers: -promise[layers])[:FINALISTS]
        finalists = sorted(set(finalists), key=lambda layers: (len(layers), layers))
        say("timing the best")
        costs = measure(llm, finalists, 9)
        candidates = []
        for layers in finalists:
            say(f"drafting with {spelled(layers)}")
            candidates.append(_candidate(layers, calibration.stay(layers, rest), costs))
    best = max(candidates, key=lambda candidate: candidate.predicted_speedup)
    return {
        "model": llm.name,
        "num_layers": count,
        "places": len(rest),
        "forward_context": CONTEXT,
        "forward_ratio": {str(2 + i): ratio for i, ratio in enumerate(costs.verify)},
        "candidates": [asdict(candidate) for candidate in candidates],
        "best": asdict(best),
        "pays": best.predicted_speedup > 1,
    }


def written(llm: LLM) -> list[Text]:
    """What the model itself says, greedily, to the built-in prompts."""
    prompts = list(encoded(llm, []).values())
    answers = llm.generate(prompts, Sampling(temperature=0, max_tokens=WRITTEN, draft_tokens=0))
    return [(prompt + answer.token_ids, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]


def given(llm: LLM, text: str) -> list[Text]:
    """The beginning of a text."""
    if llm.tokenizer is None:
        raise ValueError("this model has no tokenizer, and the calibration text is a text")
    return [(llm.tokenizer.encode(text)[: min(LONGEST, llm.max_context - 1)], 1)]


def measure(llm: LLM, choices: Sequence[Layers], repetitions: int) -> Costs:
    """All of them in turn, so that a machine that slows down favours none; medians."""
    shapes = [(1, None), *((1, layers) for layers in choices), *((1 + k, None) for k in range(1, DEPTH + 1))]
    times = forward_times(llm, shapes, context=CONTEXT, repetitions=repetitions)
    took = {shape: statistics.median(seconds) / statistics.median(times[1, None]) for shape, seconds in times.items()}
    return Costs({layers: took[1, layers] for layers in choices}, [took[1 + k, None] for k in range(1, DEPTH + 1)])


def spelled(layers: Sequence[int]) -> str:
    """For instance 0-9,12,14-29."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class _Calibration:
    """Texts in the cache, and slots for what is drafted behind any place in them."""

    def __init__(self, llm: LLM, seqs: Sequence[Seq], starts: Sequence[int]) -> None:
        self._llm, self._seqs, self.num_layers = llm, seqs, llm.target.num_layers
        self._slots = list(llm.engine.cache.reserved(seqs[0]))
        every = [(b, i) for b, seq in enumerate(seqs) for i in range(starts[b] - 1, len(seq.tokens))]
        self._truth = dict(zip(every, self._says(None, every, 1)[:, 0].tolist(), strict=True))
        roots = [(b, i) for b, i in every if i + DEPTH <= len(seqs[b].tokens)]
        if len(roots) < FEWEST:
            raise ValueError(
                f"the calibration text has {len(roots)} places to draft from and needs {FEWEST}: take a longer one"
            )
        count = min(PLACES, len(roots))
        self.places = [roots[n * len(roots) // count] for n in range(count)]  # spread evenly

    def score(self, layers: Layers, places: Sequence[tuple[int, int]]) -> tuple[int, float]:
        """At how many places the layers alone say what the whole model says; then how likely they find it on average,
        as a logarithm."""
        right, likely = 0, 0.0
        truth = [self._truth[place] for place in places]
        for first, logits in zip(range(0, len(places), BATCH), self._passes(layers, places, 1), strict=True):
            wanted = truth[first : first + BATCH]
            right += int((top_tokens(logits, 1)[0][:, 0] == wanted).sum())
            likely += float(logits.float().log_softmax(-1)[range(len(wanted)), wanted].sum())
        return right, likely / len(places)

    def stay(self, layers: Layers, places: Sequence[tuple[int, int]]) -> list[float]:
        """[DEPTH]: share of the places from which the first k drafted tokens are all the whole model's."""
        truth = np.array([[self._truth[b, i + k] for k in range(DEPTH)] for b, i in places])
        shares: list[float] = np.logical_and.accumulate(self._says(layers, places, DEPTH) == truth, 1).mean(0).tolist()
        return shares

    def _says(self, layers: Layers | None, places: Sequence[tuple[int, int]], depth: int) -> np.ndarray:
        """int32 [len(places), depth]: the likeliest token at each place and the next ones of its text."""
        passes = self._passes(layers, places, depth)
        return np.concatenate([top_tokens(logits, 1)[0].reshape(-1, depth) for logits in passes])

    def _passes(self, layers: Layers | None, places: Sequence[tuple[int, int]], depth: int) -> Iterator[Tensor]:
        """[rows, V] of some of the places after the other, each with `depth` rows."""
        size = len(self._slots) // depth
        for first in range(0, len(places), size):
            rows = self._rows(places[first : first + size], depth)
            yield self._llm.target.forward(rows, self._llm.engine.cache, layers=layers).logits

    def _rows(self, places: Sequence[tuple[int, int]], depth: int) -> Rows:
        """Each place as a request of its own: its text up to there is the context, its rows are a chain."""
        count = len(places) * depth
        position = torch.tensor([i for _, i in places], dtype=torch.int64)
        return Rows(
            indptr=torch.arange(0, count + 1, depth, dtype=torch.int32),
            tokens=torch.tensor([t for b, i in places for t in self._seqs[b].tokens[i : i + depth]]),
            positions=(position[:, None] + torch.arange(depth)).flatten(),
            parents=torch.arange(-1, depth - 1, dtype=torch.int32).repeat(len(places)),
            slots=torch.tensor(self._slots[:count]),
            want=torch.arange(count),
            tables=torch.tensor([self._seqs[b].table for b, _ in places], dtype=torch.int32),
            context=position.int(),
        )


@contextmanager
def _calibrated(llm: LLM, texts: Sequence[Text]) -> Iterator[_Calibration]:
    """The texts computed by the whole model while inside."""
    cache = llm.engine.cache
    seqs = [Seq(-2 - b, tokens, len(tokens), Sampling(), seed=0) for b, (tokens, _) in enumerate(texts)]
    try:
        for seq in seqs:
            if not cache.admit(seq):
                raise RuntimeError("the cache has no free line: a request is still running")
            fill(llm, seq, len(seq.tokens))
        if not cache.reserve(seqs[0], BATCH):
            raise RuntimeError(f"the cache has no {BATCH} free slots: a request is still running")
        yield _Calibration(llm, seqs, [start for _, start in texts])
    finally:
        for seq in seqs:
            cache.release(seq)


def _exits(count: int) -> list[Layers]:
    return [tuple(range(e)) for e in range(1, count)]


def _skips(calibration: _Calibration, places: Sequence[tuple[int, int]], costs: Costs, say: Say) -> list[Layers]:
    """One layer less each: the one that is missed least. Ends where nothing further can pay even if a single layer
    agreed as well as those that are left."""
    layers: Layers = tuple(range(calibration.num_layers))
    missed = {layer: (0, 0.0) for layer in layers}  # when last tried; the higher, the less it is missed
    found: list[Layers] = []
    while len(layers) > 1:
        tried = sorted(layers, key=lambda layer: missed[layer], reverse=True)[: TRIED if found else None]
        for layer in tried:
            say(f"searching: {len(layers) - 1} layers left, without {layer}")
            missed[layer] = calibration.score(tuple(i for i in layers if i != layer), places)
        dropped = max(tried, key=lambda layer: missed[layer])
        layers = tuple(i for i in layers if i != dropped)
        found.append(layers)
        agreement = missed[dropped][0] / len(places)
        if max(costs.speedups(_powers(agreement), costs.gamma[(0,)])) <= 1:
            break
    return found


def _candidate(layers: Layers, stay: Sequence[float], costs: Costs) -> Candidate:
    speedups = costs.speedups(stay, costs.gamma[layers])
    best = max(range(DEPTH), key=lambda k: speedups[k])
    alpha = [now / before if before else 0.0 for before, now in zip([1.0, *stay], stay, strict=False)]
    return Candidate(layers, costs.gamma[layers], alpha, _emitted(stay), best + 1, speedups[best])


def _emitted(stay: Sequence[float]) -> list[float]:
    return [1 + sum(stay[: k + 1]) for k in range(len(stay))]


def _powers(agreement: float) -> list[float]:
    return [agreement**k for k in range(1, DEPTH + 1)]
