"""Lossless speculative decoding of language models."""

from foretell.drafters.base import Drafter
from foretell.engine.llm import LLM
from foretell.engine.request import Completion, Event, Logprob
from foretell.engine.stats import Stats
from foretell.types import Sampling

__all__ = ["LLM", "Completion", "Drafter", "Event", "Logprob", "Sampling", "Stats"]
