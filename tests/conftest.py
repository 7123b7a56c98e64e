"""Small exact targets, drafters good and bad, and one way to run requests through the engine."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from foretell.drafters.base import Drafter
from foretell.engine.loop import Engine
from foretell.engine.request import Completion, Request
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.models.config import ModelConfig
from foretell.models.llama import LlamaModel
from foretell.models.load import tensor_shapes
from foretell.models.ops import Ops, TorchOps
from foretell.models.table import TableTarget
from foretell.planner.fixed import FixedPlanner
from foretell.types import Drafts, Draw, Planner, Sampling, Seq
from foretell.verify import make_rule

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported: its kernels run on the CPU then

VOCAB = 24
CONTEXT = 96


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """PyTorch's threads spin while they wait for one another: for tiny targets that takes longer than their work, and
    on a machine that others use it takes for ever."""
    torch.set_num_threads(1)


def tiny_llama(
    seed: int = 0, *, layers: int = 2, noise: float = 0.0, vocab: int = VOCAB, ops: Ops | None = None
) -> LlamaModel:
    """A Llama of two layers, float64 by default, weights made here. noise: how far its weights are from those of the
    same seed."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "torch_dtype": "float64",
        }
    )
    generator = torch.Generator().manual_seed(seed)
    other = torch.Generator().manual_seed(seed + 1)
    weights = {}
    for name, shape in sorted(tensor_shapes(config).items()):
        spread = 1.0 if "norm" in name else 4 / shape[-1] ** 0.5
        weights[name] = spread * (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            + noise * torch.randn(shape, generator=other, dtype=torch.float64)
        )
    return LlamaModel(
        config,
        weights.__getitem__,
        ops or TorchOps(torch.float64),
        stop_ids=frozenset({0}),
        max_context=CONTEXT,
        exact=True,
    )


def table_target(seed: int = 0, *, noise: float = 0.0, vocab: int = VOCAB) -> TableTarget:
    target = TableTarget(vocab, seed=seed, max_context=CONTEXT, stop_ids={0})
    if noise:
        target.table = target.table + noise * TableTarget(vocab, seed=seed + 1).table
    return target


class ScriptedDrafter(Drafter):
    """Proposes what a script says follows the tokens so far: script(tokens, budget) -> (tokens, parents)."""

    def __init__(self, script: Callable[[list[int], int], tuple[list[int], list[int]]]) -> None:
        self.script = script

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        return Drafts.pack([self.script(seq.tokens, n) for seq, n in zip(seqs, budget, strict=True)])


class RandomDrafter(Drafter):
    """Random trees of random tokens, of random size up to the budget."""

    def __init__(self, vocab: int = VOCAB, seed: int = 0) -> None:
        self.vocab, self.random = vocab, random.Random(seed)

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        return Drafts.pack([self.tree(seq, n) for seq, n in zip(seqs, budget, strict=True)])

    def tree(self, seq: Seq, budget: int) -> tuple[list[int], list[int]]:
        nodes = self.random.randint(0, budget)
        tokens = [self.random.randrange(self.vocab) for _ in range(nodes)]
        return tokens, [self.random.randrange(-1, i) for i in range(nodes)]


class RidingDrafter(RandomDrafter):
    """Random trees, of which some of the last entries are riders."""

    def propose(self, seqs: Sequence[Seq], budget: Sequence[int], draw: Draw) -> Drafts:
        trees = [self.tree(seq, n) for seq, n in zip(seqs, budget, strict=True)]
        return Drafts.pack(trees, riders=[self.random.randint(0, len(tokens)) for tokens, _ in trees])


class HostileDrafter(RandomDrafter):
    """Knows what comes and misuses it: drops nodes by their value, repeats them, proposes the right token under the
    wrong parent, garbage, and long paths of what was said before."""

    def __init__(self, known: Sequence[Sequence[int]], vocab: int = VOCAB, seed: int = 0) -> None:
        super().__init__(vocab, seed)
        self.known = known

    def tree(self, seq: Seq, budget: int) -> tuple[list[int], list[int]]:
        full = next((k for k in self.known if list(k[: len(seq.tokens)]) == seq.tokens), seq.tokens * 2)
        future = list(full[len(seq.tokens) :])
        tokens: list[int] = []
        parents: list[int] = []
        for token in future:
            if len(tokens) + 2 > budget:
                break
            kind = self.random.random()
            if kind < 0.2:  # dropped by value: even tokens more often
                if token % 2 == 0:
                    break
            elif kind < 0.4:  # twice the same sibling, and a wrong one before it
                parent = len(tokens) - 1
                tokens += [(token + 1) % self.vocab, token]
                parents += [parent, parent]
                continue
            elif kind < 0.5:
                token = self.random.randrange(self.vocab)
            parents.append(self.random.choice([len(tokens) - 1, len(tokens) - 1, -1]))
            tokens.append(token)
        return tokens[:budget], parents[:budget]


class RandomPlanner(FixedPlanner):
    """Another budget for every request in every step, and of what may be trimmed another part."""

    def __init__(self, most: int, max_context: int, seed: int = 0) -> None:
        super().__init__(most, max_context)
        self.random = random.Random(seed)
        self.dropped: dict[int, int] = {}  # request id -> nodes that were trimmed

    def budgets(self, seqs: Sequence[Seq], rows: int) -> list[int]:
        self.prices = [self.random.random() / 10 for _ in range(self.random.randint(0, 5))]
        return [self.random.randint(0, n) for n in super().budgets(seqs, rows)]

    def trim(self, seqs: Sequence[Seq], drafts: Drafts) -> Drafts:
        if drafts.worth is None or drafts.riders is not None:
            return drafts
        sizes = drafts.indptr.diff().tolist()
        counts = [self.random.randint(0, n) for n in sizes]
        for seq, size, count in zip(seqs, sizes, counts, strict=True):
            self.dropped[seq.id] = self.dropped.get(seq.id, 0) + size - count
        return drafts.first(counts)


def make_request(id: int, prompt: Sequence[int], sampling: Sampling, target: Target) -> Request:
    counts = None
    if sampling.penalised:
        counts = torch.zeros(2, target.vocab_size)
        counts[0] += torch.bincount(torch.tensor(prompt), minlength=target.vocab_size)
    stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else target.stop_ids)
    prediction = [t for t in sampling.prediction or () if isinstance(t, int)]
    seq = Seq(id, list(prompt), len(prompt), sampling, sampling.seed or 0, stops, prediction, counts=counts)
    return Request(seq, None, target.max_context)


def run(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    rule: str = "match",
    draft_tokens: int = 6,
    planner: Planner | None = None,
    slots: int = 2048,
    max_batch: int = 8,
    max_rows: int = 256,
    preempt: random.Random | None = None,
    preempt_rate: float = 0.3,
    arrivals: random.Random | None = None,
    reuse: bool = True,
) -> list[Completion]:
    """All requests side by side. preempt: take a random request's place now and then; arrivals: join at random steps.
    The cache's invariants are checked after every step."""
    cache = Cache(slots, max_batch, target.max_context, reuse=reuse)
    planner = planner or FixedPlanner(draft_tokens, target.max_context)
    engine = Engine(target, cache, drafter, make_rule(rule), planner, max_batch=max_batch, max_rows=max_rows)
    requests = [make_request(i, p, s, target) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))]
    waiting = list(requests)
    steps = 0
    while waiting or engine.requests:
        steps += 1
        assert steps < 5000, "the engine does not get on"
        while waiting and (arrivals is None or not engine.requests or arrivals.random() < 0.3):
            engine.add(waiting.pop(0))
        if preempt and engine.scheduler.running and preempt.random() < preempt_rate:
            victim = preempt.choice(engine.scheduler.running)
            engine.scheduler.preempt(victim)
            drafter.forget(victim)
        engine.step()
        cache.check()
    return [request.completion() for request in requests]
