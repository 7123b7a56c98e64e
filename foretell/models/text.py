"""Text to token ids and back: a model's own tokenizer and chat template, and text that grows with its tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from foretell.models.chat import folder_template, render
from foretell.models.files import read_json
from foretell.models.gguf_file import GgufFile
from foretell.models.gguf_tokenizer import build
from foretell.models.load import Checkpoint

Messages = Sequence[Mapping[str, Any]]

_NAMED = ("bos", "eos", "pad", "unk")


class Text:
    """A tokenizer with its chat template.

    special_tokens: "bos_token", "eos_token", "pad_token", "unk_token" -> text, as far as the model has them.
    special_ids: the ids that `decode` skips.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None, special_tokens: Mapping[str, str]) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer = tokenizer
        self.template = template
        self.special_tokens = dict(special_tokens)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with a first token only if the tokenizer itself adds one."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids. Ids without a token (padding of the vocabulary) have no text."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def token(self, id: int) -> str:
        """The token as the vocabulary spells it, for instance "Ġthe"; empty for an id without a token."""
        return self.tokenizer.id_to_token(id) or ""

    def vocab(self) -> list[str]:
        """The spelling of every token by its id."""
        spelling = {i: token for token, i in self.tokenizer.get_vocab(with_added_tokens=True).items()}
        return [spelling.get(i, "") for i in range(max(spelling, default=-1) + 1)]

    def chat(self, messages: Messages, tools: Messages | None = None) -> list[int]:
        """The ids of a conversation up to where the model is to go on, by the model's own chat template.

        messages: as in the OpenAI API. ValueError if there is no template or it does not accept them.
        """
        ids: list[int] = self.tokenizer.encode(self.chat_text(messages, tools), add_special_tokens=False).ids
        return ids

    def chat_text(self, messages: Messages, tools: Messages | None = None) -> str:
        """What `chat` encodes."""
        if self.template is None:
            raise ValueError("the model has no chat template: give it a plain prompt instead of messages")
        return render(self.template, messages, tools, self.special_tokens)


def load_text(checkpoint: Checkpoint) -> Text | None:
    """The checkpoint's text side; None for a folder without a tokenizer. ValueError if it cannot be read."""
    if checkpoint.gguf is not None:
        return _gguf_text(checkpoint.gguf)
    folder = checkpoint.folder_or_file
    path = folder / "tokenizer.json"
    if not path.exists():
        if (folder / "tokenizer.model").exists():
            raise ValueError(f"{folder} has a tokenizer.model but no tokenizer.json, which foretell needs")
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} cannot be read: {error}") from error
    return Text(tokenizer, folder_template(folder), _folder_tokens(folder))


def _folder_tokens(folder: Path) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).exists():
            continue
        for key, value in read_json(folder / name).items():
            spelled = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(spelled, str):
                tokens[key] = spelled
    return tokens


def _gguf_text(file: GgufFile) -> Text:
    tokenizer = build(file)
    spelled: dict[str, str] = {}
    for name in _NAMED:
        key = {"pad": "padding", "unk": "unknown"}.get(name, name)
        i = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        token = tokenizer.id_to_token(i) if isinstance(i, int) and 0 <= i < 2**32 else None
        if token is not None:
            spelled[f"{name}_token"] = token
    template = file.metadata.get("tokenizer.chat_template")
    return Text(tokenizer, template if isinstance(template, str) else None, spelled)


class Detokenizer:
    """Text of a growing list of ids, special tokens skipped, in pieces that never change once given out.

    All pieces together are `Text.decode` of all ids. The work per token does not grow with the text.
    """

    def __init__(self, text: Text) -> None:
        self._given: list[str] = []
        if isinstance(text.tokenizer.decoder, decoders.ByteLevel):
            self._pieces: _Bytes | _Window = _Bytes(text)
        else:
            self._pieces = _Window(text)

    def add(self, ids: Iterable[int]) -> str:
        """The text that these further ids complete; a character whose bytes are not all there yet waits."""
        piece = "".join([self._pieces.add(i) for i in ids])
        self._given.append(piece)
        return piece

    def finish(self) -> str:
        """What was still waiting, once no more ids come."""
        piece = self._pieces.finish()
        self._given.append(piece)
        return piece

    @property
    def text(self) -> str:
        """All pieces given out so far. Joined here, since adding to a long string copies it."""
        self._given = ["".join(self._given)]
        return self._given[0]


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable letter (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; an added one is spelled as it reads."""
    letters = _byte_of_letter()
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:
        return token.encode()


class _Bytes:
    """Byte-level tokens are bytes, so an incremental UTF-8 decoder is all it takes."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, id: int) -> str:
        token = "" if id in self._text.special_ids else self._text.token(id)
        return self._decoder.decode(byte_level_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """Any other tokenizer: decode the newest token behind the one before it, which settles spaces between them."""

    _BYTE = re.compile(r"<0x[0-9A-F]{2}>")
    _MOST = 8  # ids that wait for a replacement character to become something better

    def __init__(self, text: Text) -> None:
        self._text = text
        self._before: list[int] = []  # the last token given out
        self._waiting: list[int] = []

    def add(self, id: int) -> str:
        token = self._text.token(id)
        if not token or id in self._text.special_ids:
            return ""
        self._waiting.append(id)
        # A run of byte tokens is decoded as a whole, valid or not: nothing of it is certain before it ends.
        return "" if self._BYTE.fullmatch(token) else self._take(held=True)

    def finish(self) -> str:
        return self._take(held=False)

    def _take(self, held: bool) -> str:
        if not self._waiting:
            return ""
        old = self._text.decode(self._before)
        new = self._text.decode(self._before + self._waiting)
        if held and new.endswith("\ufffd") and len(self._waiting) < self._MOST:
            return ""
        self._before, self._waiting = self._waiting[-1:], []
        return new[len(old) :]
