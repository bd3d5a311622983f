"""Who takes part in a round, and with how many tokens. Owns the queues and the KV pages; waits for nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .messages import Draft, ScoreRow
from .pages import OutOfPagesError, PageAllocator
from .prefix import PrefixKeys
from .running import Ranking, Running

TIER_ORDER = {"priority": 0, "default": 1, "flex": 2}


class SchedulerLimits(Protocol):
    """What of the engine's configuration matters here."""

    @property
    def num_pages(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def max_running(self) -> int: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def prefill_tokens_busy(self) -> int: ...
    @property
    def prefix_caching(self) -> bool: ...


class SchedulerCounters(Protocol):
    """The engine's counters that are counted up here."""

    preempted: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's part of a round: feed its committed tokens from `kv_len` to `end`.

    `sampled`: these are all it has, so its next token is decided. `decoding`: only the last one was missing, so drafts
    may follow it.
    """

    running: Running
    end: int
    sampled: bool
    decoding: bool


class Scheduler:
    """Two queues in one order (tier, priority number, arrival): the front is served first, the back gives way first.

    A page is taken for committed tokens at the cost of requests further back, for drafts only if it is free.
    """

    def __init__(self, limits: SchedulerLimits, counters: SchedulerCounters) -> None:
        self._limits = limits
        self._counters = counters
        self._pages = PageAllocator(limits.num_pages, limits.page_tokens)
        self._running = Ranking()
        self._waiting = Ranking()
        self._by_id: dict[str, Running] = {}
        self._num_arrived = 0

    @property
    def num_free_pages(self) -> int:
        """Pages nobody holds; those that still know a prefix are among them."""
        return self._pages.num_free

    @property
    def num_running(self) -> int:
        """Requests that take part in rounds."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place or for pages."""
        return len(self._waiting)

    def find(self, request_id: str) -> Running | None:
        """Return the request of this name, running or waiting."""
        return self._by_id.get(request_id)

    def everyone(self) -> list[Running]:
        """Return every request, running and waiting."""
        return list(self._by_id.values())

    def add(self, running: Running) -> None:
        """Queue a new request."""
        request = running.request
        running.rank = (TIER_ORDER.get(request.tier, TIER_ORDER["default"]), request.priority, self._num_arrived)
        if self._limits.prefix_caching:
            running.keys = PrefixKeys(request.cache_salt, self._limits.page_tokens)
        self._num_arrived += 1
        self._by_id[request.request_id] = running
        self._waiting.add(running)

    def remove(self, running: Running) -> None:
        """Forget a request; its pages are free, and the filled ones stay known."""
        del self._by_id[running.request.request_id]
        (self._running if running in self._running else self._waiting).remove(running)
        self._pages.release(running.table)

    def admit(self, now_s: float) -> None:
        """Move waiting requests in while there are places, and pages for the tokens that all those inside have.

        One page more for each keeps an admission from being followed by a preemption. Nobody overtakes a request that
        does not fit, or a large one would never get in.
        """
        if not self._waiting:
            return
        owed = sum(self._num_missing(running) + 1 for running in self._running)
        while self._waiting and len(self._running) < self._limits.max_running:
            running = self._waiting[0]
            if self._running and owed + 1 > self._pages.num_free:
                return
            found = self._known_pages(running)
            missing = self._num_missing(running) - len(found)
            revived = sum(self._pages.num_owners(page) == 0 for page in found)
            if self._running and revived + missing + 1 + owed > self._pages.num_free:
                return
            owed += missing + 1
            self._waiting.remove(running)
            self._running.add(running)
            if running.admitted_s is None:
                running.admitted_s = now_s
                self._counters.prompt_tokens += len(running.request.prompt_token_ids)
            self._adopt(running, found)

    def schedule(self) -> list[Turn]:
        """Return the turns of the next round and hold the pages their committed tokens need.

        Every decoding request gets a turn; of prompts, one chunk a request as far as the shares go, best rank first.
        A prompt whose next page is being computed by a turn before it waits a round and then shares that page.
        """
        turns: list[Turn] = []
        filling: set[bytes] = set()
        num_prompt_tokens = 0
        for running in self._running:
            if not running.decoding:
                self._adopt(running, self._known_pages(running))
        best = min((running.rank[0] for running in self._running if running.decoding), default=None)
        place = 0
        while place < len(self._running):
            running = self._running[place]
            place += 1
            decoding = running.decoding
            end = running.committed_len
            if not decoding:
                share = prompt_share(self._limits, best, running.rank[0]) - num_prompt_tokens
                end = self._chunk_end(running, share, num_prompt_tokens == 0)
                if end <= running.kv_len or self._next_key(running) in filling:
                    continue
            if not self._hold(running, end):
                break
            if not decoding:
                num_prompt_tokens += end - running.kv_len
                filling.update(self._keys(running, running.kv_len // self._limits.page_tokens, end))
            turns.append(Turn(running, end, end == running.committed_len, decoding))
        assert turns or not self._running
        return turns

    def grant(self, running: Running, gamma: int) -> int:
        """Return how many of `gamma` draft tokens fit into free pages, and hold these until the turn is settled."""
        room = (len(running.table) + self._pages.num_free) * self._limits.page_tokens - running.committed_len
        gamma = min(gamma, room)
        if gamma > 0:
            self._grow(running, running.committed_len + gamma)
        return max(gamma, 0)

    def row(self, turn: Turn, draft: Draft | None) -> ScoreRow:
        """Return what the target is to score for `turn`. It writes to no page that anybody else may read."""
        running = turn.running
        draft_token_ids = draft.token_ids if draft is not None else ()
        token_ids = (*running.token_ids[running.kv_len : turn.end], *draft_token_ids)
        first = running.placed_len // self._limits.page_tokens
        last = self._pages.pages_for(running.kv_len + len(token_ids))
        assert last <= len(running.table)
        assert all(map(self._pages.writable, running.table[first:last]))
        num_sampled = len(draft_token_ids) + 1 if turn.sampled else 0
        parents = draft.parents if draft is not None else None
        return ScoreRow(
            running.request.request_id,
            running.kv_len,
            token_ids,
            num_sampled,
            running.pages(),
            parents,
            running.moved_from,
        )

    def settle(self, running: Running, kv_len: int, moved_from: tuple[int, ...] = ()) -> None:
        """Cut the KV to `kv_len` committed tokens, make the pages these fill known, free those that drafts reached.

        The rows of the last of them are at the positions `moved_from` until the next round moves them.
        """
        assert running.kv_len <= kv_len < running.committed_len
        running.kv_len = kv_len
        running.moved_from = moved_from
        for key in self._keys(running, running.num_filled, running.placed_len):
            self._pages.fill(running.table[running.num_filled], key)
            running.num_filled += 1
        if len(running.table) > self._num_needed(running):
            self._pages.cut(running.table, running.reach)
            running.block_table = None

    def forget_kv(self) -> None:
        """Start every request over: the target's pages are lost."""
        for running in self._running:
            self._give_up(running)
        self._pages.forget_all()

    def _num_needed(self, running: Running) -> int:
        return self._pages.pages_for(running.reach)

    def _num_missing(self, running: Running) -> int:
        return max(self._num_needed(running) - len(running.table), 0)

    def _chunk_end(self, running: Running, share: int, first: bool) -> int:
        """Return where the next chunk of a prompt ends: with a page if it can, so that the page is known at once.

        Less than a page is worth a turn only where the round would hold no prompt token otherwise.
        """
        end = min(running.kv_len + share, running.committed_len)
        aligned = end - end % self._limits.page_tokens
        return end if end == running.committed_len or (first and aligned <= running.kv_len) else aligned

    def _keys(self, running: Running, first: int, num_tokens: int) -> Iterator[bytes]:
        """Yield the keys of pages `first`, ... that `num_tokens` tokens of `running` fill."""
        if running.keys is not None:
            for index in range(first, num_tokens // self._limits.page_tokens):
                yield running.keys.key(index, running.token_ids)

    def _next_key(self, running: Running) -> bytes | None:
        """Return the key of the next page that `running` could share; its last token is always left to compute."""
        index = len(running.table)
        size = self._limits.page_tokens
        if running.keys is None or running.kv_len != index * size or (index + 1) * size >= running.committed_len:
            return None
        return running.keys.key(index, running.token_ids)

    def _known_pages(self, running: Running) -> list[int]:
        """Return the filled pages that go on where `running` is."""
        if self._next_key(running) is None:
            return []
        pages = []
        for key in self._keys(running, len(running.table), running.committed_len - 1):
            page = self._pages.find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def _adopt(self, running: Running, pages: Sequence[int]) -> None:
        if not pages:
            return
        num_tokens = len(pages) * self._limits.page_tokens
        self._pages.share(running.table, pages)
        running.block_table = None
        running.kv_len += num_tokens
        running.num_filled = len(running.table)
        if not running.restarted:
            running.num_cached_tokens += num_tokens
            self._counters.cached_tokens += num_tokens

    def _hold(self, running: Running, num_tokens: int) -> bool:
        """Find pages for committed tokens, preempting from the back; False when `running` itself had to go."""
        while True:
            try:
                self._grow(running, num_tokens)
            except OutOfPagesError:
                last = self._running[-1]
                self._running.remove(last)
                self._waiting.add(last)
                self._give_up(last)
                self._counters.preempted += 1
                if last is running:
                    return False
            else:
                return True

    def _grow(self, running: Running, num_tokens: int) -> None:
        if self._pages.pages_for(num_tokens) > len(running.table):
            self._pages.grow(running.table, num_tokens)
            running.block_table = None

    def _give_up(self, running: Running) -> None:
        self._pages.release(running.table)
        running.block_table = None
        running.kv_len = running.num_filled = 0
        running.moved_from = ()
        running.restarted = True
        running.known = {name: (generation, 0) for name, (generation, _) in running.known.items()}


def prompt_share(limits: SchedulerLimits, best_decoding: int | None, tier: int) -> int:
    """Return how many prompt tokens a round may hold once a prompt of `tier` is among them.

    Every prompt token of a round delays all that decode in it, so one number bounds how long a decoding request can be
    kept waiting. Nobody decodes (`best_decoding` is None): the large share, which is the fastest. Somebody does: the
    busy share; for a prompt of a lower tier than the best of them, half of it. Never 0, so that no prompt starves.
    """
    if best_decoding is None:
        return limits.prefill_tokens
    busy = min(limits.prefill_tokens, limits.prefill_tokens_busy)
    return max(busy if tier <= best_decoding else busy // 2, 1)
