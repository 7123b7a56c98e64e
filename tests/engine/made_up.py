"""Models of random weights on disk, large enough that their memory stands out from everything else's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foretell.models.config import ModelConfig
from foretell.models.load import tensor_shapes

LARGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SMALLER = {**LARGE, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}


def write(folder: Path, config: dict[str, Any]) -> Path:
    """A folder of safetensors without a tokenizer."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"model.{name}": (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16)
        for name, shape in tensor_shapes(ModelConfig.from_hf(config)).items()
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
