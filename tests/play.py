"""A stage: one engine that tests step by hand, with text if they bring a tokenizer, checked after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models

from foretell.drafters.base import Drafter
from foretell.engine.loop import Engine
from foretell.engine.request import Completion, Request
from foretell.kv.cache import Cache
from foretell.models.base import Target
from foretell.models.text import Text
from foretell.planner.fixed import FixedPlanner
from foretell.types import Planner, Sampling, Seq
from foretell.verify import Rule, make_rule
from tests.conftest import make_request

FIRST_ID = 1_000_003  # request ids that no token, position or count could be taken for


class Stage:
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        rule: str | Rule = "match",
        planner: Planner | None = None,
        draft_tokens: int = 6,
        slots: int = 1024,
        max_batch: int = 8,
        max_rows: int = 256,
        reuse: bool = True,
        text: Text | None = None,
    ) -> None:
        self.target, self.drafter, self.text = target, drafter, text
        self.cache = Cache(slots, max_batch, target.max_context, reuse=reuse)
        planner = planner or FixedPlanner(draft_tokens, target.max_context)
        verifier = make_rule(rule) if isinstance(rule, str) else rule
        self.engine = Engine(target, self.cache, drafter, verifier, planner, max_batch=max_batch, max_rows=max_rows)
        self.next_id = FIRST_ID

    def add(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        seq = make_request(self.next_id, prompt, sampling, self.target).seq
        self.next_id += 1
        request = Request(seq, self.text, self.target.max_context)
        self.engine.add(request)
        return request

    def step(self) -> None:
        self.engine.step()
        self.cache.check()

    def finish(self, each: Callable[[], None] = lambda: None, limit: int = 5000) -> None:
        """Step until nobody is left; `each` runs after every step."""
        while self.engine.requests:
            assert limit > 0, "the engine does not get on"
            limit -= 1
            self.step()
            each()

    def preempt(self, seq: Seq) -> None:
        self.engine.scheduler.preempt(seq)
        self.drafter.forget(seq)

    def all(self, prompts: Iterable[Sequence[int]], samplings: Iterable[Sampling]) -> list[Completion]:
        """Those requests together, to their end."""
        requests = [self.add(p, s) for p, s in zip(prompts, samplings, strict=True)]
        self.finish()
        return [request.completion() for request in requests]


def spelled(
    words: Sequence[str], special: Sequence[str] = (), merges: Sequence[tuple[str, str]] = (), **named: str
) -> Text:
    """A byte-level tokenizer whose token i is words[i]; a word of Latin-1 letters may spell single bytes of a
    character (see `spell`). special: further ids without text. merges: pairs of words that encoding joins. named:
    bos_token and the like."""
    vocab = {word: i for i, word in enumerate(words)}
    assert len(vocab) == len(words), "two tokens are spelled alike"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.decoder = decoders.ByteLevel()
    if special:
        tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    return Text(tokenizer, None, named)


def spell(raw: bytes) -> str:
    """Bytes as a byte-level vocabulary spells them (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return "".join(chr(b) if b in plain else chr(256 + rest.index(b)) for b in raw)
