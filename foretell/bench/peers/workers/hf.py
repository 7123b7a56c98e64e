"""Hugging Face transformers: `generate` as a user would call it, with its default cache, and prompt lookup if asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class Transformers:
    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        transformers: Any = importlib.import_module("transformers")

        torch.set_num_threads(options["threads"])
        transformers.utils.logging.disable_progress_bar()
        dtype = getattr(torch, options["dtype"])
        self.version = transformers.__version__
        self._torch, self._library = torch, transformers
        self._model = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).eval()
        self._draft_tokens = options["draft_tokens"]

    def generate(self, prompt: list[int], count: int, came: Callable[[int], None]) -> list[int]:
        torch = self._torch

        def watch(ids: Any, scores: Any, **_: Any) -> Any:
            came(ids.shape[1] - len(prompt))
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor([prompt])
        config = self._library.GenerationConfig(
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
            prompt_lookup_num_tokens=self._draft_tokens or None,
        )
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                stopping_criteria=self._library.StoppingCriteriaList([watch]),
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


load = Transformers
