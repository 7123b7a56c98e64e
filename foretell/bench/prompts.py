"""Prompts of different kinds, written for this benchmark: drafts are easy on some and hard on others."""

from __future__ import annotations

from foretell.engine.llm import LLM

_RIVER = """\
The Alder is a short river. It rises from three springs below Cairn Hill, runs east through the village of Tarrow and \
reaches the sea at Marsh Point after nineteen kilometres. For two centuries its water drove the wool mills of Tarrow. \
When the last mill closed in 1961 the weirs were left standing, and salmon could no longer reach the springs. In 2008 \
a group of residents bought the mill pond and took the first weir down. The council removed the other two in 2012. \
Salmon were counted at the springs again in the autumn of 2015, and otters followed them two years later. Anglers had \
feared that the pond's trout would go, and some did, but the river above the village now holds more fish than before."""

_FUNCTION = """\
def total(items):
    result = 0
    for item in items:
        result = result + item.price * item.count
    return result"""

PROMPTS: dict[str, str] = {
    "question": "Why does the sky look blue at noon and red at sunset? Explain it to a ten-year-old.",
    "story": "Write the beginning of a story about a lighthouse keeper who finds a letter in a bottle.",
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring and two examples.",
    "summary": f"Summarize the following text in two sentences.\n\n{_RIVER}",
    "edit": f"Repeat this function exactly as it is, but rename `result` to `amount`.\n\n{_FUNCTION}",
    "list": "List the numbers from one to twenty in words, one on each line.",
}


def encoded(llm: LLM, kinds: list[str]) -> dict[str, list[int]]:
    """The prompts of those kinds (all, if none is named) as token ids."""
    unknown = next((kind for kind in kinds if kind not in PROMPTS), None)
    if unknown is not None:
        raise ValueError(f"there is no kind of prompt {unknown!r}: choose from {', '.join(PROMPTS)}")
    return {kind: ids_of(llm, PROMPTS[kind]) for kind in kinds or PROMPTS}


def ids_of(llm: LLM, prompt: str) -> list[int]:
    """A text as token ids, through the chat template if there is one."""
    text = llm.tokenizer
    if text is None:
        raise ValueError("this model has no tokenizer, and the benchmark's prompts are texts")
    return text.encode(prompt) if text.template is None else text.chat([{"role": "user", "content": prompt}])
