"""Texts that a model writes by itself, both sides of a conversation: what drafters can learn from without any data.

The model continues its own chat template from where a user's words would stand (as in Magpie, Xu et al. 2024,
arXiv 2406.08464), and then answers what it made up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.drafters.base import Progress
from foretell.types import Sampling

if TYPE_CHECKING:
    from foretell.engine.llm import LLM

QUESTION, ANSWER = 60, 128  # tokens at most


def opening(llm: LLM) -> list[int]:
    """The ids of a conversation up to the user's first word; none if the model has no chat template."""
    if llm.tokenizer is None or llm.tokenizer.template is None:
        return []
    one, other = (llm.encode_chat([{"role": "user", "content": word}]) for word in ("A", "7"))
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return one[:same]


def write(llm: LLM, count: int, progress: Progress = lambda done, total: None) -> None:
    """Let the model ask itself `count` questions and answer those that come to an end, without drafts."""
    start = opening(llm)
    if not start or not count or len(start) >= llm.max_context:
        return
    asking = [
        Sampling(temperature=1.0, seed=i, max_tokens=QUESTION, draft_tokens=0, private=True) for i in range(count)
    ]
    asked = llm.generate([start] * count, asking, lambda done: progress(done, 2 * count))
    questions = [done.text for done in asked if done.finish_reason == "stop" and done.text.strip()]
    encoded = (llm.encode_chat([{"role": "user", "content": question}]) for question in questions)
    prompts = [prompt for prompt in encoded if len(prompt) < llm.max_context]
    answering = [Sampling(temperature=0.0, max_tokens=ANSWER, draft_tokens=0)] * len(prompts)
    settled = 2 * count - len(prompts)  # a question without an end needs no answer
    if prompts:
        llm.generate(prompts, answering, lambda done: progress(settled + done, 2 * count))
