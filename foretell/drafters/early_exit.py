"""Self-speculation: some of the target's own layers, its own head, its own keys and values (Draft & Verify, Zhang et
al. 2023, arXiv 2309.08168; LayerSkip, Elhoushi et al. 2024, 2404.16710; SWIFT, Xia et al. 2024, 2410.06916).

What is committed has the keys and values of the whole target. A draft computes the root and its nodes with fewer
layers, on the slots that the verification of the same round overwrites, and so needs no memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from foretell.drafters.grow import Growth
from foretell.drafters.passes import PassDrafter, part_rows
from foretell.models.base import Target, layers_to_run
from foretell.models.files import read_json, write_json
from foretell.types import Seq

PLANE = "target"
CHOICE = "exit.json"  # in the model's folder


@dataclass(frozen=True, slots=True)
class Choice:
    """What suits a model, and how it is kept. draft_tokens: nodes a round at most."""

    layers: tuple[int, ...]
    draft_tokens: int

    @staticmethod
    def default(num_layers: int) -> Choice:
        """The first third of the layers: what is taken where nothing was measured."""
        return Choice(tuple(range(max(1, num_layers // 3))), 3)

    @staticmethod
    def load(path: Path, num_layers: int) -> Choice | None:
        """What was saved there, if it is whole and suits a model of so many layers."""
        try:
            saved = read_json(path)
            layers, draft_tokens = saved["layers"], saved["draft_tokens"]
            if any(type(i) is not int for i in [*layers, draft_tokens]) or draft_tokens < 1:
                return None
            return Choice(tuple(layers_to_run(layers, num_layers)), draft_tokens)
        except (ValueError, KeyError, TypeError):
            return None

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))


class EarlyExitDrafter(PassDrafter):
    """layers: of the target, ascending; range(e) is an exit after the first e, anything else leaves layers out.
    target: the engine's own. vocabulary: ids below it may be proposed. width: chains that start at the root."""

    def __init__(
        self,
        target: Target,
        layers: Sequence[int],
        *,
        draft_tokens: int = 3,
        vocabulary: int | None = None,
        width: int = 1,
    ) -> None:
        super().__init__(target, PLANE, target.vocab_size, vocabulary=vocabulary, width=width)
        self.layers = tuple(layers_to_run(layers, target.num_layers))
        self.draft_tokens = draft_tokens

    def _plant(self, seq: Seq, budget: int) -> Growth:
        """No draft in a request's first round: its prompt would have to be computed for it, and then once more."""
        return super()._plant(seq, budget if seq.rounds else 0)

    def _catch_up(self, grown: Sequence[Growth]) -> Tensor:
        """What lies between the cache and the root, after preemption, is computed by all layers: a draft depends on
        the text alone, not on how much of it happens to be cached. Then the root."""
        for parts, _ in self._stretches(grown, [len(g.seq.tokens) - 1 for g in grown]):
            self.model.forward(part_rows(parts, []), self._cache)
        roots = [self._part(g, len(g.seq.tokens) - 1, len(g.seq.tokens)) for g in grown]
        return self._forward(roots, list(range(len(roots))))
