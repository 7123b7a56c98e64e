"""llama.cpp through llama-cpp-python: batches by its C interface, prompt lookup as that package does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BATCH = 512  # tokens of a call


class Batches:
    """Several requests at once: whoever decodes has a token in every call, prompts have what is left of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        import ctypes

        import llama_cpp
        import numpy as np

        self._c, self._numpy, self._callback = llama_cpp, np, llama_cpp.llama_log_callback(_quiet)
        self.version = llama_cpp.__version__
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(options["model"].encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise RuntimeError(f"{options['model']} cannot be loaded")
        params = llama_cpp.llama_context_default_params()
        places = options["concurrency"]
        params.n_ctx = places * -(-(options["context"] + 8) // 256) * 256
        params.n_seq_max, params.n_batch, params.n_ubatch = places, BATCH, BATCH
        params.n_threads = params.n_threads_batch = options["threads"]
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("there is no memory for so many tokens of context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._places = list(range(places))
        self._running: dict[int, dict[str, Any]] = {}  # request -> place, length so far, tokens still to be computed

    def clear(self) -> None:
        self._c.llama_memory_clear(self._memory, True)

    def start(self, id: int, prompt: list[int], count: int) -> None:
        self._running[id] = {"place": self._places.pop(), "length": 0, "tokens": list(prompt)}

    def done(self, id: int) -> None:
        place = self._running.pop(id)["place"]
        self._c.llama_memory_seq_rm(self._memory, place, -1, -1)
        self._places.append(place)

    def step(self) -> dict[int, list[int]]:
        batch, at, last = self._batch, 0, {}
        for id, request in sorted(self._running.items(), key=lambda item: len(item[1]["tokens"]) > 1):
            taken, rest = request["tokens"][: BATCH - at], request["tokens"][BATCH - at :]
            for token in taken:
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, request["length"], 1
                batch.seq_id[at][0], batch.logits[at] = request["place"], 0
                request["length"] += 1
                at += 1
            request["tokens"] = rest
            if taken and not rest:
                batch.logits[at - 1], last[id] = 1, at - 1
        batch.n_tokens = at
        code = self._c.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code}")
        new: dict[int, list[int]] = {}
        for id, row in last.items():
            logits = self._c.llama_get_logits_ith(self._context, row)
            token = int(self._numpy.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())
            self._running[id]["tokens"] = [token]
            new[id] = [token]
        return new


class Lookup:
    """The package's own loop and its prompt lookup."""

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.version = llama_cpp.__version__
        self._llama = llama_cpp.Llama(
            options["model"],
            n_ctx=options["context"] + 8 + options["draft_tokens"],
            n_batch=BATCH,
            n_threads=options["threads"],
            n_threads_batch=options["threads"],
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=options["draft_tokens"]),
            verbose=False,
        )

    def generate(self, prompt: list[int], count: int, came: Callable[[int], None]) -> list[int]:
        self._llama.reset()
        tokens: list[int] = []
        for token in self._llama.generate(prompt, temp=0.0):
            tokens.append(token)
            came(len(tokens))
            if len(tokens) == count:
                break
        return tokens


def load(options: dict[str, Any]) -> Any:
    return Lookup(options) if options["draft_tokens"] else Batches(options)


def _quiet(level: int, text: bytes, data: Any) -> None:
    """Errors alone are worth a place in the log."""
    if level >= 4:
        print(text.decode(errors="replace"), end="")
