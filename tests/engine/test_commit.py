"""Verdicts become tokens: a stop, a limit or a stop string anywhere in an accepted run ends it where plain decoding
does; log-probabilities are those of plain decoding; and the counts add up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from foretell import kernels
from foretell.drafters.base import NoDrafter
from foretell.drafters.model import ModelDrafter
from foretell.drafters.ngram import NgramDrafter
from foretell.engine.request import Completion
from foretell.engine.stats import Stats
from foretell.models.base import Target
from foretell.models.text import Text
from foretell.planner.fixed import FixedPlanner
from foretell.types import Round, Sampling, Seq
from tests.conftest import (
    CONTEXT,
    VOCAB,
    HostileDrafter,
    RandomDrafter,
    ScriptedDrafter,
    run,
    table_target,
    tiny_llama,
)
from tests.engine.test_invariance import prompts
from tests.models.drive import Driver, make_ops, random_llama
from tests.play import Stage, spell, spelled

WORDS = [*"abcdefgh", "ab", "cd", "efg", "hh", "bad", spell(b" "), spell("é".encode()), spell("€".encode()[:2])]
WORDS += [spell("€".encode()[2:] + b"a"), spell(b"\n"), "x", "xx", "y", "zyx"]
TEXT = spelled(WORDS, special=["<mark>", "<end>"])
assert TEXT.tokenizer.get_vocab_size() == VOCAB
PROMPT = [1, 2, 3]
LENGTH = 24
MODES = {"greedy": 0.0, "sampled": 1.1}


def oracle(known: Sequence[int]) -> ScriptedDrafter:
    """Proposes what comes, as long a chain as it may."""

    def script(tokens: list[int], budget: int) -> tuple[list[int], list[int]]:
        chain = list(known[len(tokens) : len(tokens) + budget])
        return chain, list(range(-1, len(chain) - 1))

    return ScriptedDrafter(script)


class Greedy(FixedPlanner):
    """Gives everyone all it has, however near the end is."""

    def budgets(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        return [self.draft_tokens] * len(seqs)


def sampling(mode: str, **settings: object) -> Sampling:
    settings = {"ignore_eos": True, "max_tokens": LENGTH, "seed": 11, **settings}
    return Sampling(temperature=MODES[mode], **settings)  # type: ignore[arg-type]


def plainly(how: Sampling, text: Text | None = TEXT) -> Completion:
    return Stage(table_target(), NoDrafter(), text=text, reuse=False).all([PROMPT], [how])[0]


def speculated(known: Sequence[int], how: Sampling, budget: int = 7, text: Text | None = TEXT) -> Completion:
    return Stage(table_target(), oracle([*PROMPT, *known]), draft_tokens=budget, text=text).all([PROMPT], [how])[0]


def same(a: Completion, b: Completion) -> bool:
    return (a.text, a.token_ids, a.finish_reason, a.logprobs) == (b.text, b.token_ids, b.finish_reason, b.logprobs)


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_string_at_every_place_of_an_accepted_run(mode: str) -> None:
    """Every piece of the text as a stop string, split over tokens or inside one: the text is the whole one cut at its
    first occurrence, with speculation as without, and the next turn builds on the right tokens."""
    whole = plainly(sampling(mode))
    checked = 0
    for start, size in itertools.product(range(len(whole.text)), (1, 2, 3, 5)):
        stop = whole.text[start : start + size]
        how = sampling(mode, stop=stop)
        done = speculated(whole.token_ids, how)
        cut = whole.text.find(stop)
        assert (done.text, done.finish_reason) == (whole.text[:cut], "stop")
        assert done.token_ids == whole.token_ids[: len(done.token_ids)], "a beginning of the tokens"
        decoded = [TEXT.decode(done.token_ids[:n]) for n in (len(done.token_ids), max(0, len(done.token_ids) - 1))]
        assert decoded[0].startswith(done.text) and (not done.text or len(decoded[1].rstrip("\ufffd")) < cut)
        checked += done.stats.accepted
        if size == 2:
            assert same(plainly(how), done)
    assert checked > 100


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", range(9))
def test_a_stop_id_at_every_depth_of_an_accepted_run(depth: int, mode: str) -> None:
    whole = plainly(sampling(mode))
    stop = whole.token_ids[depth]
    how = sampling(mode, stop_token_ids=[stop], logprobs=1)
    done = speculated(whole.token_ids, how)
    first = whole.token_ids.index(stop)
    assert (done.token_ids, done.finish_reason) == (whole.token_ids[: first + 1], "stop")
    assert done.text == TEXT.decode(whole.token_ids[:first]) and same(done, plainly(how))
    assert done.logprobs is not None and [e.token_id for e in done.logprobs] == done.token_ids


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_tokens_inside_an_accepted_run(limit: int) -> None:
    """Even a planner that forgets the limit cannot make a text longer than asked for."""
    whole = plainly(sampling("sampled"))
    how = sampling("sampled", max_tokens=limit)
    stage = Stage(table_target(), oracle([*PROMPT, *whole.token_ids]), planner=Greedy(7, CONTEXT), text=TEXT)
    done = stage.all([PROMPT], [how])[0]
    assert same(done, plainly(how)) and done.finish_reason == "length"
    assert done.token_ids == whole.token_ids[:limit]
    stats = speculated(whole.token_ids, how).stats
    assert stats.emitted == stats.accepted + stats.rounds == limit, "the real planner never drafts in vain at the end"


@pytest.mark.parametrize("planner", [FixedPlanner, Greedy])
def test_the_context_inside_an_accepted_run(planner: type[FixedPlanner]) -> None:
    how = sampling("greedy", max_tokens=1000)
    plain = plainly(how)
    known = [*PROMPT, *plain.token_ids, *[1] * 20]
    stage = Stage(table_target(), oracle(known), planner=planner(7, CONTEXT), text=TEXT)
    done = stage.all([PROMPT], [how])[0]
    assert same(done, plain) and len(done.token_ids) == CONTEXT - len(PROMPT) and done.finish_reason == "length"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("least", [0, 4, 9])
def test_min_tokens_with_stop_ids_and_stop_strings(least: int, mode: str) -> None:
    whole = plainly(sampling(mode))
    ids = sorted(set(whole.token_ids[:4]))
    how = sampling(mode, stop_token_ids=ids, min_tokens=least)
    plain = plainly(how)
    done = speculated(plain.token_ids, how)
    assert same(done, plain) and not set(done.token_ids[:least]) & set(ids)
    assert (len(done.token_ids) == 1) == (least == 0)
    strings = sampling(mode, stop=whole.text[1:3], min_tokens=least)
    plain = plainly(strings)
    assert same(speculated(whole.token_ids, strings), plain)
    assert len(plain.token_ids) >= least or plain.text == whole.text[: whole.text.find(whole.text[1:3], 2)]


def test_the_models_own_stop_ids_unless_ignored() -> None:
    """Token 0 ends a text of this target: a bias makes it likely."""
    for ignore in (False, True):
        how = sampling("sampled", ignore_eos=ignore, logit_bias={0: 4.0})
        plain = plainly(how)
        assert same(speculated(plain.token_ids, how), plain)
        assert 0 in plain.token_ids and plain.finish_reason == ("length" if ignore else "stop")


@pytest.mark.parametrize("seed", range(6))
def test_streams_add_up_and_take_nothing_back(seed: int) -> None:
    """Several requests, in random rounds, with stop strings that are held back: events add up to completions."""
    source = random.Random(seed)
    texts = prompts(5, seed)
    how = [
        Sampling(
            temperature=1.0,
            seed=seed * 10 + i,
            max_tokens=30,
            stop=source.sample(["ab", "x", "hh", "é", "a\n", "bad", "y"], source.randint(0, 2)),
            logprobs=source.choice([None, 2]),
        )
        for i in range(5)
    ]
    plain = [Stage(table_target(), NoDrafter(), text=TEXT).all([p], [s])[0] for p, s in zip(texts, how, strict=True)]
    known = [p + d.token_ids + [1] * 9 for p, d in zip(texts, plain, strict=True)]
    stage = Stage(table_target(), HostileDrafter(known, seed=seed), text=TEXT, max_rows=9)
    requests = [stage.add(p, s) for p, s in zip(texts, how, strict=True)]
    shown, flags, ids = [""] * 5, [[] for _ in range(5)], [[] for _ in range(5)]  # type: ignore[var-annotated]

    def listen() -> None:
        for i, request in enumerate(requests):
            while request.outbox:
                event = request.outbox.popleft()
                shown[i] += event.text
                ids[i] += event.token_ids
                flags[i] += event.drafted
                assert plain[i].text.startswith(shown[i]), "nothing is shown that is not in the end there"
                assert len(event.drafted) == len(event.token_ids)

    stage.finish(listen)
    for i, request in enumerate(requests):
        done = request.completion()
        assert same(done, plain[i]) and (shown[i], ids[i]) == (done.text, done.token_ids)
        assert sum(flags[i]) <= done.stats.accepted
        assert done.logprobs is None or len(done.logprobs) == len(done.token_ids)


def test_abort_in_the_middle_frees_everything() -> None:
    stage = Stage(table_target(), ModelDrafter(table_target(noise=0.1), VOCAB), text=TEXT)
    requests = [stage.add(p, sampling("sampled")) for p in prompts(3)]
    for _ in range(3):
        stage.step()
    stage.engine.remove(requests[1])
    stage.engine.remove(requests[1])
    stage.cache.check()
    done = requests[1].completion()
    assert done.finish_reason == "abort" and 3 <= len(done.token_ids) == done.stats.emitted < LENGTH
    assert requests[1].outbox[-1].finish_reason == "abort"
    stage.finish()
    assert [r.finish_reason for r in requests] == ["length", "abort", "length"]
    assert stage.cache.available == stage.cache.slots


def test_the_next_turn_builds_on_a_run_that_a_stop_cut() -> None:
    """What was accepted behind the stop must not be found in the prefix cache under the tokens before it."""
    whole = plainly(sampling("sampled", max_tokens=60), None)
    stage = Stage(table_target(), oracle([*PROMPT, *whole.token_ids]), draft_tokens=9)
    hits = 0
    for stop in sorted(set(whole.token_ids[15:40])):
        first = stage.all([PROMPT], [sampling("sampled", stop_token_ids=[stop], max_tokens=60)])[0]
        turn = [*PROMPT, *first.token_ids, 5, 6, 7]
        how = sampling("sampled", max_tokens=8)
        second = stage.all([turn], [how])[0]
        assert second.token_ids == run(table_target(), NoDrafter(), [turn], [how], reuse=False)[0].token_ids
        hits += second.stats.cached_tokens > 0
    assert hits > 3


# Log-probabilities (pain D26)

NATIVE = pytest.mark.skipif(kernels.library() is None, reason="no native kernels: there is no C++ compiler here")
LOGPROB_TARGETS = ["float64", pytest.param("native float32", marks=NATIVE)]


def logprob_target(kind: str) -> tuple[Target, Target]:
    """A target, and a draft that is often right about it."""
    if kind == "float64":
        return tiny_llama(), tiny_llama(noise=0.02)
    return random_llama(make_ops("native", torch.float32)), random_llama(make_ops("torch", torch.float32))


def close(a: Completion, b: Completion) -> None:
    assert a.token_ids == b.token_ids and a.logprobs is not None and b.logprobs is not None
    for mine, theirs in zip(a.logprobs, b.logprobs, strict=True):
        assert mine.token_id == theirs.token_id and abs(mine.logprob - theirs.logprob) < 1e-4
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert max(abs(p - q) for (_, p), (_, q) in zip(mine.top, theirs.top, strict=True)) < 1e-4


@pytest.mark.parametrize("kind", LOGPROB_TARGETS)
def test_logprobs_are_those_of_plain_decoding_and_do_not_turn_speculation_off(kind: str) -> None:
    """Pain D26: in some versions they silently turned it off, in others the values were wrong."""
    target, draft = logprob_target(kind)
    texts = prompts(6)
    how = [
        Sampling(temperature=0.8, seed=i, max_tokens=16, ignore_eos=True, logprobs=None if i % 3 == 2 else 5, top_k=9)
        for i in range(6)
    ]
    plain = [run(target, NoDrafter(), [p], [s], reuse=False)[0] for p, s in zip(texts, how, strict=True)]
    for width in (1, 3):
        done = run(target, ModelDrafter(draft, target.vocab_size, width=width), texts, how)
        for i, (mine, theirs) in enumerate(zip(done, plain, strict=True)):
            assert mine.stats.accepted > 0
            if i % 3 == 2:
                assert mine.logprobs is None and mine.token_ids == theirs.token_ids, "its neighbours do not matter"
            else:
                close(mine, theirs)


@pytest.mark.parametrize("kind", LOGPROB_TARGETS)
def test_logprobs_are_the_models_own_law(kind: str) -> None:
    """Before temperature, penalties and truncation; checked against a forward of each prefix outside the engine."""
    target, draft = logprob_target(kind)
    prompt = [3, 4, 5, 3, 4]
    how = Sampling(temperature=0.5, top_k=3, repetition_penalty=1.4, seed=2, max_tokens=14, ignore_eos=True, logprobs=4)
    done = run(target, ModelDrafter(draft, target.vocab_size), [prompt], [how])[0]
    law = Driver(target).plain([*prompt, *done.token_ids])[len(prompt) - 1 : -1].double().log_softmax(-1)
    assert done.logprobs is not None and len(done.logprobs) == 14
    for row, entry in zip(law, done.logprobs, strict=True):
        best = row.topk(4)
        assert abs(row[entry.token_id] - entry.logprob) < 1e-4
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert max(abs(value - q) for value, (_, q) in zip(best.values.tolist(), entry.top, strict=True)) < 1e-4


def test_zero_logprobs_are_the_tokens_own_alone() -> None:
    done = plainly(sampling("sampled", logprobs=0))
    assert done.logprobs is not None and all(entry.top == () for entry in done.logprobs)


# Statistics (pains F37, K55, K56)


class Tracing(FixedPlanner):
    """Keeps what the engine tells every planner: trees, and the paths accepted in them."""

    trace: list[tuple[int, list[int], list[int]]]

    def observe(self, round: Round) -> None:
        for seq, (_, parents), path in zip(round.seqs, round.drafts.trees(), round.verdict.accepted, strict=True):
            self.trace.append((seq.id, parents, path))


def depths(parents: Sequence[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(1 + found[parent] if parent >= 0 else 0)
    return found


def test_counts_of_1000_random_runs() -> None:
    """0 <= accepted <= drafted; emitted = accepted + rounds unless a stop cut the text; the depths add up; and sums of
    many requests are those of their rounds, never averages of ratios."""
    source, target = random.Random(9), table_target(vocab=8)
    planner = Tracing(5, CONTEXT)
    planner.trace = []
    draft = table_target(noise=0.15, vocab=8)
    parts: list[Stats] = []
    cut = 0
    for drafter in (RandomDrafter(8), ModelDrafter(draft, 8), ModelDrafter(draft, 8, width=2), NgramDrafter()):
        stage = Stage(target, drafter, planner=planner, max_batch=50, slots=3000, max_rows=64)
        texts = [[source.randrange(8) for _ in range(source.randint(1, 20))] for _ in range(250)]
        how = [
            Sampling(
                temperature=source.choice([0.0, 1.0]),
                seed=i,
                max_tokens=source.randint(1, 10),
                stop_token_ids=source.sample(range(8), source.choice([0, 0, 1])),
                draft_tokens=source.choice([None, None, 0, 2]),
            )
            for i in range(250)
        ]
        first = stage.next_id
        done = stage.all(texts, how)
        for i, (completion, asked) in enumerate(zip(done, how, strict=True)):
            stats = completion.stats
            rounds = [(parents, path) for id, parents, path in planner.trace if id == first + i]
            assert 0 <= stats.accepted <= stats.drafted and stats.emitted == len(completion.token_ids) >= 1
            if completion.finish_reason == "length":
                assert stats.emitted == stats.accepted + stats.rounds
            else:
                assert stats.emitted <= stats.accepted + stats.rounds
                cut += stats.emitted < stats.accepted + stats.rounds
            assert stats.rounds == len(rounds) and stats.drafted == sum(len(parents) for parents, _ in rounds)
            assert stats.accepted == sum(len(path) for _, path in rounds)
            drawn = [depth for parents, _ in rounds for depth in depths(parents)]
            kept = [depth for _, path in rounds for depth in range(len(path))]
            assert stats.drafted_by_depth == [drawn.count(d) for d in range(max(drawn, default=-1) + 1)]
            assert stats.accepted_by_depth == [kept.count(d) for d in range(max(drawn, default=-1) + 1)]
            assert all(a <= b for a, b in zip(stats.accepted_by_depth, stats.drafted_by_depth, strict=True))
            most = max((len(parents) for parents, _ in rounds), default=0)
            nodes = [node for _, path in rounds for node in path]
            assert stats.accepted_by_node == [nodes.count(node) for node in range(most)]
            assert asked.draft_tokens is None or stats.drafted <= asked.draft_tokens * stats.rounds
            assert 0 <= stats.acceptance_rate <= 1 and 1 <= stats.tokens_per_round <= 6
            assert min(stats.prefill_s, stats.decode_s, stats.draft_s, stats.verify_s) >= 0
            parts.append(stats)
        total = Stats.pooled(c.stats for c in done)
        assert total.drafted == sum(len(parents) for _, parents, _ in planner.trace)
        assert total.accepted == sum(len(path) for *_, path in planner.trace)
        assert total.rounds == len(planner.trace) and sum(total.drafted_by_depth) == total.drafted
        planner.trace = []
    assert len(parts) == 1000 and cut > 20, "some texts were cut inside an accepted run"
    total = Stats.pooled(parts)
    assert total.acceptance_rate == sum(s.accepted for s in parts) / sum(s.drafted for s in parts)
    assert total.tokens_per_round == sum(s.emitted for s in parts) / sum(s.rounds for s in parts)
    assert abs(total.acceptance_rate - sum(s.acceptance_rate for s in parts) / 1000) > 0.01, "not the average of ratios"
    assert sum(total.accepted_by_depth) == sum(total.accepted_by_node) == total.accepted > 300
    assert sum(s.prefill_s for s in parts) == pytest.approx(total.prefill_s)


def test_nothing_is_no_division() -> None:
    assert Stats.pooled([]) == Stats() and Stats().acceptance_rate == Stats().tokens_per_round == 0.0
