"""How fast one request decodes, with drafts and without, and in other engines: everything from one run, taking turns.

On each prompt plain decoding, speculative decoding and the peers generate the same number of tokens one after another,
in an order that turns round with the repetition. A prompt's times are medians over its repetitions; ratios are of times
on the same prompts. Speeds are of decoding: tokens after the first round, whose time is the TTFT, prompt included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from foretell.bench.compare import first_difference
from foretell.bench.forward import TimedTarget, timed
from foretell.bench.peers import Peers
from foretell.bench.questions import Question, fitted
from foretell.bench.run import Run, afresh, plain_if, warm_up
from foretell.bench.timing import DRAFTED, PLAIN, Answer, Speed, figures, mean_s
from foretell.engine.llm import LLM
from foretell.engine.stats import Stats
from foretell.types import Sampling

Progress = Callable[[int, int, str], None]  # turns done, of how many, what is running


@dataclass(frozen=True, slots=True)
class Settings:
    """ValueError if they cannot be met."""

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    repetitions: int = 3

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ValueError(f"repetitions must be at least 1, not {self.repetitions}")
        self.sampling(None)

    def sampling(self, draft_tokens: int | None) -> Sampling:
        return Sampling(
            temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens, draft_tokens=draft_tokens
        )


@dataclass(slots=True)
class _Result:
    """What was measured on one prompt."""

    kind: str
    prompt: list[int]
    answers: dict[str, list[Answer]] = field(default_factory=dict)  # of each repetition, by engine
    stats: list[Stats] = field(default_factory=list)  # of the drafted runs
    difference: int | None = None  # first token where plain and drafted part

    def speed(self, engine: str) -> Speed | None:
        return Speed.of(self.answers[engine]) if engine in self.answers else None

    def agreed(self, engine: str) -> int:
        """Tokens of an engine's answer up to the first that is not plain decoding's."""
        mine, theirs = (self.answers[name][0].token_ids for name in (PLAIN, engine))
        difference = first_difference(mine, theirs)
        return len(mine) if difference is None else difference


class _Bench:
    def __init__(self, llm: LLM, settings: Settings, results: list[_Result], peers: Peers) -> None:
        self.llm, self.settings, self.results, self.peers = llm, settings, results, peers
        self.step_s = {PLAIN: 0.0, DRAFTED: 0.0}  # of decoding steps
        self.forward_s = {PLAIN: 0.0, DRAFTED: 0.0}  # of the target's forwards in them

    def run(self, progress: Progress, stopping: Callable[[], bool]) -> bool:
        """Whether it came to its end."""
        turns = [(repetition, result) for repetition in range(self.settings.repetitions) for result in self.results]
        with timed(self.llm) as target:
            for number, (repetition, result) in enumerate(turns):
                progress(number, len(turns), f"{result.kind}: foretell")
                if not self._ours(result, repetition, target, stopping):
                    return False
                for name in self.peers.in_turn(number):
                    progress(number, len(turns), f"{result.kind}: {name}")
                    self._theirs(result, name, stopping)
                    if stopping():
                        return False
        return True

    def _ours(self, result: _Result, repetition: int, target: TimedTarget, stopping: Callable[[], bool]) -> bool:
        """Plain and drafted decoding once on one prompt; False, and nothing of it is kept, if stopped."""
        answers: dict[str, Answer] = {}
        for engine in (PLAIN, DRAFTED) if repetition % 2 == 0 else (DRAFTED, PLAIN):
            sampling = self.settings.sampling(0 if engine == PLAIN else None)
            afresh(self.llm)
            with plain_if(self.llm, engine == PLAIN):
                run = Run(self.llm, result.prompt, sampling, stopping=stopping, meter=lambda: target.seconds)
                if run.finish().finish_reason == "abort":
                    return False
            answers[engine] = run.answer
            self.step_s[engine] += run.decode_s
            self.forward_s[engine] += run.metered
            if engine == DRAFTED:
                result.stats.append(run.request.stats)
        difference = first_difference(answers[PLAIN].token_ids, answers[DRAFTED].token_ids)
        result.difference = difference if result.difference is None else result.difference
        for engine, answer in answers.items():
            result.answers.setdefault(engine, []).append(answer)
        return True

    def _theirs(self, result: _Result, name: str, stopping: Callable[[], bool]) -> None:
        count = len(result.answers[PLAIN][0].token_ids)
        found = self.peers.ask(name, [result.prompt], [count], stopping)
        if found is not None:
            result.answers.setdefault(name, []).append(found[0][0])

    def figures(self, results: Sequence[_Result]) -> dict[str, Any]:
        """Of all prompts of a kind, or of all there are."""
        stats = Stats.pooled(result.stats[-1] for result in results)
        timed = Stats.pooled(stats for result in results for stats in result.stats)
        plain, drafted = (_speeds(results, engine) for engine in (PLAIN, DRAFTED))
        return {
            "prompts": len(results),
            "tokens": stats.emitted,
            "alpha": stats.acceptance_rate,
            "E": stats.tokens_per_round,
            "drafted_by_depth": stats.drafted_by_depth,
            "accepted_by_depth": stats.accepted_by_depth,
            PLAIN: figures(plain),
            DRAFTED: figures(drafted),
            "speedup": _ratio(mean_s(plain), mean_s(drafted)),
            **timed.estimates(),
            "identical": all(result.difference is None for result in results),
            "peers": {name: self._against(name, results) for name in self.peers.notes},
        }

    def _against(self, name: str, results: Sequence[_Result]) -> dict[str, Any] | None:
        """A peer beside foretell, on the prompts that both answered; None if there are none."""
        both = [result for result in results if name in result.answers]
        if not both:
            return None
        theirs = _speeds(both, name)
        return {
            "prompts": len(both),
            **figures(theirs),
            **{f"{e}_ratio": _ratio(mean_s(theirs), mean_s(_speeds(both, e))) for e in (PLAIN, DRAFTED)},
            "tokens": sum(len(result.answers[name][0].token_ids) for result in both),
            "agreed_tokens": sum(result.agreed(name) for result in both),
        }


def decode(
    llm: LLM,
    questions: Sequence[Question],
    settings: Settings,
    peers: Peers,
    progress: Progress = lambda done, total, what: None,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The report, ready for JSON; once `stopping` says True, of what was finished by then. peers: not opened yet.
    ValueError if a prompt does not fit, or if peers, which are greedy, would be compared with sampled answers."""
    peers.check(settings.temperature)
    prompts = fitted(llm, questions)
    results = [_Result(question.kind, prompt) for question, prompt in zip(questions, prompts, strict=True)]
    context = min(llm.max_context, max(map(len, prompts)) + settings.max_tokens)
    peers.open(context, 1, lambda what: progress(0, 1, what), stopping)
    bench = _Bench(llm, settings, results, peers)
    progress(0, 1, "warming up")
    warm_up(llm)
    complete = bench.run(progress, stopping)
    done = [result for result in results if result.answers]
    kinds = dict.fromkeys(result.kind for result in done)
    return {
        "settings": asdict(settings),
        "complete": complete,
        "identical": all(result.difference is None for result in done),
        "kinds": [
            {"kind": kind, **bench.figures([result for result in done if result.kind == kind])} for kind in kinds
        ],
        "all": bench.figures(done),
        "outside_forward": {e: 1 - _ratio(bench.forward_s[e], s) if s else 0.0 for e, s in bench.step_s.items()},
        "peers": peers.notes,
    }


def _speeds(results: Sequence[_Result], engine: str) -> list[Speed]:
    found = (result.speed(engine) for result in results)
    return [speed for speed in found if speed is not None]


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
