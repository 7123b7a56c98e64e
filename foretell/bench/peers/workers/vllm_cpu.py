"""vLLM, its engine stepped in this process; n-gram speculation if asked."""

from __future__ import annotations

import os
from typing import Any


class Vllm:
    def __init__(self, options: dict[str, Any]) -> None:
        # in this process, so that a stopped process is a stopped engine; as many threads as OMP_NUM_THREADS says
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self.version = vllm.__version__
        self._sampling, self._kind = vllm.SamplingParams, RequestOutputKind.DELTA
        lookup = {"method": "ngram", "num_speculative_tokens": options["draft_tokens"], "prompt_lookup_max": 4}
        arguments = vllm.EngineArgs(
            model=options["model"],
            skip_tokenizer_init=True,
            dtype=options["dtype"],
            max_model_len=options["context"] + 8,
            max_num_seqs=options["concurrency"],
            disable_log_stats=True,
            speculative_config=lookup if options["draft_tokens"] else None,
        )
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self._ids: dict[str, int] = {}
        self._count = 0

    def clear(self) -> None:
        self._engine.reset_prefix_cache()
        self._ids = {}

    def start(self, id: int, prompt: list[int], count: int) -> None:
        self._count += 1
        name = str(self._count)  # never used before: some of the last may be gone only at the next step
        sampling = self._sampling(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=self._kind
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self._ids[name] = id

    def step(self) -> dict[int, list[int]]:
        outputs = self._engine.step()
        return {self._ids[output.request_id]: list(output.outputs[0].token_ids) for output in outputs}

    def done(self, id: int) -> None:
        pass


load = Vllm
