"""Whether a row's logits depend on the rows computed with it: tried on this machine when a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretell.kv.cache import Cache
from foretell.models.config import ModelConfig
from foretell.models.llama import LlamaModel
from foretell.models.load import tensor_shapes
from foretell.models.ops import Ops
from foretell.types import Rows, Sampling, Seq

LENGTH = 72  # tokens: more than a tile of keys, rows or lanes anywhere
INNER = 2048  # wide enough that PyTorch would cut a few rows between threads


@torch.inference_mode()
def rows_are_independent(ops: Ops, head_dim: int) -> bool:
    """A one-layer model of random weights computes a text in one pass, in chunks of many sizes, and as the last branch
    of a tree: are the logits equal bit for bit? Takes some tens of milliseconds."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 48,
            "hidden_size": 3 * head_dim,
            "head_dim": head_dim,
            "intermediate_size": INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "max_position_embeddings": LENGTH,
        }
    )
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(config).items()}
    model = LlamaModel(config, weights.__getitem__, ops, stop_ids=frozenset(), max_context=LENGTH, exact=False)
    cache = Cache(3 * LENGTH, 1, LENGTH, reuse=False)
    model.attach(cache, "check")
    tokens = torch.randint(0, 48, (LENGTH,), generator=generator).tolist()
    whole = _computed(model, cache, tokens, [LENGTH])
    sizes = ([1, 2, 3, 5, 8, 9, 15, 16, 13], [41, 31])
    if not all(torch.equal(_computed(model, cache, tokens, chunks), whole) for chunks in sizes):
        return False
    return torch.equal(_branched(model, cache, tokens, 60), whole[60:])


def _computed(model: LlamaModel, cache: Cache, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """[LENGTH, V]: logits of every token, computed in chunks of these sizes."""
    seq = _fresh(cache, tokens)
    logits = []
    for size in chunks:
        cache.reserve(seq, size)
        first = seq.cached
        new = tokens[first : first + size]
        logits.append(_forward(model, cache, seq, new, range(-1, size - 1)))
        cache.commit(seq, range(size))
    cache.release(seq)
    return torch.cat(logits)


def _branched(model: LlamaModel, cache: Cache, tokens: list[int], start: int) -> torch.Tensor:
    """[LENGTH - start, V]: logits of the tokens from start on, every one of which has a sibling before it."""
    seq = _fresh(cache, tokens)
    cache.reserve(seq, start)
    _forward(model, cache, seq, tokens[:start], range(-1, start - 1))
    cache.commit(seq, range(start))
    rows: list[int] = []
    parents: list[int] = []
    branch: list[int] = []
    for position in range(start, len(tokens)):
        parent = branch[-1] if branch else -1
        rows += [(tokens[position] + 1) % 48, tokens[position]]
        parents += [parent, parent]
        branch.append(len(rows) - 1)
    cache.reserve(seq, len(rows))
    logits = _forward(model, cache, seq, rows, parents)[branch]
    cache.release(seq)
    return logits


def _fresh(cache: Cache, tokens: list[int]) -> Seq:
    seq = Seq(0, tokens, len(tokens), Sampling(), 0)
    cache.admit(seq)
    return seq


def _forward(model: LlamaModel, cache: Cache, seq: Seq, tokens: list[int], parents: Sequence[int]) -> torch.Tensor:
    """[len(tokens), V]"""
    return model.forward(Rows.of(seq, tokens, parents, cache.reserved(seq)), cache).logits.clone()
