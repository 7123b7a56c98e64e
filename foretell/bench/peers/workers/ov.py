"""OpenVINO GenAI: its pipeline of continuous batching, with prompt lookup if asked, on a model that optimum-intel
converts once."""

from __future__ import annotations

import gc
import os
import tempfile
from typing import Any


def _convert(options: dict[str, Any], folder: str) -> None:
    """Make `folder`: the model as OpenVINO has it, weights in the dtype asked for."""
    import torch
    from optimum.intel import OVModelForCausalLM

    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as scratch:
        fresh = os.path.join(scratch, "model")
        dtype = torch.float32 if options["dtype"] == "int8" else getattr(torch, options["dtype"])
        model = OVModelForCausalLM.from_pretrained(
            options["model"], export=True, compile=False, load_in_8bit=options["dtype"] == "int8", dtype=dtype
        )
        model.save_pretrained(fresh)
        del model
        gc.collect()
        os.replace(fresh, folder)


class OpenVino:
    def __init__(self, options: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        self._tensor, self._library = openvino.Tensor, openvino_genai
        self.version = openvino_genai.__version__
        folder = os.path.join(options["cache"], f"openvino-{options['dtype']}")
        if not os.path.isdir(folder):
            _convert(options, folder)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = options["concurrency"]
        scheduler.cache_size = 2
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options["threads"]}
        if options["draft_tokens"]:
            properties["prompt_lookup"] = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._draft_tokens = options["draft_tokens"]
        self._handles: dict[int, Any] = {}

    def clear(self) -> None:
        self._handles = {}

    def start(self, id: int, prompt: list[int], count: int) -> None:
        import numpy as np

        config = self._library.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        if self._draft_tokens:
            config.num_assistant_tokens, config.max_ngram_size = self._draft_tokens, 3
        ids = self._tensor(np.array([prompt], dtype=np.int64))
        self._handles[id] = self._pipeline.add_request(id, ids, config)

    def step(self) -> dict[int, list[int]]:
        self._pipeline.step()
        new: dict[int, list[int]] = {}
        for id, handle in self._handles.items():
            while handle.can_read():
                for output in handle.read().values():
                    new.setdefault(id, []).extend(output.generated_ids)
        return new

    def done(self, id: int) -> None:
        del self._handles[id]


load = OpenVino
