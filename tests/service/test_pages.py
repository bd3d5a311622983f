"""Which free page goes first, what a key depends on, and what sharing does to a page."""

import pytest

from specserve.service.pages import OutOfPagesError, PageAllocator
from specserve.service.prefix import PrefixKeys


def filled(pages: PageAllocator, keys: list[bytes]) -> list[int]:
    """Return a table of full pages, known by `keys`."""
    table: list[int] = []
    pages.grow(table, len(keys) * pages.page_tokens)
    for page, key in zip(table, keys, strict=True):
        pages.fill(page, key)
    return table


def test_blank_pages_go_before_filled_ones_and_the_longest_freed_goes_first() -> None:
    pages = PageAllocator(4, 2)
    first, second = filled(pages, [b"a"]), filled(pages, [b"b"])
    pages.release(first)
    pages.release(second)
    table: list[int] = []
    pages.grow(table, 4)
    assert pages.find(b"a") is not None
    assert pages.find(b"b") is not None
    pages.grow(table, 6)
    assert pages.find(b"a") is None
    assert pages.find(b"b") is not None


def test_of_a_freed_chain_the_end_is_forgotten_first() -> None:
    pages = PageAllocator(3, 2)
    pages.release(filled(pages, [b"1", b"2", b"3"]))
    pages.grow([], 2)
    assert [pages.find(key) is not None for key in (b"1", b"2", b"3")] == [True, True, False]


def test_using_a_page_again_makes_it_the_last_to_go() -> None:
    pages = PageAllocator(2, 2)
    for key in (b"a", b"b"):
        pages.release(filled(pages, [key]))
    again: list[int] = []
    page = pages.find(b"a")
    assert page is not None
    pages.share(again, [page])
    pages.release(again)
    pages.grow([], 2)
    assert pages.find(b"a") == page
    assert pages.find(b"b") is None


def test_a_shared_page_is_neither_writable_nor_evicted() -> None:
    pages = PageAllocator(2, 2)
    table = filled(pages, [b"a"])
    other: list[int] = []
    pages.share(other, table)
    pages.release(table)
    assert pages.num_owners(other[0]) == 1
    assert not pages.writable(other[0])
    with pytest.raises(OutOfPagesError):
        pages.grow([], 4)
    assert pages.find(b"a") == other[0]


def test_the_first_page_of_a_key_stays() -> None:
    pages = PageAllocator(2, 2)
    table, twin = filled(pages, [b"a"]), filled(pages, [b"a"])
    assert pages.find(b"a") == table[0]
    assert pages.writable(twin[0])


def test_forgetting_everything_leaves_every_free_page_blank() -> None:
    pages = PageAllocator(3, 2)
    pages.release(filled(pages, [b"a", b"b"]))
    pages.forget_all()
    assert pages.num_free == 3
    assert pages.find(b"a") is None
    pages.grow([], 6)


def test_a_key_depends_on_salt_all_tokens_before_and_nothing_else() -> None:
    def key(salt: str, tokens: list[int], index: int = 1) -> bytes:
        return PrefixKeys(salt, 2).key(index, tokens)

    assert key("s", [1, 2, 3, 4]) == key("s", [1, 2, 3, 4, 9])
    different = [
        key("s", [1, 2, 3, 4]),
        key("", [1, 2, 3, 4]),
        key("s", [5, 2, 3, 4]),
        key("s", [1, 2, 3, 5]),
        key("s", [1, 2, 3, 4], 0),
        key("s", [3, 4, 1, 2]),
        key("s", [1, 2, 3, 2**40]),
        key("\ud800", [1, 2, 3, 4]),
    ]
    assert len(set(different)) == len(different)
