"""A tiny Llama on disk, with a byte-level tokenizer and a chat template: a whole model that loads in a moment."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from foretell.models.config import ModelConfig
from foretell.models.load import tensor_shapes

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 4096


def write_tiny(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, layers: int = 2, idle: Collection[int] = ()
) -> Path:
    """A folder as transformers writes it. Its weights are random, so what it says is noise, and repeats itself.
    idle: layers that add nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": built.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": built.token_to_id("<|im_end|>"),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(tensor_shapes(ModelConfig.from_hf(config)).items()):
        spread = 1.0 if "norm" in name else 2 / shape[-1] ** 0.5
        weights[f"model.{name}"] = spread * torch.randn(shape, generator=generator)
    for i in idle:
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{i}.{name}.weight"].zero_()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        built.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")
