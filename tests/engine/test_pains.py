"""What users of other engines ran into, end to end. The letters are those of the project's list of complaints."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from foretell import kernels
from foretell.drafters.base import Drafter, NoDrafter
from foretell.drafters.model import ModelDrafter
from foretell.drafters.ngram import NgramDrafter
from foretell.engine.request import Completion
from foretell.engine.stats import Stats
from foretell.models.table import TableTarget
from foretell.types import Sampling
from tests.conftest import VOCAB, HostileDrafter, RandomDrafter, run, table_target, tiny_llama
from tests.engine.test_invariance import TARGETS, prompts
from tests.models.drive import make_ops, random_llama
from tests.play import Stage

SEED = 42


def tokens(done: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in done]


def random_prompts(count: int, seed: int, vocab: int = VOCAB, most: int = 12) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(vocab) for _ in range(source.randint(1, most))] for _ in range(count)]


@pytest.mark.parametrize("kind", ["random trees", "a draft's trees"])
def test_b14_a_tree_never_takes_another_path_than_the_best(kind: str) -> None:
    """With a tree, a candidate other than the arg-max path was taken. 1,000 prompts, greedy, trees of width 3."""
    texts = random_prompts(1000, 3, vocab=8, most=6)
    greedy = [Sampling(temperature=0.0, max_tokens=6)] * 1000
    plain = run(table_target(vocab=8), NoDrafter(), texts, greedy, max_batch=100, slots=4000, max_rows=999)
    drafter: Drafter = RandomDrafter(8)
    if kind != "random trees":
        drafter = ModelDrafter(table_target(vocab=8, noise=0.5), 8, width=3)
    done = run(table_target(vocab=8), drafter, texts, greedy, max_batch=100, slots=4000, max_rows=999, draft_tokens=9)
    assert tokens(done) == tokens(plain)
    total = Stats.pooled(c.stats for c in done)
    assert total.drafted > 3000 and total.accepted > 400


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_b15_many_turns_side_by_side_stay_what_each_is_alone(kind: str) -> None:
    """Garbage and loops under concurrency and after several turns, acceptance down to 0.02. 32 requests in random
    arrival order and three turns with prefix caching: each answer is that of its solo run, acceptance stays."""

    def target(noise: float = 0.0) -> TableTarget:
        made = TableTarget(VOCAB, seed=0, max_context=200, stop_ids={0})
        made.table[3] *= 0.4  # so that the draft does not get worse with the length of the text
        made.table = made.table + noise * TableTarget(VOCAB, seed=1).table
        made.table[3] -= noise * TableTarget(VOCAB, seed=1).table[3]
        return made

    drafter: Drafter = ModelDrafter(target(0.2), VOCAB) if kind == "model" else NgramDrafter()
    stage = Stage(target(), drafter, slots=2500, max_batch=12, max_rows=48, draft_tokens=4)
    source = random.Random(15)
    texts = [([7] * 18 if i % 4 == 0 else []) + p for i, p in enumerate(random_prompts(32, 8))]
    rates, hits = [], 0
    for turn in range(3):
        how = [
            Sampling(
                temperature=[0.0, 0.8, 1.0][i % 3],
                seed=100 * turn + i,
                max_tokens=14,
                top_k=[0, 5][i % 2],
                presence_penalty=[0.0, 0.5][i % 5 == 0],
                min_tokens=6,
                draft_tokens=[None, 2, None, None][i % 4],
            )
            for i in range(32)
        ]
        order = source.sample(range(32), 32)
        requests = {}
        for i in order:
            requests[i] = stage.add(texts[i], how[i])
            for _ in range(source.randint(0, 2)):
                stage.step()
        stage.finish()
        done = [requests[i].completion() for i in range(32)]
        solo = [run(target(), NoDrafter(), [p], [s], reuse=False)[0] for p, s in zip(texts, how, strict=True)]
        assert tokens(done) == tokens(solo), f"turn {turn}"
        rates.append(Stats.pooled(c.stats for c in done).acceptance_rate)
        hits += sum(c.stats.cached_tokens for c in done) if turn else 0
        texts = [
            p + c.token_ids + [source.randrange(1, VOCAB) for _ in range(3)] for p, c in zip(texts, done, strict=True)
        ]
    assert hits > 1000, "each turn begins with what the turn before left in the cache"
    if kind == "model":
        assert rates[0] > 0.3 and rates[2] > 0.9 * rates[0]


@pytest.mark.parametrize("kind", TARGETS)
def test_b17_a_draft_of_random_weights_changes_nothing(kind: str) -> None:
    """Gibberish with a bad head: a drafter can never alter the text, only the time it takes."""
    target, texts = TARGETS[kind](), prompts(8)
    how = [Sampling(temperature=i % 2, seed=i, max_tokens=15) for i in range(8)]
    plain = tokens(run(target, NoDrafter(), texts, how))
    wild: list[Drafter] = [
        ModelDrafter(tiny_llama(77, layers=1), VOCAB),
        ModelDrafter(tiny_llama(78, layers=3), VOCAB, width=4),
        ModelDrafter(table_target(79), VOCAB, width=2),
        RandomDrafter(seed=80),
        HostileDrafter([p + t for p, t in zip(texts, plain, strict=True)], seed=81),
    ]
    for drafter in wild:
        done = run(target, drafter, texts, how)
        assert tokens(done) == plain and sum(c.stats.drafted for c in done) > 100


@pytest.mark.skipif(kernels.library() is None, reason="no native kernels: there is no C++ compiler here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b13_low_precision_is_no_excuse(dtype: torch.dtype) -> None:
    """Products of one row and of many rounded differently and near-ties flipped. The native kernels do not: 36 prompts,
    greedy and sampled, the same tokens with and without speculation, alone and in a batch."""
    target, near = (random_llama(make_ops("native", dtype)) for _ in range(2))
    texts = prompts(36)
    how = [Sampling(temperature=[0.0, 0.9][i % 2], seed=i, max_tokens=20, ignore_eos=True) for i in range(36)]
    plain = [run(target, NoDrafter(), [p], [s], reuse=False)[0].token_ids for p, s in zip(texts, how, strict=True)]
    made: dict[str, Callable[[], Drafter]] = {
        "ngram": NgramDrafter,
        "model": lambda: ModelDrafter(near, target.vocab_size),
        "model, a tree": lambda: ModelDrafter(near, target.vocab_size, width=3),
    }
    for name, build in made.items():
        done = run(target, build(), texts, how, slots=4096)
        assert tokens(done) == plain, name
        assert Stats.pooled(c.stats for c in done).accepted > (5 if name == "ngram" else 100)


SHAPES = {
    "min_p": {"min_p": 0.2},
    "bias": {"logit_bias": {3: 5.0, 4: -5.0, 5: 5.0}},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "all": {"min_p": 0.02, "logit_bias": {3: 5.0, 4: -5.0}, "top_k": 9, "top_p": 0.9, "frequency_penalty": 0.5},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_c20_every_field_of_sampling_goes_with_speculation(shape: str) -> None:
    """min-p or a logit bias was refused under speculation, or would have acted on bonus tokens alone."""
    target, texts = table_target(), prompts(6)
    how = [Sampling(temperature=1.0, seed=i, max_tokens=20, **SHAPES[shape]) for i in range(6)]
    unshaped = [Sampling(temperature=1.0, seed=i, max_tokens=20) for i in range(6)]
    plain = tokens(run(target, NoDrafter(), texts, how))
    assert plain != tokens(run(target, NoDrafter(), texts, unshaped)), "the shape changes something"
    for width in (1, 3):
        done = run(target, ModelDrafter(table_target(noise=0.1), VOCAB, width=width), texts, how)
        assert tokens(done) == plain and sum(c.stats.accepted for c in done) > 10


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_c20_the_other_rules_shape_every_accepted_token_too(rule: str) -> None:
    """With top_k 1 a sampled text is the greedy one, whatever the rule: not only at the end of each round."""
    target, texts = table_target(), prompts(6)
    greedy = tokens(run(target, NoDrafter(), texts, [Sampling(temperature=0.0, max_tokens=20)] * 6))
    how = [Sampling(temperature=1.0, seed=i, max_tokens=20, top_k=1) for i in range(6)]
    done = run(target, ModelDrafter(table_target(noise=0.1), VOCAB), texts, how, rule=rule)
    assert tokens(done) == greedy and sum(c.stats.accepted for c in done) > 10


@pytest.mark.parametrize("kind", TARGETS)
def test_c23_a_seed_is_a_seed(kind: str) -> None:
    """Seeds were ignored, or differing seeds in one batch gave gibberish. Alone, in a batch of 16, after preemption,
    with or without drafts: the same tokens; and another seed is another text."""
    target, prompt = TARGETS[kind](), prompts(1)[0]
    how = Sampling(temperature=1.0, seed=SEED, max_tokens=25, ignore_eos=True)
    alone = run(target, NoDrafter(), [prompt], [how])[0].token_ids
    assert run(target, NoDrafter(), [prompt], [how])[0].token_ids == alone
    seeds = [SEED if i in (3, 11) else i for i in range(16)]
    batch = [Sampling(temperature=1.0, seed=s, max_tokens=25, ignore_eos=True) for s in seeds]
    for drafter in (NoDrafter(), NgramDrafter(), ModelDrafter(TARGETS[kind](noise=0.1), VOCAB)):
        for preempt in (None, random.Random(6)):
            done = tokens(run(target, drafter, [prompt] * 16, batch, max_batch=16, preempt=preempt))
            assert [i for i, got in enumerate(done) if got == alone] == [3, 11]


@pytest.mark.parametrize("max_rows", [256, 10])
def test_a6_no_plain_step_between_drafts(max_rows: int) -> None:
    """An engine ran a plain one-token step between drafts. Forwards are rounds, and steps in which no prompt ended."""
    for drafter in (NoDrafter(), NgramDrafter(), ModelDrafter(table_target(noise=0.1), VOCAB, width=2)):
        target = table_target()
        prompt = [1, 2, 3, 4] * 9
        done = run(target, drafter, [prompt], [Sampling(seed=1, max_tokens=40, ignore_eos=True)], max_rows=max_rows)[0]
        assert target.forwards == done.stats.rounds + (3 if max_rows == 10 else 0), "36 tokens: 10, 10, 10, 6"
        assert done.stats.rounds == 40 - done.stats.accepted
