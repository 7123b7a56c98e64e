"""Pages by content: what is found is what was put there, and what goes is what nobody uses, oldest first."""

from __future__ import annotations

import random

import pytest

from foretell.kv.prefix import PAGE, Page, PrefixPages


def publish(pages: PrefixPages, tokens: list[int], slots: list[int]) -> list[int]:
    return pages.give_back(tokens, slots, pages.take([]))


def text(*words: int) -> list[int]:
    """A page of each word."""
    return [word for word in words for _ in range(PAGE)]


def slots(start: int, count: int) -> list[int]:
    return list(range(start, start + count * PAGE))


def test_only_whole_pages_stay() -> None:
    pages = PrefixPages()
    returned = publish(pages, [*text(1, 2), 3, 4], [*slots(0, 2), 90, 91])
    assert returned == [90, 91]
    assert pages.idle_slots == 2 * PAGE and sorted(pages.all_slots()) == slots(0, 2)
    assert publish(pages, [5, 6], [92, 93]) == [92, 93]


def test_the_longest_known_beginning_is_found_and_no_more() -> None:
    pages = PrefixPages()
    publish(pages, text(1, 2, 3), slots(0, 3))
    taken = pages.take([*text(1, 2), *text(9)])
    assert [slot for page in taken for slot in page.slots] == slots(0, 2)
    assert pages.idle_slots == PAGE and [page.users for page in taken] == [1, 1]
    assert pages.take(text(1)[:-1]) == [] and pages.take(text(2)) == []
    pages.check(taken)


def test_equal_pages_after_different_beginnings_are_never_confused() -> None:
    """A page is known by all before it, not by its own tokens alone, nor by a hash that could collide."""
    pages = PrefixPages()
    publish(pages, text(1, 7), slots(0, 2))
    publish(pages, text(2, 7), slots(100, 2))
    assert [p.slots[0] for p in pages.take(text(1, 7))] == [0, PAGE]
    assert [p.slots[0] for p in pages.take(text(2, 7))] == [100, 100 + PAGE]
    assert pages.take(text(7)) == [] and pages.take(text(3, 7)) == []


def test_a_page_that_is_known_already_gives_its_copy_back() -> None:
    pages = PrefixPages()
    publish(pages, text(1, 2), slots(0, 2))
    assert publish(pages, [*text(1, 2), *text(3), 4], [*slots(100, 3), 150]) == [*slots(100, 2), 150]
    assert sorted(pages.all_slots()) == [*slots(0, 2), *slots(100 + 2 * PAGE, 1)]
    pages.check([])


def test_a_user_goes_on_from_shared_pages() -> None:
    pages = PrefixPages()
    publish(pages, text(1), slots(0, 1))
    taken = pages.take([*text(1, 2), 3])
    returned = pages.give_back([*text(1, 2), 3], [*slots(0, 1), *slots(50, 1), 99], taken)
    assert returned == [99] and [page.slots[0] for page in pages.take(text(1, 2))] == [0, 50]


def test_the_least_recently_used_goes_first_and_the_far_end_before_the_beginning() -> None:
    pages = PrefixPages()
    publish(pages, text(1, 2), slots(0, 2))
    publish(pages, text(5), slots(100, 1))
    pages.give_back(text(1), slots(0, 1), pages.take(text(1)))  # used again: the page of 1 is the newest now
    assert pages.evict(1) == slots(PAGE, 1), "the page of 2 is the oldest"
    assert pages.evict(1) == slots(100, 1)
    assert pages.evict(PAGE + 1) == slots(0, 1), "all there is"
    assert pages.evict(1) == [] and pages.idle_slots == 0 and pages.all_slots() == []


def test_a_text_said_again_counts_as_used() -> None:
    """Also by one who was admitted before it was known, and gives back a copy of its own."""
    pages = PrefixPages()
    publish(pages, text(1), slots(0, 1))
    publish(pages, text(5), slots(100, 1))
    assert publish(pages, text(1), slots(200, 1)) == slots(200, 1)
    assert pages.evict(1) == slots(100, 1)


def test_a_beginning_outlives_its_far_end() -> None:
    """Evicted the other way round, the far end could never be found again and would only waste slots."""
    pages = PrefixPages()
    publish(pages, text(1, 2, 3), slots(0, 3))
    for left in (2, 1, 0):
        assert pages.evict(1) == slots(left * PAGE, 1)
        found = pages.take(text(1, 2, 3))
        assert len(found) == left
        pages.give_back(text(*range(1, left + 1)), slots(0, left), found)


def test_pages_in_use_stay() -> None:
    pages = PrefixPages()
    publish(pages, text(1), slots(0, 1))
    one, two = pages.take(text(1)), pages.take(text(1))
    assert one[0].users == 2 and pages.evict(1) == []
    pages.give_back(text(1), slots(0, 1), one)
    assert pages.evict(1) == [], "the other still uses it"
    pages.check(two)
    pages.give_back(text(1), slots(0, 1), two)
    assert pages.evict(1) == slots(0, 1)


def test_a_page_published_while_another_uses_it_is_not_idle() -> None:
    pages = PrefixPages()
    publish(pages, text(1), slots(0, 1))
    taken = pages.take(text(1))
    publish(pages, text(1), slots(50, 1))  # was admitted before the first ended, so it has a copy of its own
    assert pages.idle_slots == 0
    pages.check(taken)


def test_random_lives_against_a_list_of_published_beginnings() -> None:
    """Nothing is evicted here, so the longest published beginning is what must be found, whoever uses what."""
    source, pages = random.Random(3), PrefixPages()
    published: set[tuple[int, ...]] = set()
    live: list[tuple[list[int], list[int], list[Page]]] = []
    fresh = 0
    for _ in range(2000):
        if live and source.random() < 0.5:
            tokens, places, taken = live.pop(source.randrange(len(live)))
            returned = pages.give_back(tokens, places, taken)
            assert len(set(returned)) == len(returned) and not set(returned) & set(pages.all_slots())
            published |= {tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)}
        else:
            words = [source.randrange(3) for _ in range(source.randint(0, 4))]
            tokens = text(*words) + [9] * source.randrange(PAGE)
            taken = pages.take(tokens)
            known = [end for end in range(PAGE, len(tokens) + 1, PAGE) if tuple(tokens[:end]) in published]
            assert PAGE * len(taken) == max(known, default=0)
            places = [slot for page in taken for slot in page.slots]
            rest = len(tokens) - len(places)
            live.append((tokens, places + list(range(fresh, fresh + rest)), taken))
            fresh += rest
        pages.check([page for _, _, taken in live for page in taken])
        assert len(set(pages.all_slots())) == len(pages.all_slots())
    assert len(published) > 50


def test_check_finds_a_wrong_count() -> None:
    pages = PrefixPages()
    publish(pages, text(1), slots(0, 1))
    taken = pages.take(text(1))
    with pytest.raises(AssertionError, match="users"):
        pages.check([])
    taken[0].users = 0
    with pytest.raises(AssertionError, match="idle"):
        pages.check([])
