"""A text in one vocabulary, read with the tokenizer of another: what a draft model of another vocabulary works from.

Encoding the text anew after further tokens may change the last tokens of the encoding, and those only. So a reading is
a settled beginning and a tail; a round encodes the tail again, behind a few tokens of context, whatever the length of
the text before it. Nothing here has to be right for the output to be exact: a poor reading makes poor guesses.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from foretell.models.text import Text
from foretell.models.vocabulary import Spelling, role_renamer, shared_ids, special_names, spellings

TAIL = 16  # tokens of the encoding that further text may still change
BEHIND = 16  # tokens of context that the tail is encoded behind
HELD = 128  # a tail longer than this is settled even if the encoding does not agree at the cut
CONTEXT = 64  # characters of the text that an answer is encoded behind
BREAK = "\n"  # what stands for them where the target's tokens do not end between the two

# what models are asked to write, in little: the tokens of both vocabularies are tried on it
SAMPLE = """The quick brown fox doesn't jump over 1,024 lazy dogs; it was walking through the old town on a Sunday
afternoon in March 2019, and nobody noticed. However, there are several reasons why this information could be useful:
1. It helps you to understand the problem.
2. The results were significantly better than expected (approximately 37.5%).

def count_words(lines: list[str]) -> dict[str, int]:
    \"\"\"How often each word occurs.\"\"\"
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        counts[line] = counts.get(line, 0) + 1
    return counts

{"name": "example", "value": [1, 2, 3], "enabled": true, "url": "https://www.example.org/index.html?id=42"}
Dear customer, thank you for your question! Please let me know whether I can help with anything else.
Le président de la République a déclaré hier que les négociations continueront; die Straße ist für Fußgänger gesperrt.
"""


@dataclass(frozen=True, slots=True)
class Languages:
    """Two tokenizers and what each makes of the other's tokens."""

    target: Text
    draft: Text
    sizes: tuple[int, int]  # of the logits of target and draft
    spoken: list[bytes]  # target id -> its bytes as the draft is to read them
    written: list[bytes]  # draft id -> its bytes as the target is to read them; none for what means nothing there
    target_bytes: list[bytes]  # target id -> its bytes
    to_draft: dict[int, int]  # target id -> draft id of the tokens that both have
    part_ids: dict[bytes, int]  # draft ids of what may be a part of a character
    prefix: list[int]  # what the draft's tokenizer puts before a text
    skipped: int | None  # the target's first token that says nothing to the draft

    @staticmethod
    def of(target: Text, draft: Text, sizes: tuple[int, int]) -> Languages:
        """An id beyond the logits, or without a token, stands for nothing."""
        ours, theirs = spellings(target)[: sizes[0]], spellings(draft)[: sizes[1]]
        answers, known = _renamed(theirs, draft, target), special_names(target)
        encoding = draft.tokenizer.encode("a")
        special = [*encoding.special_tokens_mask, 0]
        prefix = encoding.ids[: special.index(0)]
        first = target.special_tokens.get("bos_token", "")
        useless = first not in special_names(draft) or any(draft.token(i) == first for i in prefix)
        return Languages(
            target,
            draft,
            sizes,
            spoken=_as_bytes(_renamed(ours, target, draft)),
            written=_as_bytes([s if s in known or isinstance(s, bytes) else None for s in answers]),
            target_bytes=_as_bytes(ours),
            to_draft=shared_ids(_renamed(ours, target, draft), theirs),
            part_ids={s: i for i, s in reversed(list(enumerate(theirs))) if isinstance(s, bytes) and len(s) < 4},
            prefix=prefix,
            skipped=target.tokenizer.token_to_id(first) if first and useless else None,
        )

    @property
    def shared(self) -> float:
        """The share of tokens of a sample text that both vocabularies have, in the encoding that has fewer of them."""
        theirs = set(self.to_draft.values())
        return min(
            _share(self.target.tokenizer.encode(SAMPLE, add_special_tokens=False).ids, self.to_draft),
            _share(self.draft.tokenizer.encode(SAMPLE, add_special_tokens=False).ids, theirs),
        )


def _share(ids: Sequence[int], known: dict[int, int] | set[int]) -> float:
    return sum(i in known for i in ids) / len(ids) if ids else 0.0


def _renamed(spelled: Sequence[Spelling], speaker: Text, listener: Text) -> list[Spelling]:
    renamed = role_renamer(speaker, listener)
    return [renamed(s) if isinstance(s, str) else s for s in spelled]


def _as_bytes(spelled: Sequence[Spelling]) -> list[bytes]:
    return [s.encode() if isinstance(s, str) else s or b"" for s in spelled]


class Reading:
    """One growing text of the target, as the draft's tokenizer writes it."""

    def __init__(self, languages: Languages) -> None:
        self._languages = languages
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._read = 0  # tokens of the target
        self._settled = 0  # tokens of the draft that no longer change
        self._lead = 0  # tokens of the window's encoding that are settled
        self.window = ""  # the end of the text, from some tokens before the tail on

    @property
    def pending(self) -> bytes:
        """The first bytes of a character that the text has not ended yet."""
        return self._decoder.getstate()[0]

    def read(self, tokens: Sequence[int]) -> tuple[int, list[int], bool]:
        """tokens: the whole text, which only ever grows -> (n, ids, whole): the draft's tokens from its n-th on, the
        earlier ones being as they were. Not whole: it ends within a character whose part the draft has no token for."""
        if self._read == 0 and tokens[0] == self._languages.skipped:
            self._read = 1
        spoken = self._languages.spoken
        raw = b"".join([spoken[t] for t in tokens[self._read :] if t < len(spoken)])
        self._read = len(tokens)
        self.window += self._decoder.decode(raw)
        encoding = self._encode(self.window)
        settled, tail = self._settled, encoding.ids[self._lead :]
        if settled == 0:
            tail = [*self._languages.prefix, *tail]
        tail = [min(t, self._languages.sizes[1] - 1) for t in tail]  # a model may lack its tokenizer's last tokens
        if len(encoding.ids) - self._lead > 2 * TAIL:
            self._settle(encoding, settled + len(tail) - TAIL)
        part = self._part(self.pending)
        return settled, tail + (part or []), part is not None

    def _encode(self, text: str) -> Encoding:
        return self._languages.draft.tokenizer.encode(text, add_special_tokens=False)

    def _settle(self, encoding: Encoding, settled: int) -> None:
        """Let the window begin later: all but TAIL tokens are settled, if they come out the same behind less text."""
        cut = len(encoding.ids) - TAIL
        window = self.window[encoding.offsets[max(0, cut - BEHIND)][0] :]
        ids = self._encode(window).ids
        if ids[-TAIL:] == encoding.ids[cut:] or cut - self._lead > HELD:
            self.window, self._settled, self._lead = window, settled, max(0, len(ids) - TAIL)

    def _part(self, raw: bytes) -> list[int] | None:
        """The draft's tokens of the first bytes of a character, as long ones as there are."""
        ids: list[int] = []
        known = self._languages.part_ids
        while raw:
            end = next((n for n in range(len(raw), 0, -1) if raw[:n] in known), 0)
            if end == 0:
                return None
            ids.append(known[raw[:end]])
            raw = raw[end:]
        return ids

    def answer(self, raw: bytes) -> list[int]:
        """The target's tokens for what the draft says next, those of whole characters: the end of the target's own
        encoding of text and answer, if a token of it begins where the answer does."""
        languages, pending = self._languages, self.pending
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(pending + raw)
        said = raw[: len(raw) - len(decoder.getstate()[0])]
        for context in (self.window[-CONTEXT:], BREAK):
            ids = languages.target.tokenizer.encode(context + text, add_special_tokens=False).ids
            start, left = len(ids), len(said)
            while left > 0 and start > 0:
                start -= 1
                left -= (
                    len(languages.target_bytes[ids[start]]) if ids[start] < len(languages.target_bytes) else left + 1
                )
            if left == 0 and b"".join([languages.target_bytes[i] for i in ids[start:]]) == said:
                return ids[start:]
        return []
