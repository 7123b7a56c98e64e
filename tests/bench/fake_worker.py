"""A peer that behaves as $FAKE_PEER says, over the protocol of the real ones; what it is told goes to $FAKE_LOG."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    mode = os.environ["FAKE_PEER"]
    options = json.loads(sys.stdin.readline())
    Path(os.environ["FAKE_LOG"]).write_text(json.dumps(options))
    if mode == "dies at once":
        print("no memory left", file=sys.stderr)
        sys.exit(3)
    say(
        {"missing": {"missing": options["module"]}, "cannot load": {"error": "ValueError: odd"}}.get(mode)
        or {"version": "1.5"}
    )
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        if mode == "hangs" and number:
            time.sleep(60)
        if mode == "crashes" and number == 2:
            print("Traceback\nMemoryError: too much", file=sys.stderr)
            os.abort()
        if mode == "fails" and number:
            say({"error": "ValueError: cannot"})
        elif mode == "babbles" and number:
            print("Hello!", flush=True)
        else:
            say(
                {
                    "seconds": 2.0,
                    "answers": [answer(p, n, mode) for p, n in zip(asked["prompts"], asked["counts"], strict=True)],
                }
            )


def answer(prompt: list[int], count: int, mode: str) -> dict[str, object]:
    tokens = [prompt[0]] * (count - (mode == "is short"))
    return {"token_ids": tokens, "first": 1, "first_s": 0.5, "last_s": 0.5 + 0.25 * (count - 1)}


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


main()
