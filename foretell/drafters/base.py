"""What a drafter is: one method that guesses, and hooks it may use to learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.types import Drafts, Draw, Kept, Seen, Seq

Progress = Callable[[int, int], None]  # done, of how many


class Drafter:
    """Guesses the next tokens of running requests. Whatever it does, it cannot change what is generated."""

    taps: tuple[int, ...] = ()  # target layers whose inputs `observe` wants; asked for only if non-empty
    draft_tokens: int = 16  # nodes a round at most, unless the user asks for another number
    chains: bool = False  # every tree it proposes is a chain
    predicts: bool = False  # it drafts from `Seq.prediction` too
    scored: bool = False  # its drafts have `worth`
    # what the chance of a tree's next node must be for its row to pay, by the number of nodes there are; beyond the
    # end, and where a planner has none, anything pays. Set by the engine before `propose`; only worth a look if scored.
    prices: Sequence[float] = ()
    kept: Kept = Kept()  # the memory it takes; what `LLM` builds by name is told in `drafters.kept`

    def attach(self, cache: Cache) -> None:
        """Called once before anything else; a drafter with keys and values adds its plane here."""

    def warm(self, target: Target, cache: Cache, progress: Progress) -> None:
        """Learn what can be learnt from the target alone, before any request."""

    def reset(self) -> None:
        """Drop what was learnt from requests since `warm`, `load` or `save`. Benchmarks ask for it between two runs."""

    def save(self, folder: Path) -> None:
        """Write down what was learnt so far, each file whole or not at all."""

    def load(self, folder: Path) -> None:
        """Go on with what was saved there, if there is anything that fits."""

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        """At most budget[b] nodes for request b. Fewer is fine; none is plain decoding."""
        raise NotImplementedError

    def observe(self, seen: Seen) -> None:
        """Learn from what the target computed; called after every forward, prompt chunks included."""

    def admit(self, seq: Seq) -> None:
        """The request starts, or comes back after `forget`."""

    def forget(self, seq: Seq) -> None:
        """The request ended or lost its place in the cache: drop all state about it."""

    def shares(self, seq: Seq) -> Mapping[str, tuple[int, int]]:
        """Of a drafter of several members: how many of the request's nodes each member guessed since `admit`, and how
        many of these were accepted. A node may be several members'."""
        return {}


class NoDrafter(Drafter):
    """Plain decoding."""

    draft_tokens = 0
    chains = True

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        return Drafts.chains([[] for _ in seqs])
