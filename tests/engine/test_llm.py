"""The public engine on whole checkpoints: every kind of prompt, several at once, streams that come and go, and bad
input that is refused before anything is computed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell import LLM, Sampling
from foretell.drafters.ngram import NgramDrafter
from foretell.drafters.translate import SharedText, SharedTokens
from foretell.models.llama import LlamaModel
from tests.cli.conftest import write_tiny
from tests.drafters.pairs import byte_level

GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = Sampling(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True)
CONTEXT = 160
VOCAB = 258


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target; draft: other weights; ids: no tokenizer; swapped: another order of its tokens; words: other tokens;
    padded: more ids than tokens."""
    root = tmp_path_factory.mktemp("llm")
    write_tiny(root / "target")
    write_tiny(root / "draft", seed=1)
    write_tiny(root / "ids", tokenizer=False)
    write_tiny(root / "swapped", seed=1)
    tokenizer = json.loads((root / "swapped" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    by_id = {i: token for token, i in vocab.items()}
    vocab[by_id[70]], vocab[by_id[90]] = 90, 70
    (root / "swapped" / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = byte_level(290, special=["</s>"], eos_token="</s>")
    resize(write_tiny(root / "words", seed=1), len(words.vocab()))
    words.tokenizer.save(str(root / "words" / "tokenizer.json"))
    resize(write_tiny(root / "padded", seed=1), 272)
    resize(write_tiny(root / "ids, padded", seed=1, tokenizer=False), 272)
    return root


def resize(folder: Path, vocab_size: int) -> None:
    """Pad the vocabulary with rows that the model likes best of all."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    extra = 3 * table[: vocab_size - len(table)]
    weights["model.embed_tokens.weight"] = torch.cat([table, extra])
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocab_size}))


@pytest.fixture(scope="module")
def llm(models: Path) -> LLM:
    return make(models)


def make(models: Path, name: str = "target", **options: Any) -> LLM:
    return LLM(models / name, **{"max_context": CONTEXT, "max_batch": 4, "threads": 1, **options})


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward of any model."""
    counted: list[int] = []
    original = LlamaModel.forward

    def counting(self: LlamaModel, rows: Any, *args: Any, **kwargs: Any) -> Any:
        counted.append(len(rows.tokens))
        return original(self, rows, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", counting)
    return counted


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does with the shared engine, it leaves nothing behind."""
    yield
    if "llm" in request.fixturenames:
        assert_clean(request.getfixturevalue("llm"))


def assert_clean(llm: LLM) -> None:
    assert llm.engine.requests == {} and llm.engine.scheduler.idle
    llm.engine.cache.check()
    assert llm.engine.cache.available == llm.engine.cache.slots


def test_every_kind_of_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "the cat sat on the cat"
    ids = llm.tokenizer.encode(text)
    one = llm.generate(text, GREEDY)
    assert len(one) == 1 and one[0].prompt_token_ids == ids and len(one[0].token_ids) == 24
    assert one[0].text == llm.tokenizer.decode(one[0].token_ids) and one[0].finish_reason == "length"
    expected = one[0].token_ids
    for prompts in (ids, tuple(ids), [text], [ids], [tuple(ids)], (text,)):
        assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [expected]
    mixed = llm.generate([text, ids, "dog", [9, 9, 9]], GREEDY)
    assert [c.token_ids for c in mixed[:2]] == [expected] * 2
    assert [c.prompt_token_ids for c in mixed[2:]] == [llm.tokenizer.encode("dog"), [9, 9, 9]]


def test_more_prompts_than_places_keep_their_order_and_their_own_sampling(llm: LLM) -> None:
    prompts = [f"prompt number {i} says" for i in range(9)]
    how = [
        Sampling(temperature=i % 3 / 2, seed=i, max_tokens=3 + i, ignore_eos=True, logprobs=i if i % 2 else None)
        for i in range(9)
    ]
    done = llm.generate(prompts, how)
    assert [len(c.token_ids) for c in done] == [3 + i for i in range(9)]
    assert [c.logprobs and len(c.logprobs[0].top) for c in done] == [i if i % 2 else None for i in range(9)]
    alone = [llm.generate(p, s)[0] for p, s in zip(prompts, how, strict=True)]
    assert [c.token_ids for c in done] == [c.token_ids for c in alone]
    backwards = llm.generate(prompts[::-1], how[::-1])
    assert [c.token_ids for c in backwards[::-1]] == [c.token_ids for c in done]
    assert any(c.stats.cached_tokens for c in backwards), "the second time there are prefix hits"


@pytest.mark.parametrize(
    "options", [{}, {"rule": "ratio"}, {"rule": "block"}, {"draft_tokens": 9}, {"draft_tokens": 0}]
)
@pytest.mark.parametrize("drafter", ["ngram", "model", "auto", "object"])
def test_drafters_and_rules_change_speed_alone(models: Path, llm: LLM, drafter: str, options: dict[str, Any]) -> None:
    plain = make(models, drafter="none")
    prompts = ["abc abc abc abc", "xyz", "so it goes, so it goes"]
    greedy = [c.token_ids for c in plain.generate(prompts, GREEDY)]
    sampled = [c.token_ids for c in plain.generate(prompts, SAMPLED)]
    made: Any = NgramDrafter(2) if drafter == "object" else drafter
    draft = models / "target" if drafter == "model" else None
    other = make(models, drafter=made, draft_model=draft, **options)
    done = other.generate(prompts, GREEDY)
    assert [c.token_ids for c in done] == greedy
    assert (sum(c.stats.drafted for c in done) > 0) == (options.get("draft_tokens") != 0)
    if options.get("rule", "match") == "match":
        assert [c.token_ids for c in other.generate(prompts, SAMPLED)] == sampled
    assert_clean(other)


def test_penalties_go_by_the_tokens_of_the_request(models: Path, llm: LLM) -> None:
    """Counts begin with the prompt and grow with every token, those of an accepted run included."""
    plain = make(models, drafter="none")
    how = Sampling(temperature=0.0, max_tokens=60, repetition_penalty=1.2, frequency_penalty=0.3, ignore_eos=True)
    free = Sampling(temperature=0.0, max_tokens=60, ignore_eos=True)
    expected, done = plain.generate("abcabcabc", how)[0], llm.generate("abcabcabc", how)[0]
    assert done.token_ids == expected.token_ids != plain.generate("abcabcabc", free)[0].token_ids
    request = llm.submit("abcabcabc", how)
    assert request.seq.counts is not None
    while request.finish_reason is None:
        llm.step()
    said = torch.bincount(torch.tensor(request.seq.tokens[9:]), minlength=VOCAB)
    assert request.seq.counts[0].sum() == 9 and torch.equal(request.seq.counts[1], said.float())


def test_a_request_may_ask_for_plain_decoding(models: Path) -> None:
    llm = make(models, draft_tokens=4)  # a controller would draft as the clock says
    plain, drafted = llm.generate(["abab abab"] * 2, [Sampling(temperature=0.0, max_tokens=30, draft_tokens=0), GREEDY])
    assert plain.stats.drafted == 0 and drafted.stats.drafted > 0
    assert plain.token_ids[:24] == drafted.token_ids[: len(plain.token_ids)]


def test_without_sampling_there_are_defaults_and_each_run_draws_its_seed(llm: LLM) -> None:
    first, second = llm.generate([[1, 2, 3]] * 2)
    assert first.finish_reason in ("stop", "length") and first.prompt_token_ids == second.prompt_token_ids
    a, b = llm.submit("x"), llm.submit("x")
    assert a.seq.seed != b.seq.seed and 0 <= a.seq.seed < 2**64 and a.seq.sampling == Sampling()
    llm.cancel(a)
    llm.cancel(b)


def test_chat_is_the_template_and_generate(llm: LLM) -> None:
    one = [{"role": "user", "content": "Hi"}]
    two = [*one, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Why?"}]
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(llm.encode_chat(one), skip_special=False).endswith("<|im_start|>assistant\n")
    expected = [llm.generate(llm.encode_chat(m), GREEDY)[0].token_ids for m in (one, two)]
    assert [c.token_ids for c in llm.chat(one, GREEDY)] == expected[:1], "one conversation"
    assert [c.token_ids for c in llm.chat([one, two], GREEDY)] == expected, "several"
    assert [t for e in llm.stream_chat(two, GREEDY) for t in e.token_ids] == expected[1]


def test_a_stream_adds_up_to_what_generate_returns(llm: LLM) -> None:
    for how in (GREEDY, SAMPLED):
        whole = llm.generate("once upon a time", how)[0]
        events = list(llm.stream("once upon a time", how))
        assert "".join(e.text for e in events) == whole.text
        assert [t for e in events for t in e.token_ids] == whole.token_ids
        assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + ["length"]
        assert all(len(e.drafted) == len(e.token_ids) for e in events)


def test_streams_and_generate_side_by_side(llm: LLM) -> None:
    prompts = ["first", "second stream", "third"]
    expected = [llm.generate(p, SAMPLED)[0].token_ids for p in prompts]
    streams = [llm.stream(p, SAMPLED) for p in prompts[:2]]
    got: list[list[int]] = [[], []]
    for _ in range(1):
        for i, stream in enumerate(streams):
            got[i] += next(stream).token_ids
    assert llm.generate(prompts[2], SAMPLED)[0].token_ids == expected[2]
    assert len(llm.engine.requests) <= 2
    for i, stream in enumerate(streams):
        for event in stream:
            got[i] += event.token_ids
    assert got == expected[:2]


def test_closing_a_stream_frees_its_slots(llm: LLM) -> None:
    stream = llm.stream("to be closed", Sampling(max_tokens=100, ignore_eos=True, seed=1))
    next(stream)
    next(stream)
    (request,) = llm.engine.requests.values()
    stream.close()  # type: ignore[attr-defined]
    assert_clean(llm)
    assert request.finish_reason == "abort"
    llm.stream("never begun", GREEDY)
    assert_clean(llm)
    left = llm.stream("left early", GREEDY)
    next(left)
    del left
    assert_clean(llm)


def test_submitting_stepping_and_cancelling_by_hand(llm: LLM) -> None:
    expected = llm.generate("by hand", GREEDY)[0].token_ids
    kept, dropped = llm.submit("by hand", GREEDY), llm.submit("dropped", GREEDY)
    llm.step()
    llm.cancel(dropped)
    llm.cancel(dropped)
    while kept.finish_reason is None:
        llm.step()
    assert kept.completion().token_ids == expected and dropped.finish_reason == "abort"


@pytest.mark.parametrize("place", ["forward", "propose", "verify", "budgets"])
def test_an_interrupt_leaves_the_engine_clean_and_others_unharmed(
    models: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Ctrl-C in the middle of generate, wherever it hits, while a stream is open: the stream goes on as if nothing
    had been, and no slot is lost (the interrupted step had reserved some)."""
    llm = make(models, drafter="model", draft_model=models / "draft")
    expected = llm.generate(["streamed", "interrupted"], SAMPLED)
    stream = llm.stream("streamed", SAMPLED)
    got = next(stream).token_ids + next(stream).token_ids
    engine = llm.engine
    owner: Any = {"forward": llm.target, "propose": llm.drafter, "verify": engine.rule, "budgets": engine.planner}[
        place
    ]
    original: Callable[..., Any] = getattr(owner, place)
    calls = [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["interrupted"] * 3, SAMPLED)
    assert len(llm.engine.requests) == 1, "only the stream is left"
    llm.engine.cache.check()
    for event in stream:
        got += event.token_ids
        llm.engine.cache.check()
    assert got == expected[0].token_ids
    assert_clean(llm)
    assert [c.token_ids for c in llm.generate(["streamed", "interrupted"], SAMPLED)] == [c.token_ids for c in expected]


def test_an_error_in_the_model_leaves_the_engine_clean(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.rule, "verify", lambda *_: (_ for _ in ()).throw(FloatingPointError("NaN")))
        with pytest.raises(FloatingPointError, match="NaN"):
            llm.generate("x", GREEDY)
    assert_clean(llm)
    assert llm.generate("x", GREEDY)[0].finish_reason == "length"


# Bad requests

BAD_REQUESTS: dict[str, tuple[Callable[[LLM], Any], str]] = {
    "empty text": (lambda llm: llm.generate("", GREEDY), "prompt is empty"),
    "empty ids": (lambda llm: llm.generate([[]], GREEDY), "prompt is empty"),
    "one of several": (lambda llm: llm.generate(["fine", ""], GREEDY), "prompt is empty"),
    "no prompt": (lambda llm: llm.generate([], GREEDY), "no prompt was given"),
    "no conversation": (lambda llm: llm.chat([], GREEDY), "no prompt was given"),
    "too long": (
        lambda llm: llm.generate([1] * CONTEXT, GREEDY),
        f"has {CONTEXT} tokens; the largest .* {CONTEXT - 1}",
    ),
    "too long, streamed": (lambda llm: llm.stream([1] * 999, GREEDY), f"has 999 tokens; the largest .* {CONTEXT - 1}"),
    "id too large": (lambda llm: llm.generate([1, VOCAB], GREEDY), f"token id {VOCAB} .* vocabulary of {VOCAB}"),
    "id negative": (lambda llm: llm.generate([[1, -1]], GREEDY), "token id -1 "),
    "no id": (lambda llm: llm.generate([[1, 2.5]], GREEDY), "2.5 is no token id"),  # type: ignore[list-item]
    "stop id": (lambda llm: llm.generate("x", Sampling(stop_token_ids=[VOCAB])), f"stop_token_ids: token id {VOCAB} "),
    "bias id": (lambda llm: llm.generate("x", Sampling(logit_bias={-3: 1.0})), "logit_bias: token id -3 "),
    "logprobs": (lambda llm: llm.generate("x", Sampling(logprobs=VOCAB + 1)), f"logprobs must be at most .* {VOCAB}"),
    "too few samplings": (lambda llm: llm.generate(["x"] * 3, [GREEDY] * 2), "2 samplings were given for 3 prompts"),
    "too many samplings": (lambda llm: llm.generate("x", [GREEDY] * 2), "2 samplings were given for 1 prompt"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_before_anything_is_computed(llm: LLM, forwards: list[int], name: str) -> None:
    call, message = BAD_REQUESTS[name]
    with pytest.raises(ValueError, match=message) as error:
        call(llm)
    assert forwards == [] and "\n" not in str(error.value) and len(str(error.value)) < 200


def test_the_largest_prompt_fits(llm: LLM) -> None:
    done = llm.generate([[1] * (CONTEXT - 1)], Sampling(seed=1))[0]
    assert len(done.token_ids) == 1


BAD_SAMPLINGS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": math.nan}, "temperature must be a finite number"),
    "temperature below 0": ({"temperature": -0.1}, "temperature must be 0"),
    "infinite temperature": ({"temperature": math.inf}, "temperature must be a finite number"),
    "max_tokens": ({"max_tokens": -1}, "max_tokens must not be negative"),
    "no tokens": ({"max_tokens": 0}, "max_tokens must be at least 1"),
    "min_tokens": ({"min_tokens": -1}, "min_tokens must not be negative"),
    "min above max": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens .9. must not exceed max_tokens"),
    "draft_tokens": ({"draft_tokens": -2}, "draft_tokens must not be negative"),
    "half a token": ({"draft_tokens": 1.5}, "draft_tokens must be a whole number"),
    "logprobs": ({"logprobs": -1}, "logprobs must not be negative"),
    "top_k": ({"top_k": -2}, "top_k must not be negative"),
    "top_p": ({"top_p": 0.0}, "top_p must be above 0"),
    "min_p": ({"min_p": 1.5}, "min_p must lie between"),
    "repetition": ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
    "seed": ({"seed": 2**64}, "seed must fit in 64 bits"),
    "negative seed": ({"seed": -1}, "seed must not be negative"),
    "stop": ({"stop": ["x", ""]}, "stop must be a non-empty string"),
    "stop ids": ({"stop_token_ids": ["x"]}, "stop_token_ids must be token ids"),
    "bias": ({"logit_bias": {1: math.nan}}, "logit_bias of token 1"),
    "bias of a word": ({"logit_bias": {"x": 1.0}}, "logit_bias maps token ids"),
}


@pytest.mark.parametrize("name", BAD_SAMPLINGS)
def test_bad_sampling_is_refused_at_construction(name: str) -> None:
    settings, message = BAD_SAMPLINGS[name]
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


def test_the_largest_seed_is_fine(llm: LLM) -> None:
    how = Sampling(seed=2**64 - 1, max_tokens=5, ignore_eos=True)
    assert llm.generate("x", how)[0].token_ids == llm.generate("x", how)[0].token_ids


# Bad engines

BAD_ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "drafter": ({"drafter": "eagel"}, "drafter 'eagel' is not one of none, ngram, suffix, recycling, prediction, "),
    "no draft model": ({"drafter": "model"}, "drafter 'model' needs draft_model"),
    "rule": ({"rule": "rejection"}, "no rule 'rejection': choose one of match, ratio, block"),
    "dtype": ({"dtype": "fp8"}, "dtype 'fp8' is not one of auto, bfloat16"),
    "device": ({"device": "tpu"}, "device 'tpu' is not supported"),
    "draft_tokens": ({"draft_tokens": -1}, "draft_tokens must be 'auto' or a whole number"),
    "draft_tokens as text": ({"draft_tokens": "many"}, "draft_tokens must be 'auto' or a whole number"),
    "max_batch": ({"max_batch": 0}, "max_batch must be a whole number of at least 1"),
    "threads": ({"threads": 0}, "threads must be a whole number of at least 1"),
    "max_context": ({"max_context": 1}, "max_context must be a whole number of at least 2"),
    "longer context": ({"max_context": 10**6}, "max_context 1000000 is more than the model's 4096"),
    "draft model": ({"drafter": "model", "draft_model": "no/such/model"}, "no/such/model"),
}


@pytest.mark.parametrize("name", BAD_ENGINES)
def test_a_bad_engine_is_refused_at_construction(models: Path, name: str) -> None:
    options, message = BAD_ENGINES[name]
    with pytest.raises(ValueError, match=message) as error:
        make(models, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["no-such-model", "no/such/folder", "/no/such.gguf"])
def test_an_unknown_model_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        LLM(name)


# Vocabularies (pains J52, J53)


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
@pytest.mark.parametrize(("draft", "way"), [("swapped", SharedTokens), ("words", SharedText)])
def test_a_draft_of_another_vocabulary_drafts(models: Path, llm: LLM, draft: str, way: type, rule: str) -> None:
    """Pains J53, J54: mismatched tokenizers were silently accepted, and crossed badly. The sizes of the first are
    equal, the spelling is compared; the second has words, and ends a text otherwise."""
    plain = make(models, drafter="none")
    other = make(models, drafter="model", draft_model=models / draft, rule=rule)
    assert type(other.drafter) is way
    prompts = ["one", "two two", other.encode_chat([{"role": "user", "content": "Hi, the cat"}])]
    for how in (GREEDY, SAMPLED) if rule == "match" else (GREEDY,):
        done = other.generate(prompts, how)
        assert [c.token_ids for c in done] == [c.token_ids for c in plain.generate(prompts, how)]
        assert sum(c.stats.drafted for c in done) > 0
    events = list(other.stream("one", GREEDY))
    assert [t for e in events for t in e.token_ids] == plain.generate("one", GREEDY)[0].token_ids
    assert_clean(other)
    assert isinstance(other.drafter, way) and other.drafter.cache.available == other.drafter.cache.slots


def test_the_memory_of_a_draft_is_planned_for(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own cache has as many slots as the target's, and both share what is free."""
    monkeypatch.setattr("foretell.engine.memory.free_memory", lambda: 4 * 2048 * 300)
    alone = make(models, drafter="none", max_batch=8)
    other = make(models, drafter="model", draft_model=models / "words", max_batch=8)
    per_token = other.target.kv_bytes() + other.drafter.model.kv_bytes()  # type: ignore[attr-defined]
    assert alone.engine.cache.slots == 2048 * 300 // other.target.kv_bytes()
    assert other.engine.cache.slots == other.drafter.cache.slots == 2048 * 300 // per_token  # type: ignore[attr-defined]


@pytest.mark.parametrize(("target", "draft"), [("target", "padded"), ("padded", "target"), ("padded", "padded")])
def test_padded_vocabularies_go_together(models: Path, target: str, draft: str) -> None:
    """Pain J52: the same tokenizer, sizes of 258 and 272. Padding is never proposed, though the model likes it best."""
    plain = make(models, target, drafter="none")
    llm = make(models, target, drafter="model", draft_model=models / draft, draft_tokens=4)
    assert llm.vocabulary == VOCAB and isinstance(llm.engine.drafter.vocabulary, int)  # type: ignore[attr-defined]
    proposed: list[int] = []
    original = llm.drafter.propose

    def noting(*args: Any) -> Any:
        drafts = original(*args)
        proposed.extend(drafts.tokens.tolist())
        return drafts

    llm.drafter.propose = noting  # type: ignore[method-assign]
    done = llm.generate(["one", "two two"], SAMPLED)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain.generate(["one", "two two"], SAMPLED)]
    assert len(proposed) > 50 and max(proposed) < VOCAB
    assert_clean(llm)


def test_without_tokenizers_only_sizes_can_be_compared(models: Path) -> None:
    with pytest.raises(ValueError, match="272 tokens and the model 258"):
        make(models, "ids", drafter="model", draft_model=models / "ids, padded")
    llm = make(models, "ids", drafter="model", draft_model=models / "ids")
    assert llm.generate([1, 2, 3], GREEDY)[0].stats.accepted > 10


# Without a tokenizer


def test_a_folder_without_a_tokenizer_takes_and_returns_ids(models: Path, llm: LLM) -> None:
    ids = make(models, "ids")
    done = ids.generate([[5, 6, 7], [8, 9]], GREEDY)
    assert [c.token_ids for c in done] == [c.token_ids for c in llm.generate([[5, 6, 7], [8, 9]], GREEDY)]
    assert [c.text for c in done] == ["", ""] and ids.tokenizer is None
    events = list(ids.stream([5, 6, 7], GREEDY))
    assert [t for e in events for t in e.token_ids] == done[0].token_ids and not any(e.text for e in events)


def test_text_without_a_tokenizer_is_refused(models: Path, forwards: list[int]) -> None:
    llm = make(models, "ids")
    forwards.clear()  # a model checks itself when it is opened
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("text"),
        lambda: llm.chat([{"role": "user", "content": "Hi"}]),
        lambda: llm.generate([1, 2], Sampling(stop="x")),
        lambda: llm.stream("text"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="tokenizer"):
            call()
    assert forwards == []
    assert_clean(llm)


# The built-in model


def test_the_built_in_model_says_the_same_with_speculation(smollm2: tuple[LLM, LLM]) -> None:
    """On the real weights, in their own dtype: the very texts, chat and stream included."""
    plain, drafted = smollm2
    messages = [{"role": "user", "content": "Count: one two three one two three. Repeat it."}]
    for how in (Sampling(temperature=0.0, max_tokens=24), Sampling(temperature=0.7, seed=1, max_tokens=24)):
        expected, done = plain.chat(messages, how)[0], drafted.chat(messages, how)[0]
        if plain.target.exact:
            assert (done.text, done.token_ids) == (expected.text, expected.token_ids)
        assert done.stats.drafted > 0 and done.text.strip()
    assert "".join(e.text for e in drafted.stream_chat(messages, how)) == done.text
    paris = drafted.generate("The capital of France is", Sampling(temperature=0.0, max_tokens=4, logprobs=3))[0]
    assert "Paris" in paris.text and paris.logprobs is not None
    assert all(entry.token_id == entry.top[0][0] for entry in paris.logprobs)
    assert_clean(drafted)


@pytest.fixture(scope="module")
def smollm2() -> tuple[LLM, LLM]:
    options: dict[str, Any] = {"max_context": 256, "max_batch": 2}
    name = "smollm2-135m-instruct"
    return LLM(name, drafter="none", **options), LLM(name, drafter="ngram", **options)


def test_what_is_learnt_is_shared_between_dtypes_and_what_is_measured_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    write_tiny(tmp_path / "tiny")
    llms = [LLM(tmp_path / "tiny", "suffix", dtype=dtype, max_context=128) for dtype in ("bfloat16", "int8")]
    assert llms[0].folder == llms[1].folder
    assert len(list(llms[0].folder.glob("costs-*.json"))) == 2


def test_the_engine_can_decode_as_if_it_had_no_drafter(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(models, drafter="suffix+recycling", draft_tokens=4)
    expected = llm.generate("abab abab", GREEDY)[0]
    called: list[str] = []
    for name in ("propose", "observe", "admit", "forget"):
        monkeypatch.setattr(llm.drafter, name, lambda *_, name=name: called.append(name))
    with llm.engine.plain():
        plain = llm.generate("abab abab", GREEDY)[0]
    assert plain.token_ids == expected.token_ids and plain.stats.drafted == 0 and not called
    monkeypatch.undo()
    assert llm.generate("abab abab", GREEDY)[0].stats.drafted > 0, "and it is back"
