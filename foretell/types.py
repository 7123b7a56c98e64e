"""The narrow waist: the records that pass between the parts of foretell.

Imports torch and numpy only. Notation, project-wide: B requests, N draft nodes, R rows, L rows whose
logits are wanted, D depth, V vocabulary, H hidden size; p is the target, q the draft. Ragged records
are packed (CSR): `indptr[b]:indptr[b + 1]` is the share of request b.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

SEED_LIMIT = 2**64


def tensor(values: Sequence[float], dtype: type[np.generic]) -> Tensor:
    """[N]; a third of the time that torch.tensor takes over a short list, and a step makes a dozen."""
    return torch.from_numpy(np.array(values, dtype=dtype))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled; names and meanings as in vLLM and the OpenAI API. Checked at construction.

    temperature: 0 is greedy. top_k: 0 or -1 keeps all. top_p, min_p: kept mass, kept share of the best
    token's probability. repetition_penalty acts on prompt and output, presence_penalty and
    frequency_penalty on output alone. logit_bias: token id -> added logit. seed: None draws one.
    stop: strings that end the text and are not part of it. stop_token_ids: ids that end it besides the
    model's own. ignore_eos: go on after the model's own stop ids. min_tokens: no stop id or stop string
    before this many tokens. logprobs: number of alternatives reported beside each token (0: the token's
    own alone), log-probabilities of the model before penalties and temperature. draft_tokens: at most
    this many draft nodes a round for this request; 0 is plain decoding. prediction: what the answer will probably be
    like, as text or token ids (OpenAI's predicted outputs): drafted where it fits, of no influence on the answer.
    private: what drafters learn from this request ends with it, and they draft from no other request's text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    draft_tokens: int | None = None
    prediction: str | Sequence[int] | None = None
    private: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        stop_ids, bias_of = self.stop_token_ids or (), self.logit_bias or {}
        if not isinstance(stop, Iterable):
            raise ValueError(f"stop must be a string or a list of them, not {stop!r}")
        if not isinstance(stop_ids, Iterable) or isinstance(stop_ids, str):
            raise ValueError(f"stop_token_ids must be a list of token ids, not {stop_ids!r}")
        if not isinstance(bias_of, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, not be {bias_of!r}")
        stop = tuple(stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(stop_ids))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, not {value!r}")
        for name in ("top_k", "max_tokens", "min_tokens", "seed", "logprobs", "draft_tokens"):
            value = getattr(self, name)
            optional = name in ("seed", "logprobs", "draft_tokens")
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number{' or None' if optional else ''}, not {value!r}")
            if value < 0:
                raise ValueError(f"{name} must not be negative, not {value}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie between 0 and 1, not {self.min_p}")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0 (1 is none), not {self.repetition_penalty}")
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.seed is not None and self.seed >= SEED_LIMIT:
            raise ValueError(f"seed must fit in 64 bits (0 to {SEED_LIMIT - 1}), not {self.seed}")
        if any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop must be a non-empty string or a list of them, not {self.stop!r}")
        if any(isinstance(t, bool) or not isinstance(t, int) for t in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be token ids, not {self.stop_token_ids!r}")
        if self.prediction is not None and not isinstance(self.prediction, str):
            if not isinstance(self.prediction, Iterable) or isinstance(self.prediction, bytes | Mapping):
                raise ValueError(f"prediction must be a text or a list of token ids, not {self.prediction!r}")
            object.__setattr__(self, "prediction", tuple(self.prediction))
        if not isinstance(self.private, bool):
            raise ValueError(f"private must be True or False, not {self.private!r}")
        for token, bias in bias_of.items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValueError(f"logit_bias maps token ids to numbers; {token!r} is not a token id")
            if not isinstance(bias, int | float) or math.isnan(bias) or bias == math.inf:
                raise ValueError(f"logit_bias of token {token} must be a number below infinity, not {bias!r}")

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the tokens before them beyond the model itself."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(slots=True, eq=False)
class Seq:
    """One running request. Written by `engine/commit.py` and the scheduler only."""

    id: int
    tokens: list[int]  # committed; tokens[-1] is the root, whose K and V are not cached yet
    prompt_len: int
    sampling: Sampling
    seed: int  # 64 bits, always set
    stop_ids: frozenset[int] = frozenset()  # the model's own and the request's
    prediction: Sequence[int] = ()  # what may follow the prompt, as the caller says
    cached: int = 0  # the cache holds tokens[:cached]; cached <= len(tokens) - 1
    table: int = -1  # this request's line of the cache's slot table; -1 while it holds none
    rounds: int = 0  # verifications so far
    counts: Tensor | None = None  # float32 [2, V]: times seen in prompt, in output; only if sampling.penalised

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Drawn:
    """The laws that sampled nodes were drawn from; only the rule's own `draw` makes q."""

    q: Tensor  # float64 [M, V]  exactly what was sampled from
    row: Tensor  # int32 [N]     which q; -1: the node was not drawn (a point mass), or it is a rider
    distinct: bool  # siblings were drawn without replacement, in their order


@dataclass(frozen=True, slots=True)
class Drafts:
    """A forest, one tree per request, packed. A chain is a tree.

    The last `riders[b]` entries of a request are no nodes but riders: computed in the same forward and never accepted,
    for the sake of their logits. A rider hangs on the root, a node or a rider; no node hangs on a rider.
    """

    indptr: Tensor  # int32 [B+1]
    tokens: Tensor  # int64 [N]
    parents: Tensor  # int32 [N]  index within the request; -1 is the root; parents[i] < i
    drawn: Drawn | None = None
    riders: Tensor | None = None  # int32 [B]  None: nobody has any
    worth: Tensor | None = None  # float32 [N]  the drafter's own chances of its nodes, likeliest first in each tree
    _trees: list[tuple[list[int], list[int]]] = field(default_factory=list, init=False, repr=False)

    @staticmethod
    def pack(
        trees: Sequence[tuple[Sequence[int], Sequence[int]]],
        drawn: Drawn | None = None,
        riders: Sequence[int] | None = None,
        worth: Sequence[float] | None = None,
    ) -> Drafts:
        """From one (tokens, parents) pair per request, its riders last; riders: how many each has, None is none;
        worth: of all nodes in turn."""
        indptr = [0]
        tokens: list[int] = []
        parents: list[int] = []
        for tree_tokens, tree_parents in trees:
            tokens += tree_tokens
            parents += tree_parents
            indptr.append(len(tokens))
        return Drafts(
            tensor(indptr, np.int32),
            tensor(tokens, np.int64),
            tensor(parents, np.int32),
            drawn,
            tensor(riders, np.int32) if riders is not None and any(riders) else None,
            None if worth is None else tensor(worth, np.float32),
        )

    @staticmethod
    def chains(chains: Sequence[Sequence[int]]) -> Drafts:
        """One chain of tokens per request (empty: no draft)."""
        return Drafts.pack([(chain, range(-1, len(chain) - 1)) for chain in chains])

    def trees(self) -> list[tuple[list[int], list[int]]]:
        """The inverse of `pack`: Python lists for code that walks, made once."""
        if not self._trees:
            ends, tokens, parents = self.indptr.tolist(), self.tokens.tolist(), self.parents.tolist()
            self._trees.extend((tokens[a:b], parents[a:b]) for a, b in zip(ends, ends[1:], strict=False))
        return self._trees

    def sizes(self) -> list[int]:
        """How many nodes and riders each request has."""
        return [len(tokens) for tokens, _ in self.trees()]

    def first(self, counts: Sequence[int]) -> Drafts:
        """Each request's first nodes alone, so many; for drafts with a worth that were not drawn, without riders."""
        assert self.drawn is None and self.riders is None and self.worth is not None, "a draw must not be taken back"
        trees = [(tokens[:n], parents[:n]) for (tokens, parents), n in zip(self.trees(), counts, strict=True)]
        worth, starts = self.worth.tolist(), self.indptr.tolist()
        return Drafts.pack(trees, worth=[w for a, n in zip(starts, counts, strict=False) for w in worth[a : a + n]])

    def ridden(self) -> list[int]:
        """How many riders each request has."""
        return [0] * (len(self.indptr) - 1) if self.riders is None else self.riders.tolist()

    def judged(self) -> Drafts:
        """The nodes alone: what a rule decides about."""
        if self.riders is None:
            return self
        ends, riders = self.indptr.tolist(), self.ridden()
        spans = [range(a, b - n) for a, b, n in zip(ends, ends[1:], riders, strict=False)]
        nodes = torch.tensor([i for span in spans for i in span], dtype=torch.int64)
        lengths = torch.tensor([0, *map(len, spans)])
        drawn = self.drawn and Drawn(self.drawn.q, self.drawn.row[nodes], self.drawn.distinct)
        return Drafts(lengths.cumsum(0).to(torch.int32), self.tokens[nodes], self.parents[nodes], drawn)


@dataclass(frozen=True, slots=True)
class Rows:
    """What a model computes in one pass: one row per query token, packed.

    Row r of request b sees the keys of `positions[r] + 1` tokens in order of position: the first
    `context[b]` slots of the request's line of the slot table, its trail, then the rows on its own path.
    """

    indptr: Tensor  # int32 [B+1]
    tokens: Tensor  # int64 [R]
    positions: Tensor  # int64 [R]  absolute; siblings share one
    parents: Tensor  # int32 [R]  row, within the request, it attends through; -1 is the cache only
    slots: Tensor  # int64 [R]  where its K and V go
    want: Tensor  # int64 [L]  rows whose logits are needed: each ready request's root and nodes, then each one's riders
    tables: Tensor  # int32 [B]  line of the cache's slot table
    context: Tensor  # int32 [B]  how many leading entries of that line are visible
    trail_indptr: Tensor | None = None  # int64 [R+1]  drafters only: what lies between the context and a row of parent
    trail: Tensor | None = None  # int32 [*]  -1: slots of tokens computed in earlier passes but not committed yet

    @staticmethod
    def of(
        seq: Seq, tokens: Sequence[int], parents: Sequence[int], slots: Sequence[int], want: Sequence[int] | None = None
    ) -> Rows:
        """Rows of one request behind its committed tokens. want: None is every row."""
        positions: list[int] = []
        for parent in parents:
            positions.append(seq.cached if parent < 0 else positions[parent] + 1)
        return Rows(
            indptr=tensor([0, len(tokens)], np.int32),
            tokens=tensor(tokens, np.int64),
            positions=tensor(positions, np.int64),
            parents=tensor(parents, np.int32),
            slots=tensor(slots, np.int64),
            want=tensor(range(len(tokens)) if want is None else want, np.int64),
            tables=tensor([seq.table], np.int32),
            context=tensor([seq.cached], np.int32),
        )


@dataclass(frozen=True, slots=True)
class Keys:
    """Where in which request's stream of noise a token is chosen."""

    seed: Sequence[int]  # [M]
    position: Sequence[int]  # [M]  absolute position of the token being chosen
    round: Sequence[int]  # [M]  verification round; ignored by `match`
    temperature: Sequence[float]  # [M]  0: no noise


class Law(Protocol):
    """The target's law at chosen rows, shaped by the request's sampling. Pure: the same rows, the same answer."""

    def __call__(self, rows: Sequence[int]) -> Tensor:
        """rows: [M], row of (root, nodes) packed as in `Rows.want` -> [M, V], log p up to a constant per row;
        -inf where a token cannot be chosen. At temperature 0 the law is a point at the first maximum."""
        ...


@dataclass(frozen=True, slots=True)
class Picks:
    """What `draw` gives a drafter for each of M rows: k tokens, best first."""

    tokens: Tensor  # int64 [M, k]
    score: Tensor  # float64 [M, k]  log q
    q: Tensor | None  # float64 [M, V]  None: point masses


class Draw(Protocol):
    """The half of a rule that a drafter sees."""

    def __call__(self, logits: Tensor, keys: Keys, k: int) -> Picks:
        """logits: [M, V] of the draft, raw; keys: [M]; k: tokens wanted at each row, all different."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target makes of the drafts: every round has exactly one token of the target's own at its end."""

    accepted: list[list[int]]  # [B]  node indices within the request along the accepted path
    next_token: list[int]  # [B]  the target's own token after them


@dataclass(frozen=True, slots=True)
class Output:
    """What a model's forward returns."""

    logits: Tensor  # [L, V]  of rows.want, raw
    taps: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> [R, H], the input of that layer


@dataclass(frozen=True, slots=True)
class Seen:
    """Handed to the drafter after every target forward, prompt chunks included."""

    seqs: Sequence[Seq]  # in the order of rows; already committed
    rows: Rows
    kept: Sequence[Sequence[int]]  # [B]  rows, within the request, that became committed, in path order
    taps: Mapping[int, Tensor]  # layer -> [R, H]
    logits: Tensor  # [L, V]  of rows.want, raw
    judged: Sequence[range]  # [B]  lines of logits: its root, then its nodes; empty while it is in its prompt
    riders: Sequence[range]  # [B]  lines of logits: its riders; they follow the judged lines of all requests


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model takes in memory, in bytes, told before it is loaded."""

    weights: int  # packed, with the tokenizer
    kv: int  # keys and values of one token
    vocab_size: int
    max_context: int = 0  # of the model itself
    position: int = 0  # of a table by position, for each of the context
    row: int = 0  # workspace of a row of a forward
    wanted: int = 0  # of a row whose logits are wanted
    key: int = 0  # of a row, for each token it may see
    seen: int = 0  # of a forward, for each token that its longest request has

    def work(self, rows: int, wanted: int, context: int) -> int:
        """The workspace of the largest forward."""
        return rows * (self.row + self.key * context) + wanted * self.wanted + self.seen * context


@dataclass(frozen=True, slots=True)
class Kept:
    """What a drafter takes in memory beside models and caches, in bytes at most. nodes: drafted a round unless told."""

    fixed: int = 0
    per_request: int = 0
    per_token: int = 0  # of the texts that run, and of those that the cache still holds
    nodes: int = 4
    runs: bool = False  # a model, whose logits it draws from


class Room(Protocol):
    """What the scheduler sees of the cache."""

    @property
    def available(self) -> int:
        """Slots that `reserve` could hand out now."""
        ...

    def admit(self, seq: Seq) -> bool:
        """Give the request a line of the slot table and what of its tokens is cached already; False: none is free."""
        ...

    def reserve(self, seq: Seq, n: int) -> bool:
        """Hold n slots beyond `seq.cached` for the step that comes; False: there are too few, none is held."""
        ...

    def release(self, seq: Seq) -> None:
        """Give back all the request holds; `seq.cached` is 0 after it."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Who takes part in a step. Slots for `chunks[i] + budgets[i]` rows of `seqs[i]` are reserved."""

    seqs: Sequence[Seq]  # in the order of the rows
    chunks: Sequence[int]  # uncached tokens of each to compute
    budgets: Sequence[int]  # draft nodes at most; 0 where the chunk does not end at the root
    admitted: Sequence[Seq] = ()
    preempted: Sequence[Seq] = ()

    @property
    def ready(self) -> list[int]:
        """Indices of the requests whose root is among the rows: they are verified in this step."""
        return [i for i, seq in enumerate(self.seqs) if seq.cached + self.chunks[i] == len(seq.tokens)]


@dataclass(frozen=True, slots=True)
class Round:
    """What a step came to: for the planner, and for the figures."""

    seqs: Sequence[Seq]  # verified in it; committed by now
    asked: Sequence[int]  # [B]  nodes they had room for
    drafted: Sequence[int]  # [B]  nodes, and riders, that were proposed
    drafts: Drafts  # the nodes that were verified
    verdict: Verdict
    rows: int  # of the forward, prompt chunks and riders included
    context: float  # tokens that a row saw, on average
    clock: tuple[float, float, float, float, float]  # started, drafted, computed, committed, learnt from; in seconds

    @property
    def draft_s(self) -> float:
        """In the drafter: guessing, and learning from what came."""
        return self.clock[1] - self.clock[0] + self.clock[4] - self.clock[3]

    @property
    def forward_s(self) -> float:
        return self.clock[2] - self.clock[1]

    @property
    def verify_s(self) -> float:
        return self.clock[3] - self.clock[2]

    @property
    def total_s(self) -> float:
        return self.clock[4] - self.clock[0]


class Planner(Protocol):
    """Decides how much to draft, from earlier rounds, the drafts themselves and the clock.

    prices: what the drafter is told before it drafts, see `Drafter.prices`.
    """

    prices: Sequence[float]

    def budgets(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        """How many draft nodes each request may have in this step, which has so many rows without any."""
        ...

    def trim(self, seqs: Sequence[Seq], drafts: Drafts) -> Drafts:
        """The drafts less what does not pay; seqs: theirs."""
        ...

    def observe(self, round: Round) -> None: ...
