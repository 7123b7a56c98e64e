"""The same weights in another engine, for a ratio that is measured within one run."""

from __future__ import annotations

import contextlib
import importlib
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from foretell.machine import cores


class Other(Protocol):
    """Another engine with the same model loaded."""

    def decode(self, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        """`count` greedy tokens after the prompt, and the seconds from the first of them to the last."""
        ...


class Transformers:
    """`generate` of Hugging Face transformers, as a user would call it: greedy, with its default cache."""

    def __init__(self, path: Path, dtype: torch.dtype, threads: int | None) -> None:
        """path: a folder or a .gguf file. ValueError in one sentence if transformers is missing or cannot load it."""
        try:
            library: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise ValueError("--against transformers needs that package: pip install 'foretell[hf]'") from error
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
        folder, extra = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars that no setting turns off
                model = library.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **extra)
        except Exception as error:  # whatever it is, the comparison cannot be had
            raise ValueError(f"transformers cannot load {path}: {error}") from error
        torch.set_num_threads(threads or cores())
        self._library, self._model = library, model.eval()

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        stamps: list[float] = []

        def stamp(ids: Any, scores: Any, **_: Any) -> torch.Tensor:
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor([list(prompt)])
        config = self._library.GenerationConfig(
            max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
        )
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=self._library.StoppingCriteriaList([stamp]),
        )
        return out[0, len(prompt) :].tolist(), stamps[-1] - stamps[0]


OTHERS = {"transformers": Transformers}


def other(name: str, path: Path, dtype: torch.dtype, threads: int | None) -> Other:
    """The engine of that name; ValueError if there is none or it is not installed."""
    if name not in OTHERS:
        raise ValueError(f"--against {name!r} is not one of {', '.join(OTHERS)}")
    return OTHERS[name](path, dtype, threads)
