"""One request's text: stops at any place, characters split over tokens, and nothing shown that is taken back later."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from foretell.engine.request import Completion, Event, Logprob, Request
from foretell.types import Sampling, Seq
from tests.play import spell, spelled

EURO, FACE = "€".encode(), "🙂".encode()
WORDS = ["a", "b", "c", "X", "ab", "bc", "Xa", "cabX", spell(b" "), spell("é".encode())]
PARTS = {spell(EURO[:1]): 10, spell(EURO[1:2]): 11, spell(EURO[2:]): 12}  # one byte a token
FACES = {spell(FACE[:2]): 13, spell(FACE[2:3]): 14, spell(FACE[3:] + b"X"): 15}  # its end comes with a letter
TEXT = spelled([*WORDS, *PARTS, *FACES], special=["<end>", "<mark>"])
END, MARK = 16, 17
RAW = [word.encode() for word in WORDS[:8]] + [b" ", "é".encode(), EURO[:1], EURO[1:2], EURO[2:]]
RAW += [FACE[:2], FACE[2:3], FACE[3:] + b"X", b"", b""]
PROMPT = [0, 1, 2]


def make(sampling: Sampling, text: bool = True, context: int = 999, stop_ids: Sequence[int] = ()) -> Request:
    ids = frozenset(stop_ids) | frozenset(sampling.stop_token_ids)
    return Request(Seq(7, list(PROMPT), len(PROMPT), sampling, 0, ids), TEXT if text else None, context)


def give(request: Request, ids: Sequence[int], flushes: Sequence[bool]) -> list[Event]:
    """Push tokens as the engine does, until the request takes no more; events in their order."""
    for i, (token, flush) in enumerate(zip(ids, flushes, strict=True)):
        logprob = None if request.seq.sampling.logprobs is None else Logprob(token, -float(i), ())
        request.seq.tokens.append(token)
        going = request.push(token, drafted=i % 3 != 0, logprob=logprob)
        assert going == (request.finish_reason is None)
        if flush or not going:
            request.flush()
        if not going:
            break
    else:
        request.abort()
    return list(request.outbox)


# A naive reference: decode the bytes of every prefix, look for every stop string at every place


def certain(raw: bytes) -> str:
    """The text of the bytes, less the beginning of a character at its end."""
    for k in (3, 2, 1):
        if len(raw) >= k and any(c[:k] == raw[-k:] and len(c) > k for c in (EURO, FACE)):
            raw = raw[:-k]
            break
    return raw.decode(errors="replace")


def cut_at(text: str, known: int, stops: Sequence[str]) -> int | None:
    """Where the first stop string begins, of those that end after the first `known` characters."""
    places = [i for s in stops for i in range(len(text)) if text.startswith(s, i) and i + len(s) > known]
    return min(places, default=None)


def expected(ids: Sequence[int], sampling: Sampling, context: int = 999) -> tuple[str, list[int], str]:
    text, ends = "", [0]
    for n, token in enumerate(ids, 1):
        stopped = token in sampling.stop_token_ids
        raw = b"".join(RAW[i] for i in ids[: n - stopped])
        ended = stopped or n == sampling.max_tokens or len(PROMPT) + n == context
        versions = [certain(raw), raw.decode(errors="replace")] if ended or n == len(ids) else [certain(raw)]
        ends.append(0)
        for now in versions:
            known, text, ends[n] = len(text), now, len(now)
            cut = cut_at(text, known, sampling.stop) if n >= sampling.min_tokens else None
            if cut is not None:
                shortest = next(kept for kept, end in enumerate(ends) if end >= cut)
                return text[:cut], list(ids[:shortest]), "stop"
        if ended:
            return text, list(ids[:n]), "stop" if stopped else "length"
    return text, list(ids), "abort"


def random_ids(source: random.Random) -> list[int]:
    """Letters, characters in pieces, marks without text; now and then a character that is broken off."""
    ids: list[int] = []
    while len(ids) < 14:
        kind = source.random()
        if kind < 0.6:
            ids.append(source.randrange(10))
        elif kind < 0.7:
            ids.append(MARK)
        elif kind < 0.75:
            ids.append(END)
        else:
            whole = source.choice([[10, 11, 12], [13, 14, 15]])
            ids += whole if source.random() < 0.8 else whole[: source.randint(1, 2)]
    return ids


def random_sampling(source: random.Random, whole: str) -> Sampling:
    places = [source.randrange(len(whole)) for _ in range(source.randint(0, 2))]
    stops = [whole[i : i + source.randint(1, 4)] for i in places]
    return Sampling(
        stop=stops + source.sample(["X", "ab", "\ufffd", "€", "ca"], source.choice([0, 0, 1])),
        stop_token_ids=[END] if source.random() < 0.5 else [],
        max_tokens=source.choice([12, 30]),
        min_tokens=source.choice([0, 0, 3, 8]),
        logprobs=source.choice([None, 0]),
    )


def check(done: Completion, events: Sequence[Event], wanted: tuple[str, list[int], str]) -> None:
    assert (done.text, done.token_ids, done.finish_reason) == wanted
    assert "".join(event.text for event in events) == done.text, "what was shown is the text"
    assert [token for event in events for token in event.token_ids] == done.token_ids
    drafted = [flag for event in events for flag in event.drafted]
    assert drafted == [i % 3 != 0 for i in range(len(done.token_ids))]
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [done.finish_reason]
    assert done.stats.emitted == len(done.token_ids) and done.prompt_token_ids == PROMPT


@pytest.mark.parametrize("seed", range(8))
def test_random_texts_however_they_are_cut_into_rounds(seed: int) -> None:
    """Text, tokens, log-probabilities and events against the naive reference; a round brings one token or many."""
    source, cut, partial = random.Random(seed), 0, 0
    for _ in range(150):
        ids = random_ids(source)
        sampling = random_sampling(source, b"".join(RAW[i] for i in ids).decode(errors="replace"))
        context = source.choice([999, 999, len(PROMPT) + 9])
        wanted = expected(ids, sampling, context)
        for flushes in ([True] * len(ids), [False] * len(ids), [source.random() < 0.4 for _ in ids]):
            request = make(sampling, context=context)
            events = give(request, ids, flushes)
            done = request.completion()
            check(done, events, wanted)
            if sampling.logprobs is not None:
                assert done.logprobs is not None
                assert [entry.token_id for entry in done.logprobs] == done.token_ids
            stopped = bool(done.token_ids) and done.token_ids[-1] in sampling.stop_token_ids
            decoded = TEXT.decode(done.token_ids[: len(done.token_ids) - stopped])
            whole = done.finish_reason != "stop" or stopped
            assert decoded == done.text if whole else decoded.startswith(done.text)
            cut += not whole
            partial += not whole and decoded != done.text
    assert cut > 50 and partial > 10, "stop strings were met, at the end of tokens and inside them"


def text_of(ids: Sequence[int], **kwargs: object) -> tuple[str, list[int], str]:
    """Token by token, and all at once; both must agree."""
    results = []
    for flush in (True, False):
        request = make(Sampling(**kwargs), stop_ids=[END])  # type: ignore[arg-type]
        events = give(request, ids, [flush] * len(ids))
        done = request.completion()
        check(done, events, (done.text, done.token_ids, done.finish_reason))
        results.append((done.text, done.token_ids, done.finish_reason))
    assert results[0] == results[1]
    return results[0]


def test_a_stop_string_at_the_very_beginning_leaves_nothing() -> None:
    assert text_of([4, 0, 0], stop="a") == ("", [], "stop")
    assert text_of([0, 1, 2], stop="abc") == ("", [], "stop")


def test_a_stop_string_inside_a_token_keeps_the_token_that_begins_before_it() -> None:
    assert text_of([2, 7, 0], stop="b") == ("cca", [2, 7], "stop")


def test_a_stop_string_split_over_three_tokens_is_held_back_until_it_is_certain() -> None:
    request = make(Sampling(stop="abc"))
    give(request, [3, 0, 1, 0, 1, 2], [True] * 6)
    assert [event.text for event in request.outbox] == ["X", "ab", ""], "the first ab could have been the stop"
    assert [event.token_ids for event in request.outbox] == [[3], [0, 1], []]


def test_of_several_stop_strings_the_first_in_the_text_counts() -> None:
    assert text_of([3, 7, 0], stop=["X", "ab"]) == ("", [], "stop")
    assert text_of([0, 7, 0], stop=["X", "ab"]) == ("ac", [0, 7], "stop")
    assert text_of([0, 0, 1, 2], stop=["bc", "abc", "aabc"]) == ("", [], "stop"), "they end together: the longest"
    assert text_of([0, 1, 2], stop=["abc", "b"]) == ("a", [0], "stop"), "the one that is complete first"


def test_min_tokens_forgives_a_stop_string_that_is_complete_before() -> None:
    assert text_of([0, 3, 1, 3, 2], stop="X", min_tokens=3) == ("aXb", [0, 3, 1], "stop")
    assert text_of([0, 3, 1], stop="X", min_tokens=2) == ("a", [0], "stop")
    assert text_of([0, 0, 1, 2, 3], stop="ab", min_tokens=4, max_tokens=5)[0] == "aabcX"


def test_a_stop_id_has_no_text_and_stays_in_the_tokens() -> None:
    assert text_of([0, 4, END, 0]) == ("aab", [0, 4, END], "stop")
    assert text_of([0, 4, 0], stop_token_ids=[4]) == ("a", [0, 4], "stop"), "also one that would have text"
    assert text_of([END]) == ("", [END], "stop")


def test_tokens_without_text_before_a_stop_string_are_not_shown_and_taken_back() -> None:
    """Special tokens and the beginnings of characters go with the stop string behind them, in a stream too."""
    assert text_of([MARK, 3, 0], stop="X") == ("", [], "stop")
    assert text_of([0, MARK, 3], stop="X") == ("a", [0], "stop")
    assert text_of([0, 10, 3], stop="\ufffdX") == ("a", [0], "stop")
    assert text_of([MARK, 0, MARK, MARK], max_tokens=4) == ("a", [MARK, 0, MARK, MARK], "length")


def test_characters_split_over_tokens_come_whole() -> None:
    request = make(Sampling())
    events = give(request, [0, 10, 11, 12, 13, 14, 15], [True] * 7)
    assert [event.text for event in events] == ["a", "€", "🙂X", ""]
    assert [event.token_ids for event in events] == [[0], [10, 11, 12], [13, 14, 15], []]
    assert text_of([13, 14, 15, 0], stop="X") == ("🙂", [13, 14, 15], "stop")
    assert text_of([13, 14, 15, 0], stop="🙂") == ("", [], "stop")


def test_a_character_that_is_never_finished_is_replaced_at_the_end() -> None:
    assert text_of([0, 10, 11], max_tokens=3) == ("a\ufffd", [0, 10, 11], "length")
    assert text_of([0, 10, END]) == ("a\ufffd", [0, 10, END], "stop")
    assert text_of([0, 10, 11], stop="\ufffd", max_tokens=3) == ("a", [0], "stop")


def test_max_tokens_and_the_context_end_a_text() -> None:
    assert text_of([0] * 9, max_tokens=4) == ("aaaa", [0] * 4, "length")
    assert text_of([0, 0, 0, END], max_tokens=4) == ("aaa", [0, 0, 0, END], "stop"), "a stop id that is the last"
    request = make(Sampling(), context=len(PROMPT) + 2)
    give(request, [0] * 9, [True] * 9)
    assert request.completion().token_ids == [0, 0] and request.finish_reason == "length"


def test_without_a_tokenizer_there_are_tokens_alone() -> None:
    request = make(Sampling(max_tokens=3), text=False)
    events = give(request, [0, MARK, 4, 4], [True] * 4)
    done = request.completion()
    assert (done.text, done.token_ids) == ("", [0, MARK, 4])
    assert [event.token_ids for event in events] == [[0], [MARK], [4]] and not any(event.text for event in events)


def test_abort_ends_once_and_keeps_what_there_was() -> None:
    request = make(Sampling(stop="ab"))
    request.abort()
    assert request.completion().finish_reason == "abort" and request.completion().token_ids == []
    request = make(Sampling(stop="ab"))
    events = give(request, [3, 0], [True, True])
    assert [(event.text, event.finish_reason) for event in events] == [("X", None), ("a", "abort")]
    request.abort()
    assert len(request.outbox) == 2, "the second time is harmless"
    request = make(Sampling(max_tokens=1))
    give(request, [3], [True])
    request.abort()
    assert request.finish_reason == "length" and len(request.outbox) == 1


def test_a_flush_with_nothing_new_is_silent() -> None:
    request = make(Sampling())
    request.flush()
    request.push(0, drafted=False, logprob=None)
    request.flush()
    request.flush()
    assert len(request.outbox) == 1


def test_a_running_request_has_no_completion() -> None:
    with pytest.raises(AssertionError, match="still running"):
        make(Sampling()).completion()
