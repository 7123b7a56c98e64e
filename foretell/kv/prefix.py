"""Pages of committed tokens that outlive their request, found again by content. Knows no tensors.

A page is PAGE tokens and their slots; its key is the page before it and the tokens themselves, compared exactly, so two
different beginnings can never be taken for one another. Pages in use are counted; idle ones go, least recently used
first and the far end of a text before its beginning, when their slots are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 16  # tokens a page: small enough that a hit loses little, large enough that bookkeeping stays cheap

Key = tuple[int, tuple[int, ...]]  # number of the page before (0: none), the tokens


@dataclass(slots=True, eq=False)
class Page:
    number: int
    key: Key
    slots: list[int]
    users: int = 0


class PrefixPages:
    def __init__(self) -> None:
        self._pages: dict[Key, Page] = {}
        self._idle: dict[Key, Page] = {}  # in order of last use
        self._numbers = 0

    @property
    def idle_slots(self) -> int:
        return PAGE * len(self._idle)

    def take(self, tokens: Sequence[int]) -> list[Page]:
        """The pages of the longest known beginning of tokens, marked as in use."""
        pages: list[Page] = []
        before = 0
        for start in range(0, len(tokens) - PAGE + 1, PAGE):
            page = self._pages.get((before, tuple(tokens[start : start + PAGE])))
            if page is None:
                break
            page.users += 1
            self._idle.pop(page.key, None)
            pages.append(page)
            before = page.number
        return pages

    def give_back(self, tokens: Sequence[int], slots: Sequence[int], taken: Sequence[Page]) -> list[int]:
        """End a use: `taken` are its pages from `take`; the further whole pages of tokens become pages here.
        Returns the slots that are nobody's now. tokens and slots are equally long, taken's included."""
        returned: list[int] = []
        used = list(taken)
        for page in taken:
            page.users -= 1
        before = taken[-1].number if taken else 0
        start = PAGE * len(taken)
        for first in range(start, len(tokens) - PAGE + 1, PAGE):
            start = first + PAGE
            key = (before, tuple(tokens[first:start]))
            if key in self._pages:
                returned += slots[first:start]
            else:
                self._numbers += 1
                self._pages[key] = Page(self._numbers, key, list(slots[first:start]))
            used.append(self._pages[key])
            before = used[-1].number
        returned += slots[start:]
        for page in reversed(used):  # the far end becomes the oldest
            if page.users == 0:
                self._idle.pop(page.key, None)
                self._idle[page.key] = page
        return returned

    def untake(self, page: Page) -> None:
        """End one use of a page that nothing further is built on."""
        page.users -= 1
        if page.users == 0:
            self._idle[page.key] = page

    def evict(self, slots: int) -> list[int]:
        """Forget idle pages until at least that many slots are free; returns all slots freed."""
        freed: list[int] = []
        while len(freed) < slots and self._idle:
            key = next(iter(self._idle))
            page = self._idle.pop(key)
            del self._pages[key]
            freed += page.slots
        return freed

    def all_slots(self) -> list[int]:
        return [slot for page in self._pages.values() for slot in page.slots]

    def check(self, taken: Sequence[Page]) -> None:
        """Raise AssertionError unless the counts of use agree with the pages the requests hold."""
        users: dict[int, int] = {}
        for page in taken:
            users[page.number] = users.get(page.number, 0) + 1
        for key, page in self._pages.items():
            assert page.users == users.get(page.number, 0), "a page's count of users is wrong"
            assert (page.users == 0) == (key in self._idle), "a page is idle and in use, or neither"
