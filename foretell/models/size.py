"""What a model takes in memory, told from its configuration before any weight is read.

Follows `native`, `ops` and `hf`: a buffer that is added there belongs here too. The tests compare what is told
here with what the process really takes.
"""

from __future__ import annotations

import math

import torch

from foretell.machine import cores
from foretell.models.config import ModelConfig
from foretell.models.load import Checkpoint, tensor_shapes
from foretell.models.native import Layout, layout
from foretell.models.ops import ROWS
from foretell.types import ModelSize

TOKEN = 360  # of a token in a tokenizer, its merge included
# by how weights are stored: bytes of an element, and of each output channel beside its elements
STORED: dict[str, tuple[int, int]] = {
    "bfloat16": (2, 0),
    "float16": (2, 0),
    "float32": (4, 0),
    "float64": (8, 0),
    "int8": (1, 4),
}
PLAIN = Layout(1, 1, 1, halves=False)
STACKED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})  # packed into one matrix
ROW = 800  # of a row in lists and tensors of rows, of its path to the root


def decoder_size(config: ModelConfig, stored: str, dtype: torch.dtype, *, native: bool, tokens: int) -> ModelSize:
    """Of the Llama family. stored: a key of STORED. dtype: of keys and values; of activations too, unless the native
    kernels run. tokens: of its tokenizer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv, item = queries + 2 * keys, dtype.itemsize
    weights = _weights(config, stored, 4 if native else item, layout(getattr(torch, stored)) if native else PLAIN)
    if native:
        row = 4 * (2 * hidden + qkv + queries + 3 * inner) + ROW
        wanted = 4 * (config.vocab_size + 2 * hidden)
        key, seen = 0, 4 * config.num_heads // config.num_kv_heads * cores()
    else:
        wide = 8 if dtype == torch.float64 else 4
        row = item * (4 * hidden + 2 * qkv + 7 * inner) + wide * (3 * hidden + 3 * qkv) + ROW
        wanted = item * (2 * config.vocab_size + hidden) + wide * 3 * hidden
        key, seen = 16, ROWS * (keys * (2 * wide + item) + 3 * wide * config.num_heads)
    return ModelSize(
        weights=weights + TOKEN * tokens,
        kv=2 * config.num_layers * keys * item,
        vocab_size=config.vocab_size,
        max_context=config.max_positions,
        position=4 * config.head_dim,
        row=row,
        wanted=wanted,
        key=key,
        seen=seen,
    )


def _weights(config: ModelConfig, stored: str, norm: int, packed: Layout) -> int:
    """Of all tensors. norm: bytes of an element of a vector. packed: what matrices are padded to."""
    element, channel = STORED[stored]
    total, rows = 0, dict.fromkeys(range(len(STACKED)), 0)
    matrices: list[tuple[int, int]] = []
    for name, shape in tensor_shapes(config).items():
        stack = next((i for i, names in enumerate(STACKED) if name.split(".")[-2] in names), None)
        if len(shape) == 1:
            total += norm * shape[0]
        elif stack is None:
            matrices.append((shape[0], shape[1]))
        else:
            rows[stack] += shape[0]
    layers = config.num_layers
    matrices += [(count // layers, config.hidden_size) for count in rows.values()] * layers
    for out, width in matrices:
        outputs, inputs = (math.ceil(n / of) * of for n, of in ((out, packed.block), (width, packed.whole)))
        total += outputs * (inputs * element + channel)
    return total


def other_size(checkpoint: Checkpoint, dtype: torch.dtype, tokens: int) -> ModelSize:
    """Roughly, of a model that transformers runs: its files in that dtype, and keys, values and mask that are gathered
    anew for each request in turn."""
    config = checkpoint.hf_config or {}
    files = sum(file.stat().st_size for file in checkpoint.folder_or_file.glob("*.safetensors"))
    stored, _ = STORED.get(str(config.get("dtype") or config.get("torch_dtype") or "float32"), (4, 0))

    def number(*names: str) -> int:
        return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)

    hidden, layers = number("hidden_size", "n_embd", "d_model"), number("num_hidden_layers", "n_layer", "num_layers")
    heads = number("num_attention_heads", "n_head", "num_heads") or 1
    shared = number("num_key_value_heads", "num_kv_heads") or heads
    keys, item = shared * (number("head_dim") or hidden // heads), dtype.itemsize
    vocab, inner = number("vocab_size"), number("intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    kv = 2 * layers * keys * item
    return ModelSize(
        weights=files * item // stored + TOKEN * tokens,
        kv=kv,
        vocab_size=vocab,
        max_context=number("max_position_embeddings", "n_positions", "max_seq_len"),
        row=item * (8 * hidden + 4 * inner) + ROW + kv,
        wanted=2 * item * vocab,
        key=(item + 1) + 3 * max(item, 4) * heads,
        seen=kv + 2 * kv // max(layers, 1),
    )
