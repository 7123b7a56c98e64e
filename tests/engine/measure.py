"""Run a model in a process of its own and print what it took: the base before it, the peak, and what was predicted."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from foretell import LLM, Sampling


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def fill(llm: LLM, tokens: int, penalty: float) -> None:
    """Run so many requests, as many at once as there are places, that the cache is full; draw from their whole law."""
    random_ = random.Random(0)
    batch, slots = llm.memory.max_batch, llm.memory.slots
    each = min(llm.max_context, slots // batch) - 2
    prompts = [[random_.randrange(llm.vocabulary) for _ in range(each - tokens)] for _ in range(batch)]
    more = [[random_.randrange(llm.vocabulary) for _ in range(each - tokens)]] * (slots // each - batch + 1)
    how = [
        Sampling(seed=i, max_tokens=tokens, ignore_eos=True, repetition_penalty=penalty)
        for i in range(len(prompts + more))
    ]
    llm.generate(prompts + more, how)


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(options.pop("torch_threads", 2))
    tokens, penalty = options.pop("tokens", 16), options.pop("penalty", 1.1)
    torch.randn(64, 64) @ torch.randn(64, 64)
    base = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    llm = LLM(**options)
    loaded, load_peak = status("VmRSS") - base, status("VmHWM") - base
    fill(llm, tokens, penalty)
    peak = status("VmHWM") - base
    touched = float((torch.from_numpy(llm.engine.cache.planes["target"].filled).float()).mean())
    measured = {"loaded": loaded, "load_peak": load_peak, "peak": peak, "filled": touched}
    print(json.dumps({"measured": measured, "predicted": llm.memory.as_dict()}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
