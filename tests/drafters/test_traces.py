"""What mixing is for: on recorded answers of all six kinds a mixture has at least its best member's accepted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from foretell.drafters import Parts, build
from foretell.drafters.recycling import TOKEN_BEFORE, WIDTH, RecyclingSource, _of_kind, successors
from foretell.drafters.search import SearchDrafter
from foretell.models.top import top_tokens
from foretell.types import Rows, Sampling, Seen, Seq
from tests.drafters.record_traces import PATH, PROMPTS

V, NODES = 49152, 15
MEMBERS = ("ngram", "suffix", "recycling")
Trace = tuple[list[int], list[int], np.ndarray, np.ndarray]


@cache
def traces(kind: str) -> list[Trace]:
    """prompt, answer, and at each place of the answer the eight likeliest tokens and their logits."""
    with np.load(PATH) as file:
        parts = [[file[f"{kind}/{i}/{name}"] for name in ("prompt", "answer", "top", "logits")] for i in range(2)]
    return [(prompt.tolist(), answer.tolist(), top.astype(np.int64), logits) for prompt, answer, top, logits in parts]


class Spoken:
    """A stand-in for the target's vocabulary: nothing here runs one."""

    vocab_size = V
    num_layers = 0


def drafter(name: str) -> SearchDrafter:
    made = build(name if "+" in name else f"{name}+prediction", Parts(Spoken(), V, None))  # type: ignore[arg-type]
    assert isinstance(made, SearchDrafter)
    source = made.sources.get("recycling")
    if isinstance(source, RecyclingSource):
        tokens, lines = warm()
        source.known.of_token[tokens], source.known.fixed[tokens] = lines, True
    return made


def rounds(search: SearchDrafter, trace: Trace) -> Iterator[int]:
    """Accepted nodes of each round of a greedy run that says what was recorded. Rejected nodes are not computed."""
    prompt, answer, top, logits = trace
    seq = Seq(1, list(prompt), len(prompt), Sampling(temperature=0), 0)
    seq.cached = len(prompt) - 1
    search.admit(seq)
    at = 0
    while at < len(answer):
        room = min(NODES, len(answer) - at - 1)
        tree = search.propose([seq], [room], lambda *_: pytest.fail("nothing is drawn"))
        tokens, parents = tree.trees()[0]
        path: list[int] = []
        while at + len(path) + 1 < len(answer):
            last = path[-1] if path else -1
            pairs = list(zip(parents, tokens, strict=True))
            if (last, answer[at + len(path)]) not in pairs:
                break
            path.append(pairs.index((last, answer[at + len(path)])))
        taken = len(path) + 1
        rows = Rows.of(seq, [seq.tokens[-1], *answer[at : at + len(path)]], range(-1, len(path)), range(taken))
        seq.tokens += answer[at : at + taken]
        seq.cached = len(seq.tokens) - 1
        full = logits_of(top[at : at + taken], logits[at : at + taken])
        search.observe(Seen([seq], rows, [range(taken)], {}, full, [range(taken)], [range(taken, taken)]))
        at += taken
        yield len(path)
    search.forget(seq)


def logits_of(top: np.ndarray, logits: np.ndarray) -> torch.Tensor:
    """[M, V] with nothing but the recorded ones."""
    full = torch.full((len(top), V), -100.0)
    return full.scatter_(1, torch.from_numpy(top.astype(np.int64)), torch.from_numpy(logits).float())


@cache
def warm() -> tuple[np.ndarray, np.ndarray]:
    """The lines of a warm start, of those tokens that occur."""
    with np.load(PATH) as file:
        tokens, top, logits = (file[f"warm/{name}"] for name in ("token", "top", "logits"))
    whole = (logits_of(top[i : i + 64], logits[i : i + 64]) for i in range(0, len(top), 64))
    parts = [successors(*top_tokens(part, WIDTH)) for part in whole]
    return tokens.astype(np.int64), _of_kind(np.concatenate(parts), TOKEN_BEFORE)


def accepted(name: str, kind: str) -> int:
    total = 0
    for trace in traces(kind):
        search = drafter(name)  # nothing is carried from one question to the next
        total += sum(rounds(search, trace))
    return total


@pytest.mark.parametrize("kind", PROMPTS)
def test_the_mixture_accepts_as_much_as_its_best_member(kind: str) -> None:
    alone = {name: accepted(name, kind) for name in MEMBERS}
    mixed = accepted("+".join(MEMBERS), kind)
    assert mixed >= max(alone.values()) > 10, alone


def test_the_traces_are_what_they_say() -> None:
    for kind in PROMPTS:
        for _, answer, top, logits in traces(kind):
            assert top[:, 0].tolist() == answer and (np.diff(logits.astype(float)) <= 0).all()
