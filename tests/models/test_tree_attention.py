"""Equality, not closeness: a row's logits are those of plain decoding, whatever is computed with it.

The promise the engine stands on. Every row of prompts in any chunks, of any trees, beside any neighbours, in any slots
is compared bit for bit with the same tokens decoded one a pass.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import kernels
from foretell.models.base import Target
from foretell.models.ops import TorchOps
from foretell.types import Seq
from tests.models.drive import CUDA, NO_TREE, Driver, Tree, make_ops, paths, random_llama

Records = dict[tuple[int, ...], list[Tensor]]  # tokens up to and with a row's -> its logits, each time it was computed

NATIVE = pytest.mark.skipif(kernels.library() is None, reason="no native kernels: there is no C++ compiler here")
BACKENDS = [
    pytest.param("native", torch.bfloat16, id="native-bfloat16", marks=NATIVE),
    pytest.param("native", torch.float32, id="native-float32", marks=NATIVE),
    pytest.param("torch", torch.bfloat16, id="torch-bfloat16"),
    pytest.param("torch", torch.float32, id="torch-float32"),
    pytest.param("torch", torch.float64, id="torch-float64"),
    pytest.param("blocks", torch.bfloat16, id="blocks-bfloat16"),
    pytest.param("blocks", torch.float32, id="blocks-float32"),
    pytest.param("blocks", torch.float64, id="blocks-float64"),
    pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=CUDA),
    pytest.param("cuda", torch.float32, id="cuda-float32", marks=CUDA),
]
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "biased": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "window": {"architecture": "MistralForCausalLM", "sliding_window": 21, "num_key_value_heads": 1},
    "qk_norm": {"architecture": "Qwen3ForCausalLM", "head_dim": 32},
}


def random_tree(rng: random.Random, vocab: int, nodes: int) -> Tree:
    """Siblings may repeat a token, and any earlier node may be the parent."""
    chain = rng.random() < 0.2
    parents = [i - 1 if chain or rng.random() < 0.3 else rng.randrange(-1, i) for i in range(nodes)]
    return [rng.randrange(vocab) for _ in range(nodes)], parents


def random_path(rng: random.Random, tree: Tree) -> list[int]:
    """From below the root to anywhere."""
    path: list[int] = []
    while rng.random() < 0.75:
        children = [i for i, parent in enumerate(tree[1]) if parent == (path[-1] if path else -1)]
        if not children:
            break
        path.append(rng.choice(children))
    return path


def record(records: Records, seq: Seq, chunk: int, tree: Tree, logits: Tensor) -> None:
    """logits: [L, V] of the last rows of the request's (chunk, nodes)."""
    known = tuple(seq.tokens[: seq.cached + chunk])
    prefixes = [known[: len(known) - chunk + 1 + i] for i in range(chunk)]
    prefixes += [known + tuple(tree[0][node] for node in path) for path in paths(tree)]
    for prefix, line in zip(prefixes[len(prefixes) - len(logits) :], logits, strict=True):
        records.setdefault(prefix, []).append(line)


def session(target: Target, prompts: Sequence[int], *, steps: int, seed: int) -> Records:
    """Requests with prompts of these lengths side by side in few slots: random chunks, trees, paths and partners."""
    rng = random.Random(seed)
    driver = Driver(target, slots=3 * max(prompts) + 160, max_seqs=3)
    waiting = [[rng.randrange(target.vocab_size) for _ in range(length)] for length in prompts]
    running: list[Seq] = []
    records: Records = {}
    for _ in range(steps):
        while waiting and len(running) < 3:
            running.append(driver.start(waiting.pop(0)))
        seqs = [seq for seq in running if rng.random() < 0.8] or running[:1]
        tails = [len(seq.tokens) - seq.cached for seq in seqs]
        chunks = [tail if rng.random() < 0.3 else rng.randint(1, min(tail, 40)) for tail in tails]
        trees = [
            random_tree(rng, target.vocab_size, rng.choice((0, 1, 2, 3, 7, 14))) if chunk == tail else NO_TREE
            for chunk, tail in zip(chunks, tails, strict=True)
        ]
        logits = driver.forward(seqs, chunks, trees, every=rng.random() < 0.5)
        for seq, chunk, tree, lines in zip(seqs, chunks, trees, logits, strict=True):
            record(records, seq, chunk, tree, lines)
            driver.commit(seq, chunk, tree, random_path(rng, tree))
            if seq.cached == len(seq.tokens):
                seq.tokens.append(rng.randrange(target.vocab_size))
            if waiting and seq.generated > 6:
                driver.cache.release(seq)
                running.remove(seq)
        driver.cache.check()
    return records


def assert_plain(target: Target, records: Records, *, leaves: int) -> None:
    """Recorded rows equal those of their tokens decoded one a pass: the rows along this many of the longest paths."""
    driver = Driver(target, slots=4096, max_seqs=1, reuse=True)
    ends = [tokens for tokens in records if not any(other[: len(tokens)] == tokens != other for other in records)]
    lasts = random.Random(0).sample(sorted(ends), min(leaves, len(ends)))
    checked = 0
    for tokens in lasts:
        logits = driver.plain(tokens)  # what the prefix cache holds of it was decoded, and checked, before
        for i, line in enumerate(logits, start=len(tokens) - len(logits) + 1):
            for found in records.get(tokens[:i], ()):
                off = (found.double() - line.double()).abs().max()
                assert torch.equal(found, line), f"row {i - 1} is off by {off}"
                checked += 1
    assert checked > 2 * len(lasts)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_rows_are_those_of_plain_decoding(backend: str, dtype: torch.dtype, model: str) -> None:
    target = random_llama(make_ops(backend, dtype), num_hidden_layers=2, **MODELS[model])
    assert_plain(target, session(target, (200, 5, 61, 17, 40, 1), steps=16, seed=len(model)), leaves=20)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_chunks_of_any_size(backend: str, dtype: torch.dtype) -> None:
    target = random_llama(make_ops(backend, dtype), num_hidden_layers=2)
    tokens = random.Random(1).choices(range(target.vocab_size), k=132)
    plain = Driver(target).plain(tokens)
    for size in (2, 3, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 132):
        chunks = [min(size, len(tokens) - start) for start in range(0, len(tokens), size)]
        _, logits = Driver(target).prefill(tokens, chunks)
        assert torch.equal(logits, plain), f"chunks of {size}"


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_the_number_of_threads_does_not_matter(backend: str, dtype: torch.dtype) -> None:
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        target = random_llama(make_ops(backend, dtype, threads), num_hidden_layers=1, intermediate_size=1400)
        found.append(session(target, (90, 5, 3), steps=4, seed=2))
    for tokens, lines in found[0].items():
        assert all(map(torch.equal, lines, found[1][tokens])), f"row {len(tokens) - 1}"
    assert_plain(target, found[1], leaves=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_activations_do_not_depend_on_how_torch_shares_the_work(dtype: torch.dtype) -> None:
    """It cuts large tensors between threads in the middle of a row, and computes the elements at a cut differently."""
    for threads, width in ((2, 1000), (2, 1001), (3, 2048), (5, 2048)):
        torch.set_num_threads(threads)
        x = 3 * torch.randn(67, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
        rows = torch.cat([TorchOps(dtype).swiglu(row[None]) for row in x])
        for count in (33, 40, 47, 67):
            assert torch.equal(TorchOps(dtype).swiglu(x[:count]), rows[:count]), (threads, width, count)
