"""Who holds which KV page. A page is a fixed number of token slots; rollback is cutting a length, never a copy."""

from .errors import SpecserveError


class OutOfPagesError(SpecserveError):
    """No page is free; the caller frees one by preempting a request."""


class PageAllocator:
    """Hands out page numbers; a page belongs to at most one request."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_tokens)

    def grow(self, table: list[int], num_tokens: int) -> None:
        """Extend `table` until it holds `num_tokens` tokens. Raises OutOfPagesError, leaving `table` as it was."""
        missing = self.pages_for(num_tokens) - len(table)
        if missing > len(self._free):
            raise OutOfPagesError(f"{missing} pages are needed and {len(self._free)} are free")
        for _ in range(missing):
            table.append(self._free.pop())

    def release(self, table: list[int]) -> None:
        """Take every page of `table` back and empty it."""
        self._free.extend(reversed(table))
        table.clear()
