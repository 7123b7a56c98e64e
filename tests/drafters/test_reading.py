"""What a draft's tokenizer makes of the target's text as it grows, and the target's of the draft's answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from tokenizers import Encoding, Regex, Tokenizer, decoders, models, pre_tokenizers

from foretell.drafters.reading import BEHIND, SAMPLE, TAIL, Languages, Reading
from foretell.models.text import Text
from foretell.models.vocabulary import same_vocabulary, shared_ids, spellings
from tests.drafters.pairs import byte_level, sentencepiece
from tests.play import spell, spelled

CATS = "the cat sat on the mat and the dog sat too " * 3
STORY = (
    SAMPLE
    + "Ich hätte gern 3 Brötchen 🥐🥐, bitte! 日本語のテキスト。 “Oui” — ça va?\n\n\n  x = 12345678\n"
    + SAMPLE[::-1]
)
MERGES = [("1", "2"), ("3", "4")]
TEXTS: dict[str, Text] = {
    "bytes": byte_level(420, special=["<|im_start|>", "<|im_end|>"], bos_token="<|im_start|>", eos_token="<|im_end|>"),
    "fewer": byte_level(290, CATS, special=["</s>", "<|im_start|>"], eos_token="</s>"),
    "pieces": sentencepiece(400),
}
PAIRS = [(a, b) for a in TEXTS for b in TEXTS if a != b]


def languages(target: str | Text, draft: str | Text) -> Languages:
    ours, theirs = (TEXTS[t] if isinstance(t, str) else t for t in (target, draft))
    return Languages.of(ours, theirs, (len(ours.vocab()), len(theirs.vocab())))


def pieces(ids: Sequence[int], seed: int) -> Iterator[list[int]]:
    """Beginnings of ids, each a few tokens longer than the one before."""
    source, end = random.Random(seed), 0
    while end < len(ids):
        end += source.choice([1, 1, 1, 2, 3, 5])
        yield list(ids[:end])


def encoded(text: Text, words: str) -> list[int]:
    return text.tokenizer.encode(words, add_special_tokens=False).ids


# What a token stands for


def test_tokens_of_either_kind_are_bytes() -> None:
    for text in TEXTS.values():
        known = spellings(text)
        assert len(known) == len(text.vocab())
        said = b"".join(s for s in (known[i] for i in encoded(text, STORY)) if isinstance(s, bytes))
        assert said.decode().lstrip(" ") == STORY
        assert all(isinstance(known[i], str) for i in text.special_ids)


def test_a_byte_that_a_piece_covers_stands_for_nothing() -> None:
    """Sentencepiece has "A" and "<0x41>", and encodes no text to the latter."""
    text, known = TEXTS["pieces"], spellings(TEXTS["pieces"])
    by_byte = {byte: known[text.tokenizer.token_to_id(f"<0x{byte:02X}>")] for byte in (0x65, 0x20, 0x0A, 0xF0)}
    assert by_byte == {0x65: None, 0x20: None, 0x0A: b"\n", 0xF0: b"\xf0"}


def test_shared_tokens_are_one_to_one_and_spelled_alike() -> None:
    for a, b in PAIRS:
        ours, theirs = spellings(TEXTS[a]), spellings(TEXTS[b])
        shared = shared_ids(ours, theirs)
        assert len(set(shared.values())) == len(shared) > 50
        assert all(ours[i] == theirs[j] is not None for i, j in shared.items())
    assert shared_ids([b"a", b"a", None, "x", b"x"], [b"x", None, b"a", b"a", "y"]) == {0: 2, 4: 0}


def test_the_same_vocabulary_is_told_by_its_tokens() -> None:
    """Pain J53: of equal sizes, spelled otherwise. Pain J52: padding is none of it."""
    words = spelled("abc")
    assert same_vocabulary(words, spelled("abc")) and not same_vocabulary(words, spelled("acb"))
    assert not same_vocabulary(words, spelled("abcd")) and not same_vocabulary(spelled("abcd"), words)


# Reading


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_growing_text_reads_as_it_does_whole(target: str, draft: str) -> None:
    """Whatever the pieces; and a round's work does not grow with the text."""
    both = languages(target, draft)
    text = STORY * 3
    ids, reading, own = encoded(TEXTS[target], text), Reading(both), []
    lengths: list[int] = []
    original = reading._encode

    def noting(words: str) -> Encoding:
        lengths.append(len(words))
        return original(words)

    reading._encode = noting  # type: ignore[method-assign]
    for beginning in pieces(ids, 1):
        start, tail, whole = reading.read(beginning)
        assert whole and start <= len(own) and start >= 0
        own[start:] = tail
    said = b"".join([both.spoken[i] for i in ids]).decode()
    assert own == both.prefix + encoded(TEXTS[draft], said)
    assert len(lengths) > 500 and max(lengths) < 12 * (2 * TAIL + BEHIND + 5) < len(text) / 4


def test_a_long_prompt_is_read_at_once_and_then_only_its_end() -> None:
    both = languages("bytes", "fewer")
    ids = encoded(TEXTS["bytes"], STORY * 4)
    reading = Reading(both)
    start, own, _ = reading.read(ids[:-1])
    assert start == 0 and own == encoded(TEXTS["fewer"], b"".join(both.spoken[i] for i in ids[:-1]).decode())
    before = len(own)
    start, tail, _ = reading.read(ids)
    assert before - TAIL <= start < before and len(tail) <= TAIL + 10


@pytest.mark.parametrize("seed", range(5))
def test_any_tokens_can_be_read(seed: int) -> None:
    """Ids that no text is encoded to, parts of characters and bytes that are none: the draft reads the same bytes, as
    far as they can be text."""
    source, both = random.Random(seed), languages("bytes", "fewer")
    ids = [source.randrange(500) for _ in range(300)]  # some stand for no token
    known, own, reading = spellings(TEXTS["fewer"]), [], Reading(both)
    for beginning in pieces(ids, seed):
        start, tail, whole = reading.read(beginning)
        own[start:] = tail
        said = b"".join([both.spoken[i] for i in beginning if i < len(both.spoken)])
        assert whole
        read = b"".join([s.encode() if isinstance(s, str) else s or b"" for s in (known[i] for i in own)])
        assert read.decode(errors="replace") == said.decode(errors="replace")


def test_the_beginning_of_a_character_is_read_by_its_bytes() -> None:
    croissant = "🥐".encode()
    target = spelled(["a", *(spell(bytes([byte])) for byte in croissant)])
    draft = spelled([spell(bytes([byte])) for byte in croissant] + ["a", spell(croissant[:2])])
    reading = Reading(languages(target, draft))
    assert reading.read([0, 1]) == (0, [4, 0], True)
    assert reading.read([0, 1, 2, 3]) == (0, [4, 5, 2], True), "as long parts as there are"
    deaf = Reading(languages(target, spelled("ab")))
    assert deaf.read([0, 1]) == (0, [0], False)


def test_a_text_is_not_cut_where_it_would_read_otherwise() -> None:
    """Numbers are split in threes from their beginning: from the middle of a group on, the rest comes out otherwise."""
    built = Tokenizer(models.BPE(vocab={**{str(d): d for d in range(10)}, "12": 10, "34": 11, "x": 12}, merges=MERGES))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    built.decoder = decoders.ByteLevel()
    draft, target = Text(built, None, {}), spelled([*"0123456789", "x"])
    for number in ("123412", "4123", "12"):
        ids = [10, *(int(digit) for digit in number * 30)][:120]
        reading, own = Reading(languages(target, draft)), []
        for beginning in pieces(ids, 3):
            start, tail, _ = reading.read(beginning)
            own[start:] = tail
            assert own == draft.encode("".join("0123456789x"[i] for i in beginning))
        assert start > 0


def test_special_tokens_are_read_as_such_where_both_have_them() -> None:
    target, draft = TEXTS["bytes"], TEXTS["fewer"]
    start, end = (target.tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    prompt = [start, *encoded(target, "user\nHi"), end, start]
    _, own, _ = Reading(languages(target, draft)).read(prompt)
    theirs = draft.tokenizer.token_to_id
    assert own == [theirs("<|im_start|>"), *encoded(draft, "user\nHi"), theirs("</s>"), theirs("<|im_start|>")], (
        "what ends a text there is what ends a text here"
    )
    _, own, _ = Reading(languages(draft, target)).read([theirs("</s>"), theirs("<|im_start|>")])
    assert own == [end, start]
    other = byte_level(290, CATS, special=["<pad>"])
    _, own, _ = Reading(languages(other, target)).read([other.tokenizer.token_to_id("<pad>")])
    assert own == encoded(target, "<pad>"), "else as text"


def test_what_begins_a_text_is_the_drafts_own() -> None:
    pieces, target = TEXTS["pieces"], TEXTS["bytes"]
    hello = encoded(target, "Hello")
    _, own, _ = Reading(languages(target, pieces)).read([target.tokenizer.token_to_id("<|im_start|>"), *hello])
    assert own == pieces.encode("Hello") and own[0] == 1
    _, own, _ = Reading(languages(pieces, target)).read(pieces.encode("Hello"))
    assert own == encoded(target, " Hello"), "<s> says nothing there"
    again = sentencepiece(390)
    _, own, _ = Reading(languages(pieces, again)).read(pieces.encode("Hello"))
    assert own.count(1) == 1, "not twice"


def test_ids_beyond_the_model_are_not_given_to_it() -> None:
    target, draft = TEXTS["bytes"], TEXTS["fewer"]
    both = Languages.of(target, draft, (len(target.vocab()), 100))
    _, own, _ = Reading(both).read(encoded(target, STORY))
    assert max(own) < 100 and max(both.to_draft.values()) < 100


# Answers


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_an_answer_is_in_the_targets_own_tokens(target: str, draft: str) -> None:
    """The true continuation, cut anywhere in the draft's tokens: what comes back continues the text's own tokens."""
    both, ours = languages(target, draft), TEXTS[target]
    ids = encoded(ours, STORY)
    source, right, given = random.Random(2), 0, 0
    for cut in source.sample(range(20, len(ids) - 40), 60):
        reading = Reading(both)
        reading.read(ids[:cut])
        rest = b"".join([both.spoken[i] for i in ids[cut:]])
        said = rest[: source.choice([3, 9, 15])]
        answer = reading.answer(said)
        assert b"".join([both.target_bytes[i] for i in answer]) in (said, said[:-1], said[:-2], said[:-3], b"")
        agreed = next((n for n, (a, b) in enumerate(zip(answer, ids[cut:], strict=False)) if a != b), len(answer))
        assert agreed >= len(answer) - 3
        right, given = right + agreed, given + len(answer)
    assert given > 400 and right > 0.9 * given


def test_an_answer_begins_where_the_text_ends() -> None:
    """ "un" + "do" would be one token, but the target has said "un" already."""
    target = spelled([*"dnou", "un", "do", "undo"], merges=[("u", "n"), ("d", "o"), ("un", "do")])
    draft = spelled("dnou")
    reading = Reading(languages(target, draft))
    reading.read([4])
    assert encoded(target, "undo") == [6] and reading.answer(b"do") == [5]
    assert reading.answer(b"dod") == [5, 0] and reading.answer(b"") == [] and reading.answer(b"x") == []


def test_an_answer_ends_a_character_that_the_text_began() -> None:
    croissant = "🥐".encode()
    a, *parts = ids = encoded(TEXTS["bytes"], "a🥐")
    assert len(ids) == 5, "the target has a token for each of its bytes"
    reading = Reading(languages("bytes", "fewer"))
    reading.read(ids[:3])
    assert reading.answer(croissant[2:] + b"a") == [*parts[2:], a]
    assert reading.answer(croissant[2:] + croissant[:2]) == parts[2:] and reading.answer(croissant[2:3]) == []
    assert reading.answer(b"a") == [a], "no text goes on like that, but tokens do"


def test_no_id_without_a_logit_is_answered() -> None:
    target = spelled("abc")
    reading = Reading(Languages.of(target, spelled("cba"), (2, 3)))
    reading.read([0])
    assert reading.answer(b"ab") == [0, 1] and reading.answer(b"ac") == []


def test_what_is_shared_is_measured_on_the_poorer_side() -> None:
    small, large = byte_level(290), byte_level(420)
    assert languages(small, large).shared == languages(large, small).shared < 0.9
    assert languages(large, byte_level(415)).shared > 0.95
    assert languages("bytes", spelled("zy")).shared < 0.1
