"""Who holds which KV page, and which tokens a page that nobody holds still knows.

A page is a fixed number of token slots; rollback is cutting a length, never a copy. A *filled* page carries the key of
the committed tokens in it; requests with the same beginning share it, and nobody writes to it any more. A page is
owned by one or more requests, or it is free; a free page that is filled stays known until its room is needed.
"""

from collections import OrderedDict
from collections.abc import Sequence

from .errors import SpecserveError


class OutOfPagesError(SpecserveError):
    """No page is free; the caller frees one by preempting a request."""


class PageAllocator:
    """Hands out page numbers, counts the owners of each page, and knows filled pages by their keys."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._num_owners = [0] * num_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Free pages that are filled, the one to be given up first in front."""
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages nobody holds, filled or not."""
        return len(self._blank) + len(self._idle)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_tokens)

    def num_owners(self, page: int) -> int:
        """Return how many tables hold `page`."""
        return self._num_owners[page]

    def writable(self, page: int) -> bool:
        """Return whether one request alone holds `page` and no other may come to read it."""
        return self._num_owners[page] == 1 and page not in self._key_of

    def grow(self, table: list[int], num_tokens: int) -> None:
        """Extend `table` until it holds `num_tokens` tokens. Raises OutOfPagesError, leaving `table` as it was.

        Blank pages go first; then the filled ones that were freed longest ago are forgotten.
        """
        missing = self.pages_for(num_tokens) - len(table)
        if missing > self.num_free:
            raise OutOfPagesError(f"{missing} pages are needed and {self.num_free} are free")
        for _ in range(missing):
            page = self._blank.pop() if self._blank else self._evict()
            self._num_owners[page] = 1
            table.append(page)

    def cut(self, table: list[int], num_tokens: int) -> None:
        """Take back the pages of `table` that `num_tokens` tokens do not reach."""
        self._take_back(table, self.pages_for(num_tokens))

    def release(self, table: list[int]) -> None:
        """Take every page of `table` back and empty it."""
        self._take_back(table, 0)

    def fill(self, page: int, key: bytes) -> None:
        """Make `page`, whose owner has written all its tokens, known by `key`; the first page of a key stays."""
        assert self._num_owners[page] > 0
        if key in self._page_of or page in self._key_of:
            return
        self._page_of[key] = page
        self._key_of[page] = key

    def find(self, key: bytes) -> int | None:
        """Return the page known by `key`; it may be free, and is kept only for whoever shares it now."""
        return self._page_of.get(key)

    def share(self, table: list[int], pages: Sequence[int]) -> None:
        """Append filled `pages` to `table` as one more owner of each."""
        for page in pages:
            assert page in self._key_of
            self._num_owners[page] += 1
            self._idle.pop(page, None)
            table.append(page)

    def forget_all(self) -> None:
        """Forget every key, for the KV is gone; who owns what does not change."""
        self._blank.extend(self._idle)
        self._idle.clear()
        self._key_of.clear()
        self._page_of.clear()

    def _take_back(self, table: list[int], num_kept: int) -> None:
        """Shorten `table` from its end: of a chain of filled pages the last is of use only while those before live."""
        while len(table) > num_kept:
            page = table.pop()
            assert self._num_owners[page] > 0
            self._num_owners[page] -= 1
            if self._num_owners[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
