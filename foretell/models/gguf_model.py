"""A GGUF file as a model: llama.cpp's metadata keys, tensor names and layout of q and k, in transformers' terms."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.models.chat import end_ids, token_ids
from foretell.models.config import ModelConfig
from foretell.models.gguf_file import GgufFile
from foretell.models.matrix import Stored

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral3": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # a special token, in tokenizer.ggml.token_type


class GgufModel:
    """config, stop_ids, shapes (by transformers' name, without "model.") and `read` of one file.

    ValueError at construction, in one sentence that names the file, if it is damaged or not supported.
    """

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        architecture = self.file.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise ValueError(f"{path}: GGUF architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
        self._raw_names = {_name(path, raw): raw for raw in self.file.tensors if raw != "rope_freqs.weight"}
        try:
            self.config = _config(self.file, architecture, self._raw_names)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self.stop_ids = _stop_ids(self.file)
        self.shapes = {name: self.file.tensors[raw].shape for name, raw in self._raw_names.items()}
        # llama.cpp interleaves the halves of every rotated head, except for the architectures named here.
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        self._interleaved: Mapping[str, int] = {} if "qwen" in architecture else heads

    def read(self, name: str) -> Stored:
        """The tensor in transformers' layout."""
        raw, shape = self._raw_names[name], self.shapes[name]
        heads = self._interleaved.get(name.split(".")[-2])
        if heads is None:
            return Stored(shape, lambda start, stop: self.file.rows(raw, start, stop))
        dim = shape[0] // heads

        def turned(start: int, stop: int) -> Tensor:
            first = start // dim * dim  # whole heads
            rows = self.file.rows(raw, first, -(-stop // dim) * dim)
            swapped = rows.reshape(len(rows) // dim, dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
            return swapped[start - first : stop - first]

        return Stored(shape, turned)


def _name(path: Path, raw: str) -> str:
    match = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.(weight|bias)", raw)
    if match is None or match[3] not in NAMES:
        raise ValueError(f"{path}: tensor {raw!r} belongs to no known model")
    return (f"layers.{match[2]}." if match[1] else "") + f"{NAMES[match[3]]}.{match[4]}"


def _config(file: GgufFile, architecture: str, names: Mapping[str, str]) -> ModelConfig:
    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.{key}", default)

    if get("expert_count", 0) or get("attention.temperature_scale", 0):
        raise ValueError("mixtures of experts and models with attention temperature are not supported")
    hf = {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": get("vocab_size", len(file.strings("tokenizer.ggml.tokens"))),
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "intermediate_size": get("feed_forward_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope(file, get),
        "sliding_window": None,  # llama.cpp gives these architectures none
        "tie_word_embeddings": "lm_head.weight" not in names,
    }
    if architecture == "qwen3" and hf["head_dim"] is None:
        raise ValueError("attention.key_length is missing")
    config = ModelConfig.from_hf(hf)
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        if get(key, config.head_dim) != config.head_dim:
            raise ValueError(f"{key} {get(key)} differs from the head size {config.head_dim}, which is not supported")
    embedding = names.get("embed_tokens.weight")
    dtype = torch.float32 if embedding is None else file.dtype(embedding)
    first = {name.removeprefix("layers.0.") for name in names}
    return replace(
        config,
        qkv_bias="self_attn.q_proj.bias" in first,
        o_bias="self_attn.o_proj.bias" in first,
        mlp_bias="mlp.gate_proj.bias" in first,
        dtype=dtype,
    )


def _rope(file: GgufFile, get: Callable[..., Any]) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise ValueError(f"rope_freqs.weight together with rope scaling {kind!r} is not supported")
        return {"rope_type": "factors", "factors": file.tensor("rope_freqs.weight").float().flatten().tolist()}
    if kind == "none":
        return None
    if get("rope.scaling.attn_factor", 1.0) != 1.0 or get("rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
        raise ValueError("rope scaling with its own attention factor is not supported")
    keys = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    found = {ours: get(f"rope.scaling.{theirs}") for ours, theirs in keys.items()}
    return {"rope_type": kind} | {key: value for key, value in found.items() if value is not None}


def _stop_ids(file: GgufFile) -> tuple[int, ...]:
    ids: set[int] = set()
    for kind in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{kind}_token_id"
        ids |= set(token_ids(file.path, key, file.metadata.get(key)))
    template, kinds = file.metadata.get("tokenizer.chat_template"), file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(template, str) and isinstance(kinds, list):
        tokens = file.strings("tokenizer.ggml.tokens")
        special = ((tokens[i], i) for i, kind in enumerate(kinds[: len(tokens)]) if kind == _CONTROL)
        ids |= set(end_ids(template, special))
    return tuple(sorted(ids))
