"""The process that a peer runs in: a model loaded once, then questions in and answers out, a line of JSON each.

Run by path with the Python that has the peer, which need not have foretell: this file and those beside it use the
standard library and the peer alone. One line on stdin says what to load:

    {"engine": file beside this one, "module": what it needs, "model": path, "cache": path, "dtype": ..., "threads": n,
     "draft_tokens": 0 or tokens of prompt lookup, "context": tokens, "concurrency": requests at once}

Answered by {"version": ...}, {"missing": module} or {"error": sentence}. Then each line

    {"prompts": [ids, ...], "counts": [n, ...], "concurrency": c}

is answered, greedily and never ended by a stop id, by

    {"seconds": s, "answers": [{"token_ids": ids, "first": tokens of the first round, "first_s": seconds to it,
     "last_s": seconds to the last token}, ...]}

The module of a peer has `load(options)`, which returns an object with `version` and either of

    generate(prompt, count, came) -> ids      one request; it calls came(n) when there are n tokens in all
    start(id, prompt, count), step() -> {id: new tokens}, done(id), clear()     several at once
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print what they like: to the log
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # no file here may pass for a library
    options = json.loads(sys.stdin.readline())

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        engine = _module(options["engine"]).load(options)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == options["module"]:
            say({"missing": error.name})
            return
        say({"error": _sentence(error)})
        raise
    say({"version": engine.version})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(_answer(engine, asked["prompts"], asked["counts"], asked["concurrency"]))
        except Exception as error:
            say({"error": _sentence(error)})
            raise


def _module(name: str) -> Any:
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"foretell_peer_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'it gave no reason'}"[:300]


def _answer(engine: Any, prompts: list[list[int]], counts: list[int], concurrency: int) -> dict[str, Any]:
    clocks = [_Clock() for _ in prompts]
    started = time.perf_counter()
    if hasattr(engine, "generate"):
        for clock, prompt, count in zip(clocks, prompts, counts, strict=True):
            clock.start()
            clock.tokens = engine.generate(prompt, count, clock.came)[:count]
    else:
        _together(engine, prompts, counts, clocks, concurrency)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "answers": [clock.answer() for clock in clocks]}


def _together(engine: Any, prompts: list[list[int]], counts: list[int], clocks: list[_Clock], concurrency: int) -> None:
    """As many requests as may run at once, the next one as soon as one is done."""
    engine.clear()
    waiting = list(range(len(prompts)))
    running: set[int] = set()
    while waiting or running:
        while waiting and len(running) < concurrency:
            i = waiting.pop(0)
            running.add(i)
            clocks[i].start()
            engine.start(i, prompts[i], counts[i])
        for i, tokens in engine.step().items():
            clock = clocks[i]
            clock.tokens = (clock.tokens + tokens)[: counts[i]]
            clock.came(len(clock.tokens))
            if len(clock.tokens) == counts[i]:
                running.remove(i)
                engine.done(i)


class _Clock:
    """When the tokens of one request came."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.first, self.first_s, self.last_s = 0, 0.0, 0.0
        self._started = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def came(self, count: int) -> None:
        if count > 0:
            self.last_s = time.perf_counter() - self._started
            if not self.first:
                self.first, self.first_s = count, self.last_s

    def answer(self) -> dict[str, Any]:
        first = min(self.first, len(self.tokens))
        return {"token_ids": self.tokens, "first": first, "first_s": self.first_s, "last_s": self.last_s}


if __name__ == "__main__":
    main()
