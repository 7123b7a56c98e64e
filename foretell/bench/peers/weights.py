"""The weights of an opened model, written out as other engines read them: a folder of transformers, or a GGUF file.

Peers are given token ids, so neither has a tokenizer.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

from foretell.models.config import MODEL_TYPES, ModelConfig, inverse_frequencies
from foretell.models.gguf_model import ARCHITECTURES, NAMES
from foretell.models.load import Checkpoint, tensor_shapes

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# How GGUF stores a matrix of a dtype. int8 is llama.cpp's own: blocks of 32 that share a scale.
KINDS = {
    "bfloat16": GGMLQuantizationType.BF16,
    "float16": GGMLQuantizationType.F16,
    "float32": GGMLQuantizationType.F32,
    "int8": GGMLQuantizationType.Q8_0,
}


def written(path: Path, write: Callable[[Path], None]) -> Path:
    """`path`, a file or folder, which `write` makes if it is not there yet: whole, or not at all."""
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            fresh = Path(scratch) / path.name
            write(fresh)
            os.replace(fresh, path)
    except OSError as error:
        raise ValueError(f"the weights cannot be written to {path}: {error}") from error
    return path


def write_folder(checkpoint: Checkpoint, dtype: torch.dtype, folder: Path) -> None:
    """A folder as transformers has it. ValueError if the model cannot be put in its terms."""
    config = _config(checkpoint)
    names = {value: key for key, value in MODEL_TYPES.items()}
    if config.rope_scaling is not None and config.rope_scaling["rope_type"] == "factors":
        raise ValueError("rotary factors of a GGUF file cannot be written as transformers' configuration")
    folder.mkdir()
    values = {
        "architectures": [config.architecture],
        "model_type": names[config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": config.hidden_act,
        "sliding_window": config.windows[0],
        "eos_token_id": list(checkpoint.stop_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if ModelConfig.from_hf(values).__dict__ | {"dtype": None} != config.__dict__ | {"dtype": None}:
        raise ValueError("this model cannot be described as transformers' configuration")
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    tensors = {_prefixed(name): checkpoint.tensor(name).to(dtype).contiguous() for name in tensor_shapes(config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_gguf(checkpoint: Checkpoint, dtype: str, path: Path) -> None:
    """A GGUF file of that dtype, one of KINDS, norms and biases in float32. ValueError if the format lacks a word for
    what the model does."""
    config = _config(checkpoint)
    wide = DTYPES.get(dtype, torch.float32)
    name = "llama" if config.architecture == "MistralForCausalLM" else _key(ARCHITECTURES, config.architecture)
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    theirs = {ours: raw for raw, ours in NAMES.items()}
    heads = {} if "qwen" in name else {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    for ours in tensor_shapes(config):
        tensor = _interleaved(checkpoint.tensor(ours).to(wide).float(), heads.get(ours.split(".")[-2]))
        kind = KINDS[dtype] if tensor.ndim == 2 else GGMLQuantizationType.F32
        if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            raise ValueError(f"rows of {tensor.shape[-1]} do not fit {kind.name}'s blocks: choose another dtype")
        layer, rest = (ours.split(".", 2)[1:]) if ours.startswith("layers.") else (None, ours)
        raw = theirs[rest.rpartition(".")[0]] + "." + rest.rpartition(".")[2]
        data = gguf.quants.quantize(tensor.numpy(), kind)
        writer.add_tensor(raw if layer is None else f"blk.{layer}.{raw}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _config(checkpoint: Checkpoint) -> ModelConfig:
    if checkpoint.config is None:
        raise ValueError("this architecture is not one that can be written out")
    return checkpoint.config


def _prefixed(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


def _key(table: dict[str, str], value: str) -> str:
    return next(key for key, found in table.items() if found == value)


def _interleaved(tensor: Tensor, heads: int | None) -> Tensor:
    """Of q and k, the two halves of every head by turns, as llama.cpp rotates them. heads None: nothing changes."""
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1).transpose(1, 2).reshape(tensor.shape)


def _rope_factors(config: ModelConfig) -> Tensor | None:
    """float32 [head_dim / 2]: what llama.cpp divides the plain frequencies by; None where they are plain."""
    if config.rope_scaling is None:
        return None
    scaled, factor = inverse_frequencies(config)
    if factor != 1.0:
        raise ValueError("rotary embeddings with an attention factor cannot be written as GGUF")
    plain = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    return plain / scaled
