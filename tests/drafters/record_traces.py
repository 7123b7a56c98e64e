"""Makes traces.npz, what test_traces.py plays: greedy answers of the built-in model to prompts of the six kinds of
Spec-Bench, written for this purpose, with the eight likeliest tokens at every place and their logits; and the same
after each token that occurs there by itself, as a warm start has it.

    python -m tests.drafters.record_traces
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from foretell import LLM, Sampling
from foretell.drafters.base import NoDrafter
from foretell.models.top import top_tokens
from foretell.types import Seen

PATH = Path(__file__).with_name("traces.npz")
PROMPTS = {
    "conversation": [
        "Give me five tips for a first job interview, and say for each why it matters.",
        "Write a short blog post about a weekend in the mountains with two dogs.",
    ],
    "translation": [
        "Translate German to English: Der Zug nach Hamburg hat heute leider vierzig Minuten Verspätung, weil ein Baum "
        "auf den Gleisen liegt.",
        "Translate German to English: Die Bibliothek bleibt am Montag geschlossen, damit die neuen Regale aufgebaut "
        "werden können.",
    ],
    "summarization": [
        "Summarize: The town council met on Tuesday to speak about the old swimming pool. The pool was built in 1968 "
        "and has been closed for two years because its pipes leak. Repairing it would cost about three million, a "
        "new one seven. Several parents said that their children have nowhere to learn to swim. The mayor proposed to "
        "repair the pipes first and to ask the county for money. The council will vote on the proposal next month.",
        "Summarize: Bees find their way home by the sun, by landmarks and by smell. When clouds hide the sun they can "
        "still tell where it is from the way the sky's light is polarised. A bee that has found flowers dances in the "
        "hive: the direction of the dance tells the others where to fly, its length how far. Scientists have shown "
        "that bees follow the dance less when they already know a good place.",
    ],
    "question answering": [
        "Who was the first person to walk on the moon, and when?",
        "What is the difference between weather and climate?",
    ],
    "mathematics": [
        "A baker makes 24 rolls an hour and works for 6 hours. He sells the rolls in bags of 8 for 3 dollars each. How "
        "much money does he make? Think step by step.",
        "Anna has 3 times as many stamps as Ben. Together they have 96 stamps. How many stamps has each of them?",
    ],
    "retrieval": [
        "Use the passages to answer.\n\nPassage 1: The Elm bridge was opened in 1911 and rebuilt in 1957 after a "
        "flood. It is 212 metres long.\n\nPassage 2: The Oak bridge, opened in 1923, is the longest of the three "
        "bridges of the town, with 240 metres.\n\nPassage 3: The third bridge carries the railway only.\n\n"
        "Question: Which bridge is the longest, and how long is it?",
        "Use the passages to answer.\n\nPassage 1: Maple syrup is made from the sap of maple trees. About 40 litres of "
        "sap are needed for one litre of syrup.\n\nPassage 2: Sap flows in early spring, when nights are cold and "
        "days are warm.\n\nQuestion: When is sap collected, and how much of it makes a litre of syrup?",
    ],
}
WIDTH = 8


class Recorder(NoDrafter):
    """Keeps the likeliest tokens at the root of every round."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.logits: list[np.ndarray] = []

    def observe(self, seen: Seen) -> None:
        if len(seen.logits):
            top, _ = top_tokens(seen.logits, WIDTH)
            self.tokens.append(top[0])
            self.logits.append(torch.gather(seen.logits, 1, torch.from_numpy(top).long()).numpy()[0])


def main() -> None:
    recorder, arrays = Recorder(), {}
    llm = LLM("smollm2-135m-instruct", drafter=recorder)
    for kind, prompts in PROMPTS.items():
        for i, prompt in enumerate(prompts):
            recorder.__init__()  # type: ignore[misc]
            done = llm.chat([{"role": "user", "content": prompt}], Sampling(temperature=0, max_tokens=128))[0]
            for name, values, dtype in (
                ("prompt", done.prompt_token_ids, np.uint16),
                ("answer", done.token_ids, np.uint16),
                ("top", recorder.tokens, np.uint16),
                ("logits", recorder.logits, np.float16),
            ):
                arrays[f"{kind}/{i}/{name}"] = np.array(values).astype(dtype)
    seen = np.unique(
        np.concatenate([arrays[name] for name in arrays if name.endswith(("prompt", "answer", "top"))], None)
    )
    recorder.__init__()  # type: ignore[misc]
    for token in seen.tolist():
        llm.generate([0, token], Sampling(temperature=0, max_tokens=1))
    arrays |= {"warm/token": seen, "warm/top": np.array(recorder.tokens).astype(np.uint16)}
    arrays["warm/logits"] = np.array(recorder.logits).astype(np.float16)
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
