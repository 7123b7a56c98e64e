"""From a model's name to a target that runs and the text side that belongs to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from foretell.machine import give_back_memory
from foretell.models import native
from foretell.models.base import Target
from foretell.models.blocks import BlockOps
from foretell.models.check import rows_are_independent
from foretell.models.config import ModelConfig
from foretell.models.device import CPU, device_of
from foretell.models.hf import HFModel
from foretell.models.hub import resolve
from foretell.models.llama import LlamaModel
from foretell.models.load import Checkpoint, open_checkpoint
from foretell.models.matrix import Matrix, pieces
from foretell.models.ops import Ops, TorchOps
from foretell.models.size import decoder_size, other_size
from foretell.models.text import Text, load_text
from foretell.types import ModelSize

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,  # weights only, a scale for each output channel
}
BACKENDS = ("native", "torch", "blocks")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is found, checked and understood, of which no weight has been read yet. backend: one of
    BACKENDS; they are of the Llama family. size: what it will take."""

    checkpoint: Checkpoint
    text: Text | None
    name: str
    dtype: str
    max_context: int | None
    backend: str
    device: torch.device
    size: ModelSize

    @property
    def context(self) -> int:
        """Tokens of a request: as asked for, or the model's own limit."""
        return self.max_context or self.size.max_context

    def load(self, threads: int | None = None, share: Target | None = None) -> Opened:
        """share: a target whose threads the new one uses too."""
        checkpoint, config, text = self.checkpoint, self.checkpoint.config, self.text
        if config is None:
            other = HFModel(checkpoint, DTYPES.get(self.dtype), threads=threads, max_context=self.max_context)
            parts = [str(checkpoint.hf_config).encode(), *_sizes(checkpoint)]
            return Opened(other, text, self.name, self.dtype, _digest([part] for part in parts))
        chosen = _dtype(checkpoint, self.dtype)
        ops = self._ops(chosen, threads, share)
        exact = rows_are_independent(ops, config.head_dim)
        give_back_memory()
        target = LlamaModel(
            config,
            checkpoint.matrix,
            ops,
            stop_ids=frozenset(checkpoint.stop_ids),
            max_context=self.context,
            exact=exact,
        )
        if isinstance(ops, BlockOps):  # a library chooses its kernel by the shape of the weight, too
            target.exact = exact and ops.even(target.weights())
        opened = Opened(target, text, self.name, str(chosen), _fingerprint(checkpoint, config))
        give_back_memory()
        return opened

    def _ops(self, dtype: torch.dtype, threads: int | None, share: Target | None) -> Ops:
        if self.backend == "blocks":
            return BlockOps(dtype, self.device)
        if self.backend == "torch":
            return TorchOps(dtype)
        pool = share.ops.pool if isinstance(share, LlamaModel) and isinstance(share.ops, native.NativeOps) else None
        return native.NativeOps(dtype, threads, pool)


@dataclass(frozen=True, slots=True)
class Opened:
    """dtype: of the weights as they are computed with. fingerprint: the same for the same weights, whatever the file's
    name and whatever the dtype: what is learnt about a model in one dtype helps to guess what it says in another."""

    target: Target
    text: Text | None
    name: str
    dtype: str
    fingerprint: str


def open_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    threads: int | None = None,
    max_context: int | None = None,
    backend: str = "auto",
    device: str = "cpu",
) -> Opened:
    """`prepare` it and load it."""
    if threads is not None:
        whole("threads", threads, 1)
    return prepare(model, dtype=dtype, max_context=max_context, backend=backend, device=device).load(threads)


def prepare(
    model: str | Path,
    *,
    dtype: str = "auto",
    max_context: int | None = None,
    backend: str = "auto",
    device: str = "cpu",
) -> Prepared:
    """model: a built-in name, a folder, a .gguf file or a hub id. dtype: one of DTYPES or "auto" (the checkpoint's own,
    bfloat16 where it is stored in 16 bits or quantised). backend: "auto" or one of BACKENDS, of which a GPU runs
    "blocks" alone. device: "cuda", or the CPU, which is "auto" too. ValueError, in one sentence, for whatever cannot be
    opened."""
    place = device_of(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    if max_context is not None:
        whole("max_context", max_context, 2)
    checkpoint = open_checkpoint(resolve(model))
    text = load_text(checkpoint)
    name = str(model) if isinstance(model, str) and not Path(model).exists() else checkpoint.folder_or_file.name
    config = checkpoint.config
    tokens = text.tokenizer.get_vocab_size() if text else 0
    if config is None:
        if device == "cuda":
            raise ValueError(
                f"{checkpoint.folder_or_file}: this architecture runs through transformers, on the CPU alone: use "
                "device='cpu'"
            )
        if backend in ("native", "blocks"):
            raise ValueError(f"{checkpoint.folder_or_file}: backend {backend!r} cannot run this architecture")
        if dtype == "int8":
            raise ValueError(f"{checkpoint.folder_or_file}: this architecture runs through transformers, without int8")
        size = other_size(checkpoint, _other_dtype(checkpoint, dtype), tokens)
        return Prepared(checkpoint, text, name, dtype, max_context, "torch", CPU, size)
    if max_context is not None and max_context > config.max_positions:
        raise ValueError(f"max_context {max_context} is more than the model's {config.max_positions} positions")
    chosen = _dtype(checkpoint, dtype)
    runs = _backend(chosen, config.head_dim, backend, place)
    cached = torch.bfloat16 if chosen == torch.int8 else chosen
    size = decoder_size(config, str(chosen).removeprefix("torch."), cached, native=runs == "native", tokens=tokens)
    return Prepared(checkpoint, text, name, dtype, max_context, runs, place, size)


def whole(name: str, value: object, least: int, also: str = "") -> None:
    """ValueError unless value is a whole number of at least `least`; also: what else the sentence offers."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be {also}a whole number of at least {least}, not {value!r}")


def _fingerprint(checkpoint: Checkpoint, config: ModelConfig) -> str:
    last = config.num_layers - 1
    names = ("norm.weight", "layers.0.self_attn.q_proj.weight", f"layers.{last}.mlp.down_proj.weight")
    return _digest([[str(config).encode()], *(_raw(checkpoint.matrix(name)) for name in names)])


def _raw(matrix: Matrix) -> Iterator[memoryview]:
    """The tensor's bytes as float32."""
    return (rows.float().contiguous().numpy().data.cast("B") for _, rows in pieces(matrix))


def _sizes(checkpoint: Checkpoint) -> list[bytes]:
    """Size and time of each file of weights: what stands in for them where reading them takes long."""
    files = sorted(checkpoint.folder_or_file.glob("*.safetensors"))
    return [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode() for file in files]


def _digest(parts: Iterable[Iterable[bytes | memoryview]]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for piece in part:
            digest.update(piece)
        digest.update(b"\0")
    return digest.hexdigest()[:20]


def _dtype(checkpoint: Checkpoint, asked: str) -> torch.dtype:
    if asked != "auto":
        return DTYPES[asked]
    assert checkpoint.config is not None
    if checkpoint.gguf is not None or checkpoint.config.dtype == torch.float16:
        return torch.bfloat16
    return checkpoint.config.dtype


def _other_dtype(checkpoint: Checkpoint, asked: str) -> torch.dtype:
    """What transformers will compute in: see `HFModel`."""
    config = checkpoint.hf_config or {}
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = DTYPES.get(stored if asked == "auto" else asked, torch.float32)
    return torch.bfloat16 if asked == "auto" and dtype == torch.float16 else dtype


def _backend(dtype: torch.dtype, head_dim: int, asked: str, device: torch.device) -> str:
    """One of BACKENDS."""
    if asked not in ("auto", *BACKENDS):
        raise ValueError(f"backend {asked!r} is not one of auto, {', '.join(BACKENDS)}")
    if device.type != "cpu":
        if asked not in ("auto", "blocks"):
            raise ValueError(f"backend {asked!r} runs on the CPU alone: use device='cpu'")
        return "blocks"
    if asked in ("auto", "native") and native.supported(dtype, head_dim):
        return "native"
    if asked == "native":
        raise ValueError(f"the native kernels cannot run {dtype} with heads of {head_dim} on this machine")
    return "torch" if asked == "auto" else asked
