"""What a checkpoint's configuration says about the model, in one form for all architectures and formats.

Reads the `config.json` of both generations (`rope_theta` with `rope_scaling`, and transformers 5's
`rope_parameters`) and fills gaps with the defaults that transformers itself uses, so that the same
folder means the same model. Knows no file, no tensor name and no layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_QWEN = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# The architectures computed natively, each with the defaults of its transformers configuration class.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "sliding_window": None},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128},
}
SUPPORTED = frozenset(_DEFAULTS)

_MOST_LAYERS = 10_000
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix a decoder's computation; made by `from_hf` or by the GGUF reader."""

    architecture: str  # class name in transformers, one of SUPPORTED
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # with "rope_type"; None: plain rotary embedding
    max_positions: int
    tied: bool  # the head is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm over head_dim on queries and keys, before the rotation
    windows: tuple[int | None, ...]  # [num_layers]  keys seen, the token's own included; None: all
    dtype: torch.dtype  # what the checkpoint's author computes in; float32 for a quantised file
    hidden_act: str

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a `config.json`; ValueError in one sentence if it is incomplete or unsupported."""
        architecture = architecture_of(config)
        if architecture not in _DEFAULTS:
            raise ValueError(f"architecture {architecture} is not one of {', '.join(sorted(SUPPORTED))}")
        merged = {**_DEFAULTS[architecture], **config}
        heads = _count(merged, "num_attention_heads")
        kv_heads = heads if merged.get("num_key_value_heads") is None else _count(merged, "num_key_value_heads")
        hidden = _count(merged, "hidden_size")
        layers = _count(merged, "num_hidden_layers")
        if layers > _MOST_LAYERS:  # a damaged number must not become a list of that length
            raise ValueError(f"num_hidden_layers {layers} is above {_MOST_LAYERS}")
        if merged.get("head_dim") is None and hidden % heads:
            raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = hidden // heads if merged.get("head_dim") is None else _count(merged, "head_dim")
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2:
            raise ValueError(f"head_dim {head_dim} must be even for a rotary embedding")
        llama, qwen2 = architecture == "LlamaForCausalLM", architecture == "Qwen2ForCausalLM"
        attention_bias = bool(merged.get("attention_bias")) and (llama or architecture == "Qwen3ForCausalLM")
        theta, scaling = _rope(merged)
        return ModelConfig(
            architecture=architecture,
            vocab_size=_count(merged, "vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_count(merged, "intermediate_size"),
            rms_eps=_number(merged, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=_count(merged, "max_position_embeddings"),
            tied=bool(merged.get("tie_word_embeddings", False)),
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias,
            mlp_bias=llama and bool(merged.get("mlp_bias")),
            qk_norm=architecture == "Qwen3ForCausalLM",
            windows=_windows(architecture, merged, layers),
            dtype=_dtype(merged),
            hidden_act=str(merged.get("hidden_act", "silu")),
        )


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class name in transformers that a `config.json` asks for ("unknown" if it does not say)."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return MODEL_TYPES.get(str(config.get("model_type")), str(config.get("model_type") or "unknown"))


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key} must be a number above 0, not {value!r}")
    return float(value)


def _count(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be a whole number of at least {least}, not {value!r}")
    return value


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = _DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return dtype


def _windows(architecture: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The window of every layer. Mistral slides everywhere, Qwen from `max_window_layers` on or by `layer_types`."""
    if architecture == "LlamaForCausalLM" or config.get("sliding_window") is None:
        return (None,) * layers
    window = _count(config, "sliding_window")
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    if not config.get("use_sliding_window"):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = _count(config, "max_window_layers", 0)
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types must name the kind of each of the {layers} layers")
    unknown = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
    if unknown is not None:
        raise ValueError(f"layer type {unknown!r} is neither full_attention nor sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """theta, and the scaling with its `rope_type`, or None for the plain kind."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"the rope settings must be a mapping, not {rope!r}")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError("rope_parameters that differ between layer types are not supported")
    theta = _number(config if rope.get("rope_theta") is None else rope, "rope_theta", 10000.0)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {partial!r} is not supported: the whole head must be rotated")
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return theta, None
    rest = {key: value for key, value in rope.items() if key not in ("type", "rope_theta", "partial_rotary_factor")}
    scaling = {**rest, "rope_type": kind}
    if kind in ("llama3", "yarn", "longrope"):
        # The same precedence as transformers: the top level, then the rope settings, then the model's length.
        outer = config.get("original_max_position_embeddings")
        inner = scaling.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        scaling["original_max_position_embeddings"] = inner if outer is None else outer
    return theta, scaling


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """float32 [head_dim / 2] radians a position, and the factor on cos and sin (1 except for yarn).

    The operations and their order are those of transformers, so the numbers are bit-equal to its own.
    ValueError for kinds whose frequencies change with the length of the text, and for unknown ones.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    kind = scaling["rope_type"]
    if kind == "linear":
        return frequencies / _number(scaling, "factor"), 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(config, scaling)
    if kind == "factors":  # llama.cpp stores the divisors themselves
        factors = torch.tensor(scaling["factors"], dtype=torch.float32)
        if factors.shape != frequencies.shape or not bool((factors > 0).all()):
            raise ValueError(f"the rope factors must be {len(frequencies)} numbers above 0")
        return frequencies / factors, 1.0
    raise ValueError(f"rope type {kind!r} is not supported: use a model with default, linear, llama3 or yarn")


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    factor, low, high = (_number(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    length = _number(scaling, "original_max_position_embeddings")
    if high == low:
        raise ValueError("high_freq_factor must differ from low_freq_factor")
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / factor, frequencies)
    smooth = (length / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelengths < length / high) & ~(wavelengths > length / low)
    return torch.where(medium, smoothed, scaled)


def _yarn(config: ModelConfig, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023, https://arxiv.org/abs/2309.00071)."""
    dim, base = config.head_dim, config.rope_theta
    length = _number(scaling, "original_max_position_embeddings")
    factor = _number(scaling, "factor", config.max_positions / length)

    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        all_dim = scaling.get("mscale_all_dim")
        if scaling.get("mscale") and all_dim:
            attention = magnitude(_number(scaling, "mscale")) / magnitude(_number(scaling, "mscale_all_dim"))
        else:
            attention = magnitude()

    def dimension(rotations: float) -> float:
        return (dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(base))

    if base <= 1:
        raise ValueError(f"rope_theta must be above 1 for rope type 'yarn', not {base}")
    low = dimension(_number(scaling, "beta_fast", 32.0))
    high = dimension(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    keep = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers = base ** (torch.arange(0, dim, 2).float() / dim)
    return (1.0 / (factor * powers)) * (1 - keep) + (1.0 / powers) * keep, float(attention)
