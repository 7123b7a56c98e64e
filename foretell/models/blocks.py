"""The operations of a decoder layer in blocks of one shape, for a GPU: every kernel of a forward is chosen once.

A library's kernel sums in an order that depends on the shape, so here no shape depends on what is computed. A pass
takes `BLOCK` rows, padded with its last row again; more rows take several passes, in order: a row sees earlier ones
alone. Attention is a kernel of its own in which each row walks its own keys (`tree_kernel`); without Triton it takes
`ROWS` of them and a tile of keys at a time, tile after tile with a running maximum, so that tiles behind a row's last
key add exactly nothing. What differs between passes is how often that is repeated, and each
such pass is captured once (`models.device.Capture`), over inputs that stay in place, and repeated from then on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kv.cache import Cache, Plane
from foretell.models.device import CPU, Capture, GraphCapture, name_of
from foretell.models.ops import KEYS, ROWS, AttentionSpec, Decoder, Runner, TorchOps, key_slots
from foretell.types import Output, Rows

BLOCK = 64  # rows of a pass: below this, a product on a GPU takes as long as reading its weight
TILE = 256  # keys of a tile on a GPU without Triton, where each costs some twenty launches
KEPT = 32  # passes that stay captured

Found = tuple[Tensor | None, dict[int, Tensor]]  # logits [BLOCK, V] if they were wanted; layer -> [BLOCK, H]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of one pass, on its device. Its first A rows attend and are cached, a multiple of ROWS with all real ones."""

    tokens: Tensor  # int64 [BLOCK]
    positions: Tensor  # int64 [BLOCK]
    slots: Tensor  # int64 [A]
    lengths: Tensor  # int64 [A]  keys that a row sees
    keys: Tensor  # int64 [A, T]  their slots in order of position

    @staticmethod
    def empty(attending: int, width: int, device: torch.device) -> Inputs:
        with torch.inference_mode(False):  # a tensor made in that mode can be written in that mode alone
            shapes = ((BLOCK,), (BLOCK,), (attending,), (attending,), (attending, width))
            return Inputs(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes))

    def fill(self, rows: Rows, first: int, keys: Sequence[np.ndarray]) -> None:
        """With the rows from `first` on, whose keys these are. Rows beyond them are the last one again: it writes the
        same to the same slot. Keys beyond a row's own are its last one: what was never written could hold NaN."""
        attending, width = self.keys.shape
        places = np.minimum(np.arange(BLOCK), len(keys) - 1)
        chosen = torch.from_numpy(first + places)
        padded = np.empty((attending, width), dtype=np.int64)
        for line, place in zip(padded, places.tolist(), strict=False):
            own = keys[place]
            line[: len(own)], line[len(own) :] = own, own[-1]
        self.tokens.copy_(rows.tokens[chosen])
        self.positions.copy_(rows.positions[chosen])
        self.slots.copy_(rows.slots[chosen[:attending]])
        self.lengths.copy_(torch.tensor([len(keys[place]) for place in places[:attending].tolist()]))
        self.keys.copy_(torch.from_numpy(padded))


class BlockOps(TorchOps):
    """`TorchOps` for rows that `BlockRunner` brings, on any device."""

    def __init__(self, dtype: torch.dtype, device: torch.device = CPU) -> None:
        super().__init__(dtype, device)
        on_gpu = device.type == "cuda"
        self.backend = name_of(device) if on_gpu else "blocks"
        self.tile = TILE if on_gpu else KEYS
        self.capture = GraphCapture() if on_gpu else Capture()
        self.kernel = tree_kernel() if on_gpu and self.wide == torch.float32 else None

    def runner(self) -> Runner:
        return BlockRunner(self)

    def start(self, rows: Rows, cache: Cache) -> None:
        raise NotImplementedError("rows come in blocks, through `runner`")

    def use(self, inputs: Inputs) -> None:
        """Compute what is in these from here on."""
        self._positions, self._slots = inputs.positions, inputs.slots
        self._keys, self._lengths = inputs.keys, inputs.lengths

    def even(self, weights: Collection[object]) -> bool:
        """Whether a row comes out the same at every place of a block, bit for bit: tried for every shape of weight."""
        shapes = {self._whole(weight).shape: weight for weight in weights}
        for (_, inputs), weight in shapes.items():
            row = torch.randn(1, inputs, generator=torch.Generator().manual_seed(inputs))
            found = self.linear(row.repeat(BLOCK, 1).to(self.device, self.dtype), weight, None, None)
            if not torch.equal(found, found[:1].expand_as(found)):
                return False
        return True

    def linear(self, x: Tensor, weight: object, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        out = F.linear(x, self._whole(weight), bias)
        return out if residual is None else out + residual

    def swiglu(self, x: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return super().swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def attend(self, qkv: Tensor, layer: int, plane: Plane, spec: AttentionSpec) -> Tensor:
        width = spec.heads * spec.dim
        out = qkv.new_zeros(len(qkv), width)
        if self.kernel is not None:
            cached = plane.k[layer], plane.v[layer]
            self.kernel(qkv, self._keys, self._lengths, cached, out, spec)
            return out
        q = qkv[:, :width].view(len(qkv), spec.kv_heads, -1, spec.dim).to(self.wide) * spec.scale
        for part in range(0, len(self._slots), ROWS):
            rows = slice(part, part + ROWS)
            out[rows] = self._attended(q[rows], rows, plane.k[layer], plane.v[layer], spec.window).flatten(1)
        return out

    def _attended(self, q: Tensor, rows: slice, k: Tensor, v: Tensor, window: int) -> Tensor:
        """q: [ROWS, kv, group, dim], scaled; k, v: [slots, kv, dim] -> as q."""
        lengths, time = self._lengths[rows, None], torch.arange(self.tile, device=q.device)
        # finite, so that tiles before a window change nothing either: nothing is above it, and nothing fades
        most = torch.full_like(q[..., :1], torch.finfo(q.dtype).min)
        total, sums = torch.zeros_like(most), torch.zeros_like(q)
        for start in range(0, self._keys.shape[1], self.tile):
            slots = self._keys[rows, start : start + self.tile].flatten()
            tile_k, tile_v = (
                cached.index_select(0, slots).view(ROWS, self.tile, *cached.shape[1:]).transpose(1, 2).to(self.wide)
                for cached in (k, v)
            )
            visible = time + start < lengths
            if window:
                visible &= time + start >= lengths - window
            scores = (q @ tile_k.transpose(-1, -2)).masked_fill(~visible[:, None, None], float("-inf"))
            top = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights, faded = (scores - top).exp(), (most - top).exp()
            total = total * faded + weights.sum(-1, keepdim=True)
            sums = sums * faded + weights @ tile_v
            most = top
        return (sums / total).to(self.dtype)


def tree_kernel() -> Callable[..., None] | None:
    """`tree_kernel.attend`; None where there is no Triton, which PyTorch brings along on Linux with a GPU."""
    try:
        from foretell.models.tree_kernel import attend
    except ImportError:
        return None
    return attend


class BlockRunner(Runner):
    """Takes rows through a decoder block by block; the results come back to the CPU."""

    def __init__(self, ops: BlockOps) -> None:
        self._blocks = ops
        self._captured: OrderedDict[object, tuple[Inputs, Callable[[], Found]]] = OrderedDict()  # oldest use first

    def __call__(
        self, decoder: Decoder, rows: Rows, cache: Cache, layers: Sequence[int], taps: Collection[int]
    ) -> Output:
        keys, want = key_slots(rows, cache), rows.want
        logits = torch.empty(len(want), decoder.vocab_size, dtype=self._blocks.dtype)
        tapped: dict[int, list[Tensor]] = {}
        for first in range(0, len(keys), BLOCK):
            own = keys[first : first + BLOCK]
            here = ((want >= first) & (want < first + BLOCK)).nonzero()[:, 0]
            found, inner = self._pass(decoder, rows, first, own, (len(here) > 0, tuple(layers), frozenset(taps)))
            if found is not None:
                logits[here] = found[(want[here] - first).to(found.device)].cpu()
            for layer, x in inner.items():
                tapped.setdefault(layer, []).append(x[: len(own)].cpu())
        return Output(logits, {layer: torch.cat(parts) for layer, parts in tapped.items()})

    def _pass(
        self,
        decoder: Decoder,
        rows: Rows,
        first: int,
        keys: Sequence[np.ndarray],
        what: tuple[bool, tuple[int, ...], frozenset[int]],
    ) -> Found:
        """Of the rows from `first` on, whose keys these are. what: are logits wanted, which layers run, which are
        tapped. Valid until the next one."""
        ops = self._blocks
        attending = ROWS * math.ceil(len(keys) / ROWS)
        tiles = math.ceil(max(map(len, keys)) / ops.tile)
        width = ops.tile * (1 << (tiles - 1).bit_length())
        known = self._captured.pop((attending, width, what), None)
        inputs = known[0] if known else Inputs.empty(attending, width, ops.device)
        inputs.fill(rows, first, keys)
        repeat = known[1] if known else ops.capture(lambda: self._compute(decoder, inputs, what))
        self._captured[attending, width, what] = inputs, repeat
        if len(self._captured) > KEPT:
            self._captured.popitem(last=False)
        return repeat()

    def _compute(self, decoder: Decoder, inputs: Inputs, what: tuple[bool, tuple[int, ...], frozenset[int]]) -> Found:
        wanted, layers, taps = what
        self._blocks.use(inputs)
        x, tapped = decoder.hidden(inputs.tokens, layers, taps)
        return decoder.logits(x) if wanted else None, tapped
