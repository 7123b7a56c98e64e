"""The configuration means to us what it means to transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foretell.models.config import SUPPORTED, ModelConfig, architecture_of, inverse_frequencies
from tests.models.small import CLASSES, SMALL


def small(architecture: str = "LlamaForCausalLM", **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SMALL, **more}


def reference(config: dict[str, Any]) -> Any:
    return CLASSES[config["architectures"][0]](**json.loads(json.dumps(config)))


@pytest.mark.parametrize("architecture", sorted(SUPPORTED))
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = {key: value for key, value in small(architecture).items() if key != "num_key_value_heads"}
    config |= {"num_attention_heads": 32, "hidden_size": 1024}
    ours, theirs = ModelConfig.from_hf(config), reference(config)
    assert all(key in config for key in required)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 1024 // 32)
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.hidden_act == theirs.hidden_act


@pytest.mark.parametrize("architecture", sorted(SUPPORTED))
def test_both_generations_of_config_agree(architecture: str) -> None:
    old = small(architecture, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}, torch_dtype="bfloat16")
    new = small(
        architecture,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        dtype="bfloat16",
    )
    saved = json.loads(reference({**old, "architectures": [architecture]}).to_json_string())
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new) == ModelConfig.from_hf(saved)
    assert ModelConfig.from_hf(new).dtype == torch.bfloat16
    assert ModelConfig.from_hf(new).rope_theta == 5e5


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("MistralForCausalLM", {}),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("MistralForCausalLM", {"sliding_window": 8}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen2ForCausalLM", {"sliding_window": 8}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 0}),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
    ],
)
def test_windows_are_those_of_transformers(architecture: str, settings: dict[str, Any]) -> None:
    config = small(architecture, **settings)
    theirs = reference(config)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    wanted = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert ModelConfig.from_hf(config).windows == wanted


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 0.5},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(map(str, rope.values())))
@pytest.mark.parametrize("theta", [10000.0, 1e6, 500000])
def test_scaled_frequencies_are_those_of_transformers(rope: dict[str, Any], theta: float) -> None:
    config = small(head_dim=64, rope_parameters={**rope, "rope_theta": theta})
    frequencies, scaling = inverse_frequencies(ModelConfig.from_hf(config))
    wanted, wanted_scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](reference(config))
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, wanted)
    assert scaling == wanted_scaling


def test_plain_frequencies_are_those_of_transformers() -> None:
    config = small(rope_theta=100000.0)
    frequencies, scaling = inverse_frequencies(ModelConfig.from_hf(config))
    assert torch.equal(frequencies, LlamaRotaryEmbedding(reference(config)).inv_freq)
    assert scaling == 1.0


def test_factors_of_llama_cpp_divide() -> None:
    factors = [1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0, 1.0]
    plain, _ = inverse_frequencies(ModelConfig.from_hf(small()))
    config = ModelConfig.from_hf(small(rope_scaling={"rope_type": "factors", "factors": factors}))
    assert torch.equal(inverse_frequencies(config)[0], plain / torch.tensor(factors))


def test_length_before_scaling_has_transformers_precedence() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = small(rope_scaling=rope, original_max_position_embeddings=128)
    scaling = ModelConfig.from_hf(config).rope_scaling
    assert scaling is not None and scaling["original_max_position_embeddings"] == 128


def test_old_settings_win_over_new_ones_as_in_transformers() -> None:
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    config = small(rope_parameters=new, rope_scaling={"rope_type": "linear", "factor": 2.0})
    wanted, _ = ROPE_INIT_FUNCTIONS["linear"](reference(config))
    assert torch.equal(inverse_frequencies(ModelConfig.from_hf(config))[0], wanted)


def test_biases_and_norms() -> None:
    def flags(architecture: str, **more: Any) -> tuple[bool, ...]:
        config = ModelConfig.from_hf(small(architecture, **more))
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert flags("LlamaForCausalLM") == (False, False, False, False)
    assert flags("LlamaForCausalLM", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags("MistralForCausalLM", attention_bias=True, mlp_bias=True) == (False, False, False, False)
    assert flags("Qwen2ForCausalLM") == (True, False, False, False)
    assert flags("Qwen3ForCausalLM") == (False, False, False, True)
    assert flags("Qwen3ForCausalLM", attention_bias=True) == (True, True, False, True)


def test_architecture_may_be_named_by_model_type() -> None:
    assert architecture_of({"model_type": "qwen2"}) == "Qwen2ForCausalLM"
    assert architecture_of({"model_type": "gemma3"}) == "gemma3"
    assert architecture_of({}) == "unknown"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not one of"),
        ({"vocab_size": None}, "vocab_size must be a whole number"),
        ({"hidden_size": 63}, "not a multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"head_dim": 15}, "must be even"),
        ({"num_hidden_layers": 2**31}, "is above"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rope_theta": -1.0}, "rope_theta must be a number above 0"),
        ({"dtype": "int4"}, "dtype 'int4' is not one of"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "differ between layer types"),
        ({"rope_scaling": [1]}, "must be a mapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["full"]}, "layer_types"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked"] * 4},
            "layer type 'chunked'",
        ),
    ],
)
def test_bad_configurations_say_what_is_wrong(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        ModelConfig.from_hf(small(**change) if "architectures" not in change else {**small(), **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported"),
        ({"rope_type": "linear"}, "factor must be a number"),
        ({"rope_type": "factors", "factors": [1.0]}, "rope factors must be 8 numbers"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}, "must differ"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "rope_theta must be above 1"),
    ],
)
def test_unusable_rope_settings_say_what_is_wrong(rope: dict[str, Any], said: str) -> None:
    config = ModelConfig.from_hf(small(rope_scaling=rope))
    with pytest.raises(ValueError, match=said):
        inverse_frequencies(config)
