"""Weights from a folder of safetensors or from a GGUF file: one interface, one set of names.

Offers tensors under transformers' names without the leading "model.", a few rows at a time, read from the file
when asked for. Beside `gguf_model`, the only module that knows how checkpoints call them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretell.models.chat import END_TOKENS, end_ids, folder_template, token_ids
from foretell.models.config import SUPPORTED, ModelConfig, architecture_of, inverse_frequencies
from foretell.models.files import read_json
from foretell.models.gguf_file import GgufFile
from foretell.models.gguf_model import GgufModel
from foretell.models.matrix import Stored


@dataclass(frozen=True)
class Checkpoint:
    """An opened model, checked to be complete; no weight has been read yet.

    config is None for a folder whose architecture is not computed natively: then there are no tensors
    here, and `hf_config` says what the folder holds. stop_ids: the ids that end a text of this model.
    """

    folder_or_file: Path
    config: ModelConfig | None
    hf_config: dict[str, Any] | None  # the folder's config.json
    stop_ids: tuple[int, ...]
    gguf: GgufFile | None  # the open file, for its metadata
    shapes: Mapping[str, tuple[int, ...]]  # of every tensor
    read: Callable[[str], Stored]

    def names(self) -> set[str]:
        """The tensors there are, "model." removed."""
        return set(self.shapes)

    def tensor(self, name: str) -> Tensor:
        """One tensor in the checkpoint's own dtype, or float32 if it is stored quantised. ValueError if missing."""
        return self.matrix(name)[:]

    def matrix(self, name: str) -> Stored:
        """The same, read when and as far as it is asked for."""
        if name not in self.shapes:
            raise ValueError(f"{self.folder_or_file}: tensor {name} is missing")
        stored = self.read(name)
        first = stored[:1]
        if not first.is_floating_point() or first.dtype.itemsize < 2:
            raise ValueError(f"{self.folder_or_file}: tensor {name} has dtype {first.dtype}, which is not supported")
        return stored

    def check(self) -> None:
        """ValueError unless every tensor that the configuration asks for is there in the right shape. Reads no data."""
        if self.config is None:
            return
        wanted = tensor_shapes(self.config)
        for name, shape in wanted.items():
            found = self.shapes.get(name)
            if found is None:
                raise ValueError(f"{self.folder_or_file}: tensor {name} is missing")
            if found != shape:
                raise ValueError(
                    f"{self.folder_or_file}: tensor {name} has shape {list(found)}, the configuration asks for "
                    f"{list(shape)}"
                )
        # A GGUF file holds nothing but the model; folders of transformers carry harmless extras.
        extra = self.names() - wanted.keys() if self.gguf else set()
        if extra:
            raise ValueError(f"{self.folder_or_file}: tensor {min(extra)} is not part of the model it describes")
        try:  # last, since only the shapes make sure that the head size is sane
            inverse_frequencies(self.config)
        except ValueError as error:
            raise ValueError(f"{self.folder_or_file}: {error}") from error


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this configuration is made of."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    projections = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    layer["post_attention_layernorm.weight"] = (hidden,)
    for name, (rows, columns, bias) in projections.items():
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (dim,)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder with config.json and safetensors, or a .gguf file, and check that it is complete.

    ValueError, one sentence naming the file, for whatever is missing, damaged or not supported.
    """
    if path.is_dir():
        checkpoint = _open_folder(path)
    else:
        model = GgufModel(path)
        checkpoint = Checkpoint(path, model.config, None, model.stop_ids, model.file, model.shapes, model.read)
    checkpoint.check()
    return checkpoint


def _open_folder(folder: Path) -> Checkpoint:
    source = folder / "config.json"
    hf_config = read_json(source)
    stop_ids = _folder_stop_ids(folder, hf_config)
    if architecture_of(hf_config) not in SUPPORTED:
        none: dict[str, Stored] = {}
        return Checkpoint(folder, None, hf_config, stop_ids, None, {}, none.__getitem__)
    if hf_config.get("quantization_config"):
        raise ValueError(f"{source}: quantised folders are not supported, use the original weights or a .gguf file")
    try:
        config = ModelConfig.from_hf(hf_config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    files = _shards(folder)
    shapes = {name: shard.shape(key) for name, (shard, key) in files.items()}

    def read(name: str) -> Stored:
        shard, key = files[name]
        return Stored(shapes[name], lambda start, stop: shard.rows(key, start, stop))

    if not (hf_config.get("dtype") or hf_config.get("torch_dtype")) and "norm.weight" in files:
        config = replace(config, dtype=read("norm.weight")[:1].dtype)
    return Checkpoint(folder, config, hf_config, stop_ids, None, shapes, read)


class _Shard:
    """An open safetensors file. Opened anew after every STRETCH bytes: the pages of the library's memory map count as
    the process's memory until the map is gone."""

    STRETCH = 8 << 20

    def __init__(self, path: Path) -> None:
        self._path, self._left = path, self.STRETCH
        self._file = _open_safetensors(path)
        self.keys = frozenset(self._file.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        if self._left < 0:
            self._file, self._left = _open_safetensors(self._path), self.STRETCH
        part: Tensor = self._file.get_slice(key)[start:stop]
        self._left -= part.nbytes
        return part


def _shards(folder: Path) -> dict[str, tuple[_Shard, str]]:
    """Name -> safetensors file and the tensor's key in it."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        shard = _Shard(folder / "model.safetensors")
        return {key.removeprefix("model."): (shard, key) for key in shard.keys}
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files")
    opened = {name: _Shard(folder / name) for name in sorted(set(where.values()))}
    for key, name in where.items():
        if key not in opened[name].keys:
            raise ValueError(f"{folder / name} lacks the tensor {key} that {index.name} places there")
    return {key.removeprefix("model."): (opened[name], key) for key, name in where.items()}


def _open_safetensors(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} is missing: a folder needs its weights as safetensors")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error


def _folder_stop_ids(folder: Path, hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = set(token_ids(folder / "config.json", "eos_token_id", hf_config.get("eos_token_id")))
    generation = folder / "generation_config.json"
    if generation.exists():
        ids |= set(token_ids(generation, "eos_token_id", read_json(generation).get("eos_token_id")))
    template, tokenizer = folder_template(folder), folder / "tokenizer.json"
    if template is not None and any(token in template for token in END_TOKENS) and tokenizer.exists():
        added = read_json(tokenizer).get("added_tokens")
        tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
        special = [(str(token.get("content")), token.get("id")) for token in tokens if token.get("special")]
        ids |= set(end_ids(template, ((text, i) for text, i in special if isinstance(i, int))))
    return tuple(sorted(ids))
