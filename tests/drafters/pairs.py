"""Tokenizers that really differ, and models to go with them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from foretell.drafters.reading import SAMPLE, Languages
from foretell.drafters.translate import SharedText, SharedTokens, Translator
from foretell.models.base import Target
from foretell.models.table import TableTarget
from foretell.models.text import Text
from tests.play import spelled

WAYS: dict[str, type[Translator]] = {"shared tokens": SharedTokens, "shared text": SharedText}
LETTERS = "abcdefghijklmnopqrstuvwx"  # the target's tokens, 24 as everywhere in the tests
FEWER = LETTERS[:2] + LETTERS[6:]  # those the draft has too
JOINED = [("a", "b"), ("g", "h"), ("gh", "i"), ("m", "n")]  # and what it has besides


def letters() -> Text:
    """Token i is the i-th letter."""
    return spelled(LETTERS)


def joined_letters() -> Text:
    """20 of them in another order, and runs of two and three."""
    return spelled([*reversed(FEWER), *(a + b for a, b in JOINED)], merges=JOINED)


def letter_drafter(way: str, model: Target | None = None) -> Translator:
    """A draft of the joined letters for a target of the plain ones; model None: a table of its own."""
    draft = joined_letters()
    model = model or TableTarget(len(draft.vocab()), seed=5, max_context=96)
    return WAYS[way](model, Languages.of(letters(), draft, (len(LETTERS), model.vocab_size)))


def permuted(target: TableTarget, order: Sequence[int]) -> TableTarget:
    """The same model, its token i being the target's order[i]."""
    made = TableTarget(len(order), max_context=target.max_context)
    made.table = target.table[:, list(order)][:, :, list(order)]
    return made


def byte_level(size: int, text: str = SAMPLE, special: Sequence[str] = (), **named: str) -> Text:
    """A byte-level BPE trained on a text."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator([text], trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet))
    built.add_special_tokens([AddedToken(word, special=True) for word in special])
    return Text(built, None, named)


def sentencepiece(size: int, text: str = SAMPLE) -> Text:
    """A BPE as Llama 2 has it: ids 0 to 2 are special, then 256 bytes, then pieces with "▁" for a space; it puts <s>
    and a space before a text."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator([text.replace("\n", " ")], trainers.BpeTrainer(vocab_size=size))
    learnt = json.loads(trained.to_str())["model"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    merges = [tuple(merge) for merge in learnt["merges"]]
    vocab = {word: i for i, word in enumerate(words)}
    built = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens([AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>")])
    built.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Text(built, None, {"bos_token": "<s>", "eos_token": "</s>"})
