"""A draft model of another vocabulary (pains J52 to J54): the output never depends on it, it guesses as well as its
model can, computes each of its tokens once, and keeps to its own limits."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
from tokenizers import Tokenizer

from foretell.drafters import Parts, build
from foretell.drafters.base import NoDrafter
from foretell.drafters.model import ModelDrafter
from foretell.drafters.passes import CHUNK
from foretell.drafters.reading import Languages
from foretell.drafters.translate import SharedText, SharedTokens, Translator, translator
from foretell.kv.prefix import PAGE
from foretell.models.base import Target
from foretell.models.hub import resolve
from foretell.models.llama import LlamaModel
from foretell.models.load import open_checkpoint
from foretell.models.open import open_model
from foretell.models.table import TableTarget
from foretell.models.text import Text
from foretell.types import Sampling
from foretell.verify import RULES
from tests.conftest import CONTEXT, RandomPlanner, run, table_target, tiny_llama
from tests.drafters.pairs import (
    JOINED,
    LETTERS,
    WAYS,
    byte_level,
    joined_letters,
    letter_drafter,
    letters,
    permuted,
    sentencepiece,
)
from tests.drafters.test_model import Table
from tests.engine.test_invariance import prompts
from tests.play import Stage, spelled

CATS = "the cat sat on the mat and the dog sat too " * 3
MODES = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9}}
REVERSED = [*range(len(LETTERS))][::-1]
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def between(way: str, model: Target, target: Text, draft: Text, size: int) -> Translator:
    return WAYS[way](model, Languages.of(target, draft, (size, model.vocab_size)))


def assert_idle(drafter: Translator) -> None:
    """Nothing is left of anybody, and no slot of its own cache is lost."""
    drafter.cache.check()
    assert drafter._heard == {} and drafter.cache.available == drafter.cache.slots
    assert not drafter.cache._held


# Exactness


@pytest.fixture(scope="module")
def trained() -> tuple[Text, Text]:
    return byte_level(300, special=["<|im_start|>", "<|im_end|>"]), byte_level(290, CATS, special=["</s>"])


@pytest.mark.parametrize("rule", RULES)
@EVERY_WAY
def test_tokens_are_those_of_plain_decoding(way: str, rule: str, trained: tuple[Text, Text]) -> None:
    """Trained tokenizers of different tokens, sizes and special tokens; models that say anything, parts of characters
    included. Alone, in company, preempted, short of slots."""
    ours, theirs = trained
    size, draft_size = len(ours.vocab()) + 6, len(theirs.vocab()) + 3  # both padded
    target, model = tiny_llama(vocab=size), Table(draft_size, seed=3, max_context=CONTEXT)
    source = random.Random(4)
    texts = [[source.randrange(1, size) for _ in range(source.randint(1, 30))] for _ in range(4)]
    texts.append(ours.encode("the cat sat on the mat and"))
    accepted = drafted = 0
    for mode in MODES if rule == "match" else ["greedy"]:
        how = [Sampling(seed=70 + i, max_tokens=14 + i, **MODES[mode]) for i in range(5)]
        plain = [run(target, NoDrafter(), [p], [s], reuse=False)[0].token_ids for p, s in zip(texts, how, strict=True)]
        drafter = between(way, model, ours, theirs, size)
        alone = run(target, drafter, texts[:1], how[:1], rule=rule)
        assert alone[0].token_ids == plain[0]
        scenarios = {
            "in a batch": {},
            "preempted": {"preempt": random.Random(4), "arrivals": random.Random(3)},
            "short of slots": {"slots": CONTEXT, "max_rows": 20},
            "random budgets": {"planner": RandomPlanner(9, CONTEXT)},
        }
        for name, options in scenarios.items():
            drafter = between(way, model, ours, theirs, size)
            done = run(target, drafter, texts, how, rule=rule, **options)
            assert [c.token_ids for c in done] == plain, name
            assert_idle(drafter)
            accepted += sum(c.stats.accepted for c in done)
            drafted += sum(c.stats.drafted for c in done)
    assert drafted > (100 if way == "shared tokens" else 20), "nothing was speculated: the test shows nothing"
    assert accepted < drafted


# Quality: the draft's weights are the target's own


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", MODES)
@EVERY_WAY
def test_the_same_model_in_another_order_is_right(way: str, mode: str, rule: str) -> None:
    """Token i of the one is token 23 - i of the other. Under `match` the draws share noise by the target's ids; under
    `ratio` and `block` q is p; what is likeliest is all that text can offer to a draw."""
    target = table_target()
    drafter = between(way, permuted(target, REVERSED), letters(), spelled(LETTERS[::-1]), len(LETTERS))
    texts = [p[:30] for p in prompts(4)]
    how = [Sampling(seed=9 + i, max_tokens=40, ignore_eos=True, **MODES[mode]) for i in range(4)]
    plain = [run(target, NoDrafter(), [p], [s], reuse=False)[0].token_ids for p, s in zip(texts, how, strict=True)]
    stage, source = Stage(target, drafter, rule=rule, draft_tokens=4), random.Random(2)
    for preempted in (False, True):
        requests = [stage.add(p, s) for p, s in zip(texts, how, strict=True)]
        while stage.engine.requests:
            if preempted and stage.engine.scheduler.running and source.random() < 0.1:
                stage.preempt(source.choice(stage.engine.scheduler.running))
            stage.step()
        for request, expected in zip(requests, plain, strict=True):
            stats = request.stats
            if way == "shared tokens" or mode == "greedy":
                assert stats.accepted == stats.drafted > 15
            else:
                assert stats.accepted > 3
            if rule == "match" or mode == "greedy":
                assert request.completion().token_ids == expected
        assert_idle(drafter)


class Counting(Table):
    """Says the letters in their order, in whatever tokens: the likeliest token is the longest of the right text."""

    def __init__(self, text: Text, max_context: int = 1200) -> None:
        words = [text.token(i) for i in range(len(text.vocab()))]
        super().__init__(len(words), max_context=max_context)
        self.words = words

    def logits(self, tokens: list[int]) -> torch.Tensor:
        after = LETTERS[(LETTERS.index(self.words[tokens[-1]][-1]) + 1) % len(LETTERS) :] + LETTERS
        return torch.tensor([3.0 * len(w) if after.startswith(w) else -3.0 for w in self.words]).double()


def test_text_crosses_where_tokens_do_not() -> None:
    """The draft says "ab" in one token and has no "c" to "f": what both have is not enough, text is."""
    joined = spelled([*LETTERS[::-1], "ab", "gh", "cdef"], merges=[*JOINED[:2]])
    target = Counting(letters())
    how = Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)
    plain = run(target, NoDrafter(), [[3]], [how])[0].token_ids
    found = {}
    for way in WAYS:
        drafter = between(way, Counting(joined), letters(), joined, len(LETTERS))
        done = Stage(target, drafter, draft_tokens=4).all([[3]], [how])[0]
        assert done.token_ids == plain
        found[way] = done.stats.acceptance_rate
    assert found["shared text"] == 1.0


def test_drafts_beyond_the_shared_tokens_do_not_exist() -> None:
    """Pain J54: a fast way to the maximum passed the mask by. The draft wants what only it has above all."""
    drafter = letter_drafter("shared tokens")
    own = [i for i, word in enumerate(joined_letters().vocab()) if len(word) > 1]
    assert isinstance(drafter.model, TableTarget)
    drafter.model.table[..., own] += 100
    proposed: list[int] = []
    original = drafter.propose

    def noting(*args: object) -> object:
        drafts = original(*args)  # type: ignore[arg-type]
        proposed.extend(drafts.tokens.tolist())
        if drafts.drawn is not None:
            absent = [i for i in range(len(LETTERS)) if i not in drafter.languages.to_draft]
            assert drafts.drawn.q[:, absent].sum() == 0 and (drafts.drawn.q.sum(1) - 1).abs().max() < 1e-9
        return drafts

    drafter.propose = noting  # type: ignore[method-assign, assignment]
    for rule in RULES:
        for mode in MODES.values():
            how = [Sampling(seed=i, max_tokens=20, ignore_eos=True, **mode) for i in range(3)]
            Stage(table_target(), drafter, rule=rule).all(prompts(3), how)
    assert len(proposed) > 200 and set(proposed) <= set(drafter.languages.to_draft)


def test_after_the_end_of_the_text_nothing_is_said() -> None:
    """Each vocabulary has its own way to end a text; the draft's is the target's too."""
    ours, theirs = spelled(LETTERS, ["<end>"], eos_token="<end>"), spelled(LETTERS[::-1], ["</s>"], eos_token="</s>")
    model = Table(len(LETTERS) + 1)
    model.stop_ids = frozenset({24})
    model.table[..., 24] += 100
    drafter = between("shared text", model, ours, theirs, len(LETTERS) + 1)
    stage = Stage(Table(len(LETTERS) + 1), drafter, draft_tokens=4)
    request = stage.add([1, 2], Sampling(seed=1, max_tokens=30, ignore_eos=True))
    stage.finish()
    assert 5 < request.stats.rounds - 1 <= request.stats.drafted <= request.stats.rounds, "one node a round"
    assert model.forwards == request.stats.drafted
    assert drafter.languages.written[24] == b"<end>" and drafter.languages.to_draft[24] == 24


# What it costs


@pytest.mark.parametrize("accepted", [False, True])
@EVERY_WAY
def test_a_round_computes_what_is_new(way: str, accepted: bool) -> None:
    """A text whose end reads otherwise now is computed from there on, and never kept as it was: rejected guesses, and
    accepted ones that are another token together."""
    target, text = Counting(letters(), 400) if accepted else Table(max_context=400), joined_letters()
    model = Counting(text, 400)
    drafter = between(way, model, letters(), text, len(LETTERS))
    stage = Stage(target, drafter, draft_tokens=4, slots=500)
    request = stage.add([1, 2, 3, 4, 5], Sampling(temperature=0.0, max_tokens=300, ignore_eos=True))
    first = []
    while stage.engine.requests:
        model.passes.clear()
        stage.step()
        first += model.passes[:1]
        for heard in drafter._heard.values():
            slots = drafter.cache.committed(heard.own, 0, heard.own.cached)
            assert model.read(slots.tolist()) == heard.own.tokens[: heard.own.cached]
    assert request.stats.rounds > 60 and len(first) > 60 and (request.stats.acceptance_rate > 0.3) == accepted
    assert max(first) <= 10 and sum(first) < 4 * len(first)
    assert_idle(drafter)


@EVERY_WAY
def test_accepted_guesses_are_not_computed_again(way: str) -> None:
    model = Counting(spelled(LETTERS[::-1]))
    drafter = between(way, model, letters(), spelled(LETTERS[::-1]), len(LETTERS))
    stage = Stage(Counting(letters()), drafter, draft_tokens=4)
    done = stage.all([[3, 4, 5]], [Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)])[0]
    assert done.stats.acceptance_rate == 1.0 and drafter.rows <= 3 + 200


@EVERY_WAY
def test_a_long_prompt_is_computed_in_bounded_passes_and_found_again(way: str) -> None:
    drafter = letter_drafter(way, Table(len(joined_letters().vocab())))
    assert isinstance(drafter.model, Table)
    stage = Stage(Table(), drafter, slots=1300, max_rows=2000)
    source, how = random.Random(1), Sampling(seed=1, max_tokens=8, ignore_eos=True)
    texts = [[source.randrange(1, 24) for _ in range(n)] for n in (2 * CHUNK, 5, 300)]
    stage.all(texts, [how] * 3)
    assert max(drafter.model.passes) == CHUNK and drafter.model.passes[:2] == [CHUNK] * 2
    drafter.model.passes.clear()
    stage.all(texts, [how] * 3)
    assert drafter.model.passes[0] <= 3 * (PAGE + 5), "the second time there were prefix hits in its own cache too"
    assert_idle(drafter)


# Its limits


@EVERY_WAY
def test_a_draft_of_shorter_context_stops_at_its_limit_and_the_target_goes_on(way: str) -> None:
    """Pain H42. Its limit is in its own tokens; a prompt beyond it is no harm."""
    target, model = Table(max_context=96), Table(24, max_context=40, noise=0.1)
    model.table = permuted(model, REVERSED).table
    drafter = between(way, model, letters(), spelled(LETTERS[::-1]), len(LETTERS))
    how, texts = Sampling(seed=4, max_tokens=500, ignore_eos=True), [[1, 2, 3], [i % 20 + 1 for i in range(50)]]
    plain = [c.token_ids for c in run(Table(max_context=96), NoDrafter(), texts, [how] * 2)]
    stage = Stage(target, drafter)
    requests = [stage.add(text, how) for text in texts]
    drafted = 0
    while stage.engine.requests:
        before, length = requests[0].stats.drafted, len(requests[0].seq.tokens)
        stage.step()
        if requests[0].stats.drafted > before:
            drafted = length
        elif length > 40 and len(requests[0].seq.tokens) < 96:
            assert drafter._heard[requests[0].seq.id].own.table < 0, "it keeps slots that it has no use for any more"
    assert [r.completion().token_ids for r in requests] == plain
    assert 35 <= drafted < 40 and requests[1].stats.drafted == 0
    assert_idle(drafter)


@EVERY_WAY
def test_what_does_not_fit_its_own_slots_gets_no_drafts(way: str) -> None:
    """Most of the target's tokens are two or three of the draft's."""
    target_text = spelled(
        [*"abcdef", "ab", "abc", "de", "def"], merges=[("a", "b"), ("ab", "c"), ("d", "e"), ("de", "f")]
    )
    target, model = Table(10, max_context=60), Table(6, max_context=400)
    drafter = between(way, model, target_text, spelled("fedcba"), 10)
    texts = [[7, 1, 2, 3], [9, 2], [7] * 9, [2]]
    how = [Sampling(seed=i, max_tokens=40, ignore_eos=True) for i in range(4)]
    plain = [c.token_ids for c in run(Table(10, max_context=60), NoDrafter(), texts, how)]
    stage = Stage(target, drafter, slots=200)
    requests = [stage.add(p, s) for p, s in zip(texts, how, strict=True)]
    full = []
    while stage.engine.requests:
        stage.step()
        drafter.cache.check()
        full.append(drafter.cache.available)
    assert [r.completion().token_ids for r in requests] == plain
    assert min(full) < 20 and sum(r.stats.drafted for r in requests) > 10
    assert_idle(drafter)


def test_a_draft_without_a_token_of_the_text_is_no_harm() -> None:
    """Nothing to go on: not a token of the text is one of the draft's."""
    for way in WAYS:
        drafter = between(way, Table(2), spelled("abz"), spelled("yz"), 3)
        done = Stage(Table(3), drafter).all([[0, 1]], [Sampling(seed=1, max_tokens=9, temperature=0.0)])[0]
        assert done.stats.rounds > 0
        assert_idle(drafter)


# The choice


def test_the_way_is_chosen_by_what_both_share() -> None:
    large, near, small = byte_level(420), byte_level(415), byte_level(270)
    model = Table(len(large.vocab()))
    assert isinstance(translator(model, (large, near), len(large.vocab())), SharedTokens)
    assert isinstance(translator(model, (large, small), len(large.vocab())), SharedText)
    assert isinstance(translator(model, (sentencepiece(400), large), 700), SharedText)


def test_the_method_takes_any_draft_model() -> None:
    target, size = table_target(), len(LETTERS)
    made = build("model", Parts(target, size, Table(size), texts=(letters(), spelled(LETTERS[::-1]))))
    assert isinstance(made, SharedTokens)
    assert isinstance(build("auto", Parts(target, size, Table(2), texts=(letters(), spelled("yz")))), SharedText)
    padded = build("model", Parts(target, size, Table(size + 8), texts=(letters(), letters())))
    assert isinstance(padded, ModelDrafter) and padded.vocabulary == size
    for texts in ((None, None), (letters(), None), (None, letters())):
        assert isinstance(build("model", Parts(target, size, Table(size), texts=texts)), ModelDrafter)
        with pytest.raises(ValueError, match="25 tokens and the model 24: without tokenizers to compare"):
            build("model", Parts(target, size, Table(size + 1), texts=texts))


def test_nothing_in_common_is_refused_where_it_is_asked_for() -> None:
    with pytest.raises(ValueError, match="no token in common"):
        SharedTokens(Table(2), Languages.of(letters(), spelled("yz"), (24, 2)))


# Real text


def reduced(text: Text, keep: int) -> tuple[Text, list[int]]:
    """The tokenizer with its `keep` lowest ids alone, in the opposite order; also the id that each had."""
    state = json.loads(text.tokenizer.to_str())
    old = state["model"]["vocab"]
    words = sorted((word for word, i in old.items() if i < keep), key=old.__getitem__, reverse=True)
    new = state["model"]["vocab"] = {word: i for i, word in enumerate(words)}
    state["model"]["merges"] = [[a, b] for a, b in state["model"]["merges"] if {a, b, a + b} <= new.keys()]
    state["added_tokens"] = [{**added, "id": new[added["content"]]} for added in state["added_tokens"]]
    return Text(Tokenizer.from_str(json.dumps(state)), text.template, text.special_tokens), [
        old[word] for word in words
    ]


def test_the_built_in_model_drafts_for_itself_in_fewer_words() -> None:
    """Its own weights, with 32,000 of its 49,152 tokens: good guesses in another vocabulary, and the same text."""
    name = "smollm2-135m-instruct"
    opened = open_model(name, max_context=256)
    assert opened.text is not None and isinstance(opened.target, LlamaModel)
    text, ids = reduced(opened.text, 32_000)
    checkpoint = open_checkpoint(resolve(name))
    assert checkpoint.config is not None

    def tensor(name: str) -> torch.Tensor:
        return checkpoint.tensor(name)[ids] if name == "embed_tokens.weight" else checkpoint.tensor(name)

    config = dataclasses.replace(checkpoint.config, vocab_size=len(ids))
    model = LlamaModel(config, tensor, opened.target.ops, stop_ids=frozenset(), max_context=256, exact=True)
    prompt = opened.text.chat([{"role": "user", "content": "Why is the sky blue?"}])
    for how in (Sampling(temperature=0.0, max_tokens=24), Sampling(temperature=0.8, seed=2, max_tokens=24)):
        plain = Stage(opened.target, NoDrafter(), slots=300, max_batch=1).all([prompt], [how])[0]
        for way in WAYS:
            drafter = between(way, model, opened.text, text, opened.target.vocab_size)
            done = Stage(opened.target, drafter, draft_tokens=4, slots=300, max_batch=1).all([prompt], [how])[0]
            if opened.target.exact:
                assert done.token_ids == plain.token_ids
            assert done.stats.drafted > 0 and done.stats.acceptance_rate > 0.3
