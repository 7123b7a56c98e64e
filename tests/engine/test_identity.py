"""The promise on the real model, in the dtype it runs in: plain and speculative decoding are the same to the last bit.

The quick part runs with the suite. The slow part takes ten Spec-Bench questions of each kind (hemingkx/Spec-Bench,
data/spec_bench/question.jsonl, not redistributed here): `make test-identity SPEC_BENCH=path/to/question.jsonl`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from foretell import LLM, Sampling
from foretell.drafters.base import NoDrafter
from foretell.drafters.ngram import NgramDrafter
from tests.conftest import HostileDrafter

QUESTIONS = [
    "List the numbers from one to twelve in words, then repeat the list.",
    "Translate into French: The cat sleeps on the old chair near the window.",
    "Write a Python function that returns the greatest common divisor of two numbers.",
    "What is 17 times 24? Show the steps.",
    "Describe a morning at the harbour in three sentences.",
    "Summarize: The mill closed in 1961. The weirs stayed. In 2008 the first weir was taken down, and in 2012 the "
    "others. Salmon came back in 2015 and otters in 2017.",
    "Who wrote Hamlet, and when?",
    "Give me a shopping list for pancakes.",
]
KINDS = {
    "mt_bench": ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "math_reasoning": ("math_reasoning",),
    "rag": ("rag",),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM("smollm2-135m-instruct", drafter="none", max_context=4096)


def settings(count: int, tokens: int, temperature: float) -> list[Sampling]:
    return [Sampling(temperature=temperature, seed=100 + i, max_tokens=tokens) for i in range(count)]


def tokens_of(llm: LLM, prompts: Sequence[Sequence[int]], how: Sequence[Sampling]) -> list[list[int]]:
    return [done.token_ids for done in llm.generate(list(prompts), how)]


def use(llm: LLM, drafter: object, draft_tokens: int) -> None:
    """Another drafter on the same loaded model."""
    llm.engine.drafter = llm.drafter = drafter  # type: ignore[assignment]
    llm.engine.planner.draft_tokens = draft_tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_and_speculative_are_the_same(llm: LLM, temperature: float) -> None:
    assert llm.target.exact, "the products of this machine depend on the number of rows"
    prompts = [llm.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    how = settings(len(prompts), 40, temperature)
    use(llm, NoDrafter(), 0)
    plain = [tokens_of(llm, [p], [s])[0] for p, s in zip(prompts, how, strict=True)]
    assert tokens_of(llm, prompts, how) == plain, "plain, in a batch"
    known = [p + t for p, t in zip(prompts, plain, strict=True)]
    for drafter in (NgramDrafter(), HostileDrafter(known, llm.target.vocab_size)):
        use(llm, drafter, 6)
        llm.engine.scheduler.max_rows = 24  # prompts in chunks, beside others that decode
        done = llm.generate(prompts, how)
        llm.engine.scheduler.max_rows = 256
        assert sum(c.stats.accepted for c in done) > 20
        assert [c.token_ids for c in done] == plain, f"{type(drafter).__name__}, in a batch"
        alone = [tokens_of(llm, [p], [s])[0] for p, s in zip(prompts[:3], how[:3], strict=True)]
        assert alone == plain[:3], f"{type(drafter).__name__}, alone"


def spec_bench(kind: str) -> list[str]:
    path = Path(os.environ["SPEC_BENCH"])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    chosen = [[line["turns"][0] for line in lines if line["category"] == category] for category in KINDS[kind]]
    mixed = [q for row in itertools.zip_longest(*chosen) for q in row if q is not None]
    return mixed[:10]


@pytest.mark.slow
@pytest.mark.skipif("SPEC_BENCH" not in os.environ, reason="needs SPEC_BENCH, the path of Spec-Bench's question.jsonl")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_spec_bench(llm: LLM, kind: str, temperature: float) -> None:
    """128 tokens of ten questions: plain alone against speculative alone, in batches of 8, and with hostile trees."""
    prompts = [llm.encode_chat([{"role": "user", "content": q}]) for q in spec_bench(kind)]
    how = settings(len(prompts), 128, temperature)
    use(llm, NoDrafter(), 0)
    plain = [tokens_of(llm, [p], [s])[0] for p, s in zip(prompts, how, strict=True)]
    use(llm, NgramDrafter(), 4)
    assert [tokens_of(llm, [p], [s])[0] for p, s in zip(prompts, how, strict=True)] == plain, "alone"
    known = [p + t for p, t in zip(prompts, plain, strict=True)]
    for drafter in (NgramDrafter(), HostileDrafter(known, llm.target.vocab_size)):
        use(llm, drafter, 4)
        batched = tokens_of(llm, prompts[:8], how[:8]) + tokens_of(llm, prompts[-8:], how[-8:])[6:]
        assert batched == plain, f"{type(drafter).__name__}, in batches of 8"
