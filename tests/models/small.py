"""Sizes of a small model, and transformers' configuration class of every supported architecture."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CLASSES: dict[str, Any] = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
}
