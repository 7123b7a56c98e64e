"""Any other causal language model of transformers behind the same `Target`: slower, complete.

Keys and values live in the slots of foretell's cache, as for the others: trees, prefix reuse and rollback work alike.
Each forward runs request by request through transformers: what is visible of the past is gathered into its
`DynamicCache`, a mask says which rows lie on which path, and the new keys and values go back to their slots. What such
a cache cannot hold or roll back is refused at construction, where a small tree is also compared with plain decoding.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.kv.cache import Cache, Plane
from foretell.models.base import layers_to_run
from foretell.models.config import architecture_of
from foretell.models.load import Checkpoint
from foretell.types import Output, Rows


class _Refused(ValueError):
    """A sentence that is complete already."""


class HFModel:
    """`models.base.Target` through transformers. dtype: None is the checkpoint's own, bfloat16 for float16.
    ValueError, in one sentence with the model's name, for whatever cannot be run exactly."""

    exact = False  # transformers' products and attention depend on how many rows they see
    backend = "transformers"
    num_layers = 0  # transformers runs all of them

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype | None, *, threads: int | None, max_context: int | None
    ) -> None:
        name = architecture_of(checkpoint.hf_config or {})
        self._name = f"{checkpoint.folder_or_file}: {name}"
        try:
            self._transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise ValueError(f"{self._name} needs the transformers library: pip install foretell[hf]") from error
        config = self._config(checkpoint)
        self.stop_ids = frozenset(checkpoint.stop_ids)
        self.max_context = self._context(config, max_context)
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = self._load(checkpoint.folder_or_file, config, dtype)
        parameters = inspect.signature(self._model.forward).parameters
        if "position_ids" not in parameters:
            raise self._refuse("takes no position ids, so draft tokens cannot share a position")
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._keeps = "logits_to_keep" in parameters
        self._plane: Plane | None = None
        try:
            self._shape, self.vocab_size = self._probe()
        except _Refused:
            raise
        except Exception as error:  # whatever the model's own code makes of a mask and a cache it does not expect
            raise self._refuse(f"cannot run with foretell's cache ({_line(error)})") from error

    def attach(self, cache: Cache, plane: str) -> None:
        layers, heads, dim = self._shape
        self._plane = cache.add_plane(plane, layers, heads, dim, self._model.dtype)

    def kv_bytes(self) -> int:
        layers, heads, dim = self._shape
        return int(2 * layers * heads * dim * self._model.dtype.itemsize)

    def forward(
        self, rows: Rows, cache: Cache, *, taps: Collection[int] = (), layers: Sequence[int] | None = None
    ) -> Output:
        layers_to_run(layers, self.num_layers)
        assert self._plane is not None, "attach a cache first"
        ends = rows.indptr.tolist()
        logits = torch.empty(len(rows.want), self.vocab_size, dtype=self._model.dtype)
        tapped: dict[int, list[Tensor]] = {layer: [] for layer in taps}
        with self._listening(tapped):
            for b, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
                wanted = ((rows.want >= start) & (rows.want < end)).nonzero()[:, 0]
                logits[wanted] = self._request(rows, cache, b, rows.want[wanted] - start)
        self._plane.filled[rows.slots.numpy()] = True
        return Output(logits, {layer: torch.cat(parts) for layer, parts in tapped.items()})

    def _request(self, rows: Rows, cache: Cache, b: int, keep: Tensor) -> Tensor:
        """One request's rows; keep: [L_b], which of them -> logits [L_b, V]."""
        plane = self._plane
        assert plane is not None
        own = slice(int(rows.indptr[b]), int(rows.indptr[b + 1]))
        past, visible = _visible(rows, cache, b)
        held = self._transformers.DynamicCache()
        if len(past):
            for layer, (k, v) in enumerate(zip(plane.k, plane.v, strict=True)):
                held.update(k[past].transpose(0, 1)[None], v[past].transpose(0, 1)[None], layer)
        mask = torch.zeros(visible.shape, dtype=self._model.dtype)
        mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)
        logits = self._run(rows.tokens[own], rows.positions[own], mask, held, keep)
        for layer, part in enumerate(held.layers):
            plane.k[layer][rows.slots[own]] = part.keys[0, :, len(past) :].transpose(0, 1)
            plane.v[layer][rows.slots[own]] = part.values[0, :, len(past) :].transpose(0, 1)
        return logits

    def _run(self, tokens: Tensor, positions: Tensor, mask: Tensor, held: Any, keep: Tensor) -> Tensor:
        """tokens, positions: [R]; mask: [R, past + R], added to the scores -> logits [len(keep), V]."""
        arguments: dict[str, Any] = {self._cache_argument: held, "use_cache": True}
        if self._keeps:
            arguments["logits_to_keep"] = keep
        out = self._model(
            input_ids=tokens[None], position_ids=positions[None], attention_mask=mask[None, None], **arguments
        )
        logits: Tensor = out.logits[0]
        return logits if self._keeps else logits[keep]

    @contextmanager
    def _listening(self, tapped: dict[int, list[Tensor]]) -> Iterator[None]:
        """Collect the input of the asked layers, the last one's output for the number after it."""
        layers = self._layers() if tapped else []
        if any(not 0 <= layer <= len(layers) for layer in tapped):
            raise ValueError(f"{self._name} has no layers {sorted(tapped)} to tap among its {len(layers)}")

        def before(layer: int) -> Any:
            def note(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
                tapped[layer].append((given[0] if given else named["hidden_states"])[0])

            return note

        def after(module: Any, given: Any, result: Any) -> None:
            tapped[len(layers)].append((result[0] if isinstance(result, tuple) else result)[0])

        with ExitStack() as hooks:
            for layer in tapped:
                if layer < len(layers):
                    handle = layers[layer].register_forward_pre_hook(before(layer), with_kwargs=True)
                else:
                    handle = layers[-1].register_forward_hook(after)
                hooks.callback(handle.remove)
            yield

    def _layers(self) -> list[torch.nn.Module]:
        """The decoder's layers: the first list of as many modules as there are layers with keys and values."""
        for module in self._model.modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == self._shape[0]:
                return list(module)
        return []

    # What can be run, found out at construction

    def _refuse(self, reason: str) -> _Refused:
        return _Refused(f"{self._name} {reason}")

    def _config(self, checkpoint: Checkpoint) -> Any:
        """The configuration, if it is one of a causal language model that transformers knows itself."""
        written = checkpoint.hf_config or {}
        auto = self._transformers.models.auto
        kind = written.get("model_type")
        if kind not in auto.configuration_auto.CONFIG_MAPPING:
            if written.get("auto_map"):
                raise self._refuse("brings code of its own (trust_remote_code), which foretell does not run")
            raise self._refuse(f"is of model_type {kind!r}, which transformers does not know")
        if written.get("quantization_config"):
            raise self._refuse("is quantised: use the original weights or a .gguf file")
        try:
            config = self._transformers.AutoConfig.from_pretrained(checkpoint.folder_or_file, trust_remote_code=False)
        except Exception as error:  # a damaged config.json can raise anything
            raise self._refuse(f"has a config.json that transformers cannot read ({_line(error)})") from error
        if config.is_encoder_decoder:
            raise self._refuse("is an encoder-decoder model; foretell runs decoders only")
        classes = auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        found = classes[type(config)] if type(config) in classes else None
        if found is None or (written.get("architectures") and found.__name__ not in written["architectures"]):
            raise self._refuse("is not a causal language model of transformers")
        if getattr(found, "_is_stateful", False):
            raise self._refuse("keeps a recurrent state, which cannot be rolled back when drafts are rejected")
        return config

    def _context(self, config: Any, asked: int | None) -> int:
        """The tokens a request may have, all of which every layer must see in the same way at every length."""
        most = getattr(config, "max_position_embeddings", None)
        if asked is None and most is None:
            raise self._refuse("does not say how many positions it has: set max_context")
        context = int(asked or most or 0)
        if most is not None and context > most:
            raise ValueError(f"max_context {context} is more than the model's {most} positions")
        if getattr(config, "attention_layers", None):  # GPT-Neo
            raise self._refuse("masks its attention by the order of its keys, which no tree of tokens passes")
        limits: dict[str, int] = {}
        try:
            for layer in self._transformers.DynamicCache(config=config).layers:
                if type(layer).__name__ == "DynamicSlidingWindowLayer":
                    limits["attends in a sliding or chunked window"] = int(layer.sliding_window)
                elif type(layer).__name__ != "DynamicLayer":
                    raise self._refuse(f"has layers whose cache is not plain keys and values ({layer})")
        except (AttributeError, KeyError, TypeError) as error:
            raise self._refuse(f"has layers that transformers has no cache for ({_line(error)})") from error
        rope = getattr(config, "rope_parameters", None) or {}
        for kind in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
            if kind.get("rope_type") in ("dynamic", "longrope"):
                own = kind.get("original_max_position_embeddings")
                limits["turns its positions in another way"] = int(
                    own or getattr(config, "original_max_position_embeddings", None) or most or 1
                )
        for what, limit in limits.items():
            if context > limit:
                raise self._refuse(
                    f"{what} beyond {limit} tokens, which foretell cannot roll back: set max_context to {limit} or less"
                )
        return context

    def _load(self, folder: Path, config: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None:
            dtype = config.dtype or torch.float32
            dtype = torch.bfloat16 if dtype == torch.float16 else dtype
        bars = self._transformers.utils.logging
        shown = bars.is_progress_bar_enabled()
        bars.disable_progress_bar()
        try:
            model, info = self._transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:  # from missing files to missing libraries
            raise self._refuse(f"cannot be loaded by transformers ({_line(error)})") from error
        finally:
            if shown:
                bars.enable_progress_bar()
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(f"{folder}: tensor {missing[0]} is missing")
        return model.eval().requires_grad_(False)

    @torch.inference_mode()
    def _probe(self) -> tuple[tuple[int, int, int], int]:
        """(layers, heads, head_dim) of the keys and values, and V; after a look at whether trees come out right."""
        held = self._transformers.DynamicCache()
        tokens = 1 + torch.arange(4)
        causal = torch.full((4, 4), torch.finfo(self._model.dtype).min, dtype=self._model.dtype).triu(1)
        plain = self._run(tokens, torch.arange(4), causal, held, torch.arange(4))
        shapes = {tuple(part.shape) for layer in held.layers for part in (layer.keys, layer.values)}
        batch, heads, length, dim = next(iter(shapes)) if all(len(s) == 4 for s in shapes) else (0, 0, 0, 0)
        if len(shapes) != 1 or (batch, length) != (1, 4):
            raise self._refuse(f"has keys and values that differ in shape, or an unusual one: {sorted(shapes)}")
        self._shape, self.vocab_size = (len(held.layers), heads, dim), plain.shape[1]
        if len(self._model.get_input_embeddings().weight) < self.vocab_size:
            raise self._refuse("has more outputs than tokens to embed")
        unmasked = self._model(input_ids=tokens[None], use_cache=False).logits[0]
        cache = Cache(8, 1, 8)
        self.attach(cache, "probe")
        # Tokens 1 and 2; then 3 and, under it, 4, between and after siblings that must not be seen.
        self.forward(_rows([1, 2], [0, 1], [-1, 0], [5, 2], 0), cache)
        cache.table[0, :2] = torch.tensor([5, 2])
        tree = self.forward(_rows([4, 3, 1, 4], [2, 2, 3, 3], [-1, -1, 0, 1], [0, 7, 3, 4], 2), cache).logits
        self._plane = None
        tolerance = (0.05 if self._model.dtype.itemsize < 4 else 1e-4) * float(unmasked.max() - unmasked.min())
        for found, wanted in ((plain, unmasked), (tree[[1, 3]], unmasked[2:])):
            if not (found - wanted).abs().max() <= tolerance:
                raise self._refuse("computes something else for a tree of tokens than for a plain text")
        return self._shape, self.vocab_size


def _rows(tokens: list[int], positions: list[int], parents: list[int], slots: list[int], context: int) -> Rows:
    return Rows(
        indptr=torch.tensor([0, len(tokens)], dtype=torch.int32),
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        parents=torch.tensor(parents, dtype=torch.int32),
        slots=torch.tensor(slots),
        want=torch.arange(len(tokens)),
        tables=torch.zeros(1, dtype=torch.int32),
        context=torch.tensor([context], dtype=torch.int32),
    )


def _visible(rows: Rows, cache: Cache, b: int) -> tuple[Tensor, Tensor]:
    """Request b's past, int64 [T] slots (its context, then all that its rows' trails name), and bool [R_b, T + R_b]:
    what each of its rows sees of the past and of the rows."""
    start, end = int(rows.indptr[b]), int(rows.indptr[b + 1])
    context = int(rows.context[b])
    past = cache.table[int(rows.tables[b]), :context].tolist()
    trails: list[list[int]] = [[] for _ in range(start, end)]
    if rows.trail is not None and rows.trail_indptr is not None:
        ends = rows.trail_indptr[start : end + 1].tolist()
        trails = [rows.trail[first:last].tolist() for first, last in zip(ends, ends[1:], strict=False)]
    where = {slot: context + i for i, slot in enumerate(dict.fromkeys(s for trail in trails for s in trail))}
    length = context + len(where)
    visible = np.zeros((end - start, length + end - start), dtype=np.bool_)
    for row, (parent, trail) in enumerate(zip(rows.parents[start:end].tolist(), trails, strict=True)):
        if parent >= 0:
            visible[row] = visible[parent]
        else:
            visible[row, :context] = True
            visible[row, [where[slot] for slot in trail]] = True
        visible[row, length + row] = True
    return torch.tensor([*past, *where], dtype=torch.int64), torch.from_numpy(visible)


def _line(error: Exception) -> str:
    """The first line of an error's text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
