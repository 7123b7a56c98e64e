"""The Llama family: Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2. They differ in biases, q and k norms, and windows.

A decoder of `Ops`; which ones is chosen at construction and nowhere else. Rows may form trees: a row attends to the
committed tokens and to its own path, so the same code runs a prompt chunk, a lone token and a tree of drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from foretell.kv.cache import Cache, Plane
from foretell.machine import give_back_memory
from foretell.models.base import layers_to_run
from foretell.models.config import ModelConfig, inverse_frequencies
from foretell.models.matrix import Matrix, Stacked
from foretell.models.ops import AttentionSpec, Layer, Ops, Runner
from foretell.types import Output, Rows


class LlamaModel:
    """`models.base.Target` for the family. `tensor(name)` is called once for each weight, read and not kept."""

    def __init__(
        self,
        config: ModelConfig,
        tensor: Callable[[str], Matrix],
        ops: Ops,
        *,
        stop_ids: frozenset[int],
        max_context: int,
        exact: bool,
    ) -> None:
        if config.hidden_act not in ("silu", "swish"):
            raise ValueError(f"activation {config.hidden_act!r} is not supported; this family uses 'silu'")
        self.config, self.ops, self.stop_ids, self.exact = config, ops, stop_ids, exact
        self.vocab_size, self.max_context, self.backend = config.vocab_size, max_context, ops.backend
        self.num_layers = config.num_layers
        self._eps = config.rms_eps
        cos, sin = _rope_tables(config, max_context)
        rope = cos.to(ops.device), sin.to(ops.device)
        self._embedding = ops.pack(tensor("embed_tokens.weight"))
        self._layers = [self._layer(i, tensor, rope) for i in range(config.num_layers)]
        self._norm = ops.vector(tensor("norm.weight"))
        self._head = self._embedding if config.tied else ops.pack(tensor("lm_head.weight"))
        self._plane: Plane | None = None
        self._run: Runner | None = None

    def _layer(self, i: int, tensor: Callable[[str], Matrix], rope: tuple[Tensor, Tensor]) -> Layer:
        config, ops = self.config, self.ops
        give_back_memory()  # the pieces that the layer before was read in

        def weights(*names: str) -> object:
            return ops.pack(Stacked([tensor(f"layers.{i}.{name}.weight") for name in names]))

        def biases(present: bool, *names: str) -> Tensor | None:
            return ops.vector(Stacked([tensor(f"layers.{i}.{name}.bias") for name in names])) if present else None

        def norm(name: str) -> Tensor:
            return ops.vector(tensor(f"layers.{i}.{name}.weight"))

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        head_norms = (norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else (None, None)
        sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
        return Layer(
            number=i,
            input_norm=norm("input_layernorm"),
            qkv=weights(*qkv),
            qkv_bias=biases(config.qkv_bias, *qkv),
            o=weights("self_attn.o_proj"),
            o_bias=biases(config.o_bias, "self_attn.o_proj"),
            post_norm=norm("post_attention_layernorm"),
            gate_up=weights(*gate_up),
            gate_up_bias=biases(config.mlp_bias, *gate_up),
            down=weights("mlp.down_proj"),
            down_bias=biases(config.mlp_bias, "mlp.down_proj"),
            attention=AttentionSpec(*sizes, rope, head_norms, self._eps, config.windows[i]),
        )

    def attach(self, cache: Cache, plane: str) -> None:
        config, ops = self.config, self.ops
        sizes = (config.num_layers, config.num_kv_heads, config.head_dim)
        self._plane = cache.add_plane(plane, *sizes, ops.cache_dtype, ops.device)
        self._run = ops.runner()

    def kv_bytes(self) -> int:
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.ops.cache_dtype.itemsize

    def weights(self) -> list[object]:
        """The packed weights of the products of a forward, which reads each of them whole."""
        layers = [weight for layer in self._layers for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return [*layers, self._head]

    def forward(
        self, rows: Rows, cache: Cache, *, taps: Collection[int] = (), layers: Sequence[int] | None = None
    ) -> Output:
        chosen = layers_to_run(layers, self.num_layers)
        assert self._plane is not None and self._run is not None, "attach a cache first"
        self._plane.filled[rows.slots.numpy()] = len(chosen) == self.num_layers
        return self._run(self, rows, cache, chosen, taps)

    def hidden(self, tokens: Tensor, layers: Sequence[int], taps: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """See `models.ops.Decoder`."""
        ops, plane = self.ops, self._plane
        assert plane is not None, "attach a cache first"
        tapped: dict[int, Tensor] = {}
        x = ops.embed(self._embedding, tokens)
        cuts = [n for n, i in enumerate(layers) if i in taps]
        for first, last in zip([0, *cuts], [*cuts, len(layers)], strict=True):
            if first in cuts:
                tapped[layers[first]] = x.clone()
            x = ops.run(x, [self._layers[i] for i in layers[first:last]], plane)
        if len(self._layers) in taps:
            tapped[len(self._layers)] = x.clone()
        return x, tapped

    def logits(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """See `models.ops.Decoder`."""
        return self.ops.linear(self.ops.norm(x, self._norm, self._eps, rows), self._head, None, None)


def _rope_tables(config: ModelConfig, positions: int) -> tuple[Tensor, Tensor]:
    """float32 [positions, head_dim / 2] each: cos and sin of the angles, with the scaling's factor."""
    frequencies, factor = inverse_frequencies(config)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies.float()[None]
    return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()
