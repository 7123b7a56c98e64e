"""Runs a target over a cache without the engine, and small models whose weights are made here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.engine.rows import build_rows
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.models.blocks import BlockOps
from foretell.models.config import ModelConfig
from foretell.models.llama import LlamaModel
from foretell.models.load import tensor_shapes
from foretell.models.native import NativeOps
from foretell.models.ops import Ops, TorchOps
from foretell.types import Drafts, Plan, Sampling, Seq

Tree = tuple[list[int], list[int]]  # tokens and parents of a request's nodes
NO_TREE: Tree = ([], [])
CUDA = (pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"))


def make_ops(backend: str, dtype: torch.dtype, threads: int = 1) -> Ops:
    if backend == "native":
        return NativeOps(dtype, threads)
    return (
        TorchOps(dtype) if backend == "torch" else BlockOps(dtype, torch.device("cuda" if backend == "cuda" else "cpu"))
    )


def random_llama(ops: Ops, architecture: str = "LlamaForCausalLM", **settings: Any) -> LlamaModel:
    """Weights of such a size that attention looks far back and every later layer still matters."""
    sizes = {"vocab_size": 72, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 320}
    config = ModelConfig.from_hf({"architectures": [architecture], **sizes, **heads, **settings})
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for name, shape in sorted(tensor_shapes(config).items()):
        spread = 1.0 if "norm" in name else 2 / shape[-1] ** 0.5
        weights[name] = spread * torch.randn(shape, generator=generator)
    return LlamaModel(
        config, weights.__getitem__, ops, stop_ids=frozenset(), max_context=config.max_positions, exact=True
    )


class Driver:
    """A cache of its own for the target, and passes over it by hand."""

    def __init__(self, target: Target, *, slots: int = 1024, max_seqs: int = 8, reuse: bool = False) -> None:
        self.target, self.cache = target, Cache(slots, max_seqs, target.max_context, reuse=reuse)
        self._ids = itertools.count()
        target.attach(self.cache, "target")

    def start(self, tokens: Sequence[int]) -> Seq:
        seq = Seq(next(self._ids), list(tokens), len(tokens), Sampling(), 0)
        assert self.cache.admit(seq)
        return seq

    @torch.inference_mode()
    def forward(
        self, seqs: Sequence[Seq], chunks: Sequence[int], trees: Sequence[Tree], *, every: bool = True
    ) -> list[Tensor]:
        """One pass; [rows, V] for each request: all its rows, or unless `every` its root and nodes alone.
        What it wrote stays uncommitted."""
        for seq, chunk, tree in zip(seqs, chunks, trees, strict=True):
            assert self.cache.reserve(seq, chunk + len(tree[0]))
        plan = Plan(seqs, chunks, [len(tree[0]) for tree in trees])
        drafts = Drafts.pack([trees[i] for i in plan.ready])
        rows = build_rows(plan, drafts, self.cache, self.target.vocab_size)
        counts = [1 + len(trees[i][0]) if i in plan.ready else 0 for i in range(len(seqs))]
        if every:
            rows = replace(rows, want=torch.arange(len(rows.tokens)))
            counts = [chunk + len(tree[0]) for chunk, tree in zip(chunks, trees, strict=True)]
        logits = self.target.forward(rows, self.cache).logits.clone()
        return list(logits.split(counts))

    def commit(self, seq: Seq, chunk: int, tree: Tree = NO_TREE, path: Sequence[int] = ()) -> None:
        """Keep the chunk and the nodes on the path, as the next tokens of the request."""
        self.cache.commit(seq, [*range(chunk), *(chunk + node for node in path)])
        seq.tokens += [tree[0][node] for node in path]

    def prefill(self, tokens: Sequence[int], chunks: Sequence[int]) -> tuple[Seq, Tensor]:
        """The request after passes of these sizes, and the logits [sum of chunks, V] of all its rows."""
        seq = self.start(tokens)
        logits = []
        for chunk in chunks:
            logits += self.forward([seq], [chunk], [NO_TREE])
            self.commit(seq, chunk)
        return seq, torch.cat(logits)

    def plain(self, tokens: Sequence[int]) -> Tensor:
        """[T, V] after each token, one token a pass; those that the prefix cache still holds are left out."""
        seq = self.start(tokens)
        logits = []
        while seq.cached < len(tokens):
            logits += self.forward([seq], [1], [NO_TREE])
            self.commit(seq, 1)
        self.cache.release(seq)
        return torch.cat(logits)


def paths(tree: Tree) -> list[list[int]]:
    """For each node the nodes from below the root down to itself."""
    out: list[list[int]] = []
    for node, parent in enumerate(tree[1]):
        out.append([*(out[parent] if parent >= 0 else []), node])
    return out
