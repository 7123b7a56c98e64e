"""Run a model in a process of its own and print what it took: after loading, at its peak, and as predicted."""

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


def run(llm: LLM, count: int, length: int, tokens: int) -> None:
    """count requests of random tokens, `length` in all; each draws `tokens` of them, with all that takes memory."""
    chance = random.Random(0)
    prompts = [[chance.randrange(llm.vocabulary) for _ in range(length - tokens)] for _ in range(count)]
    how = [Sampling(seed=i, max_tokens=tokens, ignore_eos=True, repetition_penalty=1.1) for i in range(count)]
    llm.generate(prompts, how)


def main(options: dict[str, Any]) -> None:
    """lengths: of requests that run alone, one after the other, what they add being noted; none: fill the cache."""
    lengths, tokens = options.pop("lengths", []), options.pop("tokens", 32)
    torch.randn(64, 64) @ torch.randn(64, 64)
    base = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    llm = LLM(**options)
    measured: dict[str, Any] = {"loaded": status("VmRSS") - base, "load_peak": status("VmHWM") - base, "added": []}
    for length in lengths:
        before = status("VmRSS")
        run(llm, 1, length, tokens)
        measured["added"].append(status("VmRSS") - before)
    if not lengths:
        each = min(llm.max_context, llm.memory.slots // llm.memory.max_batch)
        run(llm, llm.memory.slots // each + 1, each, tokens)
    measured |= {"peak": status("VmHWM") - base, "written": float(llm.engine.cache.planes["target"].filled.mean())}
    print(json.dumps({"measured": measured, "predicted": llm.memory.as_dict()}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
