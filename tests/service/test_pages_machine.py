"""Pages under any order of events: counted right, shared only with the same tokens and salt, never lost."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from specserve.service.pages import OutOfPagesError, PageAllocator
from specserve.service.prefix import PrefixKeys

NUM_PAGES = 7
PAGE_TOKENS = 2


@dataclass(eq=False)
class Holder:
    """A request as the allocator sees it. `tokens` are committed; its first `num_filled` pages are known."""

    salt: str
    tokens: list[int]
    keys: PrefixKeys
    table: list[int] = field(default_factory=list)
    num_filled: int = 0


class Pages(RuleBasedStateMachine):
    holders = Bundle("holders")

    @initialize()
    def start(self) -> None:
        self.pages = PageAllocator(NUM_PAGES, PAGE_TOKENS)
        self.live: list[Holder] = []
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}
        """What a page holds: the salt and all tokens up to its end. Outlives owners, as memory does."""
        self.lost: set[int] = set()

    @rule(
        target=holders,
        salt=st.sampled_from(["", "a"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
    )
    def arrive(self, salt: str, tokens: list[int]) -> Holder:
        holder = Holder(salt, list(tokens), PrefixKeys(salt, PAGE_TOKENS))
        for index in range((len(tokens) - 1) // PAGE_TOKENS):
            page = self.pages.find(holder.keys.key(index, tokens))
            if page is None:
                break
            assert page not in self.lost
            assert self.written[page] == (salt, tuple(tokens[: (index + 1) * PAGE_TOKENS]))
            self.pages.share(holder.table, [page])
            holder.num_filled += 1
        self.live.append(holder)
        return holder

    @rule(holder=holders, num_tokens=st.integers(1, 12))
    def grow(self, holder: Holder, num_tokens: int) -> None:
        before, free = list(holder.table), self.pages.num_free
        missing = -(-num_tokens // PAGE_TOKENS) - len(before)
        if missing > free:
            with pytest.raises(OutOfPagesError):
                self.pages.grow(holder.table, num_tokens)
            assert holder.table == before
            return
        self.pages.grow(holder.table, num_tokens)
        fresh = holder.table[len(before) :]
        assert len(fresh) == max(missing, 0)
        for page in fresh:
            assert self.pages.writable(page)
            self.written[page] = ("", ())
            self.lost.discard(page)

    @rule(holder=holders, token=st.integers(0, 1))
    def commit(self, holder: Holder, token: int) -> None:
        holder.tokens.append(token)

    @rule(holder=holders)
    def fill(self, holder: Holder) -> None:
        index = holder.num_filled
        if index < len(holder.table) and (index + 1) * PAGE_TOKENS <= len(holder.tokens):
            page = holder.table[index]
            assert self.pages.writable(page)
            self.written[page] = (holder.salt, tuple(holder.tokens[: (index + 1) * PAGE_TOKENS]))
            self.pages.fill(page, holder.keys.key(index, holder.tokens))
            holder.num_filled += 1

    @rule(holder=holders, num_tokens=st.integers(0, 12))
    def cut(self, holder: Holder, num_tokens: int) -> None:
        num_tokens = max(num_tokens, holder.num_filled * PAGE_TOKENS)
        kept = holder.table[: -(-num_tokens // PAGE_TOKENS)]
        self.pages.cut(holder.table, num_tokens)
        assert holder.table == kept

    @rule(holder=consumes(holders))
    def leave(self, holder: Holder) -> None:
        self.pages.release(holder.table)
        assert holder.table == []
        self.live.remove(holder)

    @rule(target=holders, holder=consumes(holders))
    def preempt(self, holder: Holder) -> object:
        self.pages.release(holder.table)
        holder.num_filled = 0
        return holder

    @rule(target=holders)
    def lose_everything(self) -> object:
        for holder in self.live:
            self.pages.release(holder.table)
            holder.num_filled = 0
        self.pages.forget_all()
        self.lost = set(range(NUM_PAGES))
        return multiple()

    @invariant()
    def owners_are_the_tables_that_hold_the_page(self) -> None:
        held = [page for holder in self.live for page in holder.table]
        for page in range(NUM_PAGES):
            assert self.pages.num_owners(page) == held.count(page)
        assert self.pages.num_free == NUM_PAGES - len(set(held))

    @invariant()
    def nobody_may_write_what_another_reads(self) -> None:
        for holder in self.live:
            assert len(set(holder.table)) == len(holder.table)
            for page in holder.table:
                assert self.pages.num_owners(page) == 1 or not self.pages.writable(page)

    @invariant()
    def every_known_page_holds_the_tokens_of_its_key(self) -> None:
        for salt in ("", "a"):
            for holder in self.live:
                keys = PrefixKeys(salt, PAGE_TOKENS)
                for index in range(len(holder.tokens) // PAGE_TOKENS):
                    page = self.pages.find(keys.key(index, holder.tokens))
                    if page is not None:
                        assert self.written[page] == (salt, tuple(holder.tokens[: (index + 1) * PAGE_TOKENS]))
                        assert not self.pages.writable(page)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
