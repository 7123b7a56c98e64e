"""Two vocabularies side by side: what each id stands for, in bytes, whatever way its tokenizer spells it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from foretell.models.text import Text, byte_level_bytes

Spelling = bytes | str | None  # the bytes of a text's token, the name of a special one, None: no token has this id

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how sentencepiece spells a byte that no piece covers
_SPACE = "▁"  # and how it spells a space


def same_vocabulary(ours: Text, theirs: Text) -> bool:
    """Whether both spell every token alike; a vocabulary padded at its end is fine."""
    return all(a == b for a, b in itertools.zip_longest(ours.vocab(), theirs.vocab(), fillvalue=""))


def spellings(text: Text) -> list[Spelling]:
    """What each id stands for. Two ids may stand for the same bytes, but not for a byte that a piece spells as well:
    the piece is what a text is encoded to."""
    plain = byte_level_bytes if _is_byte_level(text) else _sentencepiece_bytes
    words = text.vocab()
    pieces = set(words)
    added = text.tokenizer.get_added_tokens_decoder()
    spelled: list[Spelling] = []
    for i, word in enumerate(words):
        if i in added:
            spelled.append(word if i in text.special_ids else word.encode())
        elif plain is _sentencepiece_bytes and _repeats_a_piece(word, pieces):
            spelled.append(None)
        else:
            spelled.append(plain(word) or None)
    return spelled


def _is_byte_level(text: Text) -> bool:
    """A decoder's state is its JSON; it may be a sequence of decoders."""
    decoder = text.tokenizer.decoder
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def _sentencepiece_bytes(word: str) -> bytes:
    byte = _BYTE.fullmatch(word)
    return bytes([int(byte[1], 16)]) if byte else word.replace(_SPACE, " ").encode()


def _repeats_a_piece(word: str, pieces: set[str]) -> bool:
    byte = _BYTE.fullmatch(word)
    if byte is None:
        return False
    letter = chr(int(byte[1], 16))
    return letter.isascii() and (_SPACE if letter == " " else letter) in pieces


def shared_ids(ours: list[Spelling], theirs: list[Spelling]) -> dict[int, int]:
    """Our id -> theirs, of the tokens that both have: the same bytes, or a special token of the same name. One to one:
    of several ids for the same, the lowest."""
    first: dict[bytes | str, int] = {}
    for i, spelling in enumerate(theirs):
        if spelling is not None:
            first.setdefault(spelling, i)
    shared: dict[int, int] = {}
    for i, spelling in enumerate(ours):
        if spelling is not None and spelling in first:
            shared[i] = first.pop(spelling)
    return shared


def special_names(text: Text) -> set[str]:
    return {text.token(i) for i in text.special_ids}


def role_renamer(theirs: Text, ours: Text) -> Callable[[str], str]:
    """A special token's name as the other tokenizer has it: its own if both have it, else, if it ends a text there, the
    name of the token that ends a text here; else it is text like any other."""
    known = special_names(ours)
    end, own_end = theirs.special_tokens.get("eos_token"), ours.special_tokens.get("eos_token")

    def renamed(name: str) -> str:
        return own_end if name not in known and name == end and own_end is not None else name

    return renamed
