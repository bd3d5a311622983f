"""The engine's book on one request: its tokens, its pages, its counters, its stream."""

import asyncio
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from .alignment import Alignment
from .commit import Output, ending_token_ids
from .errors import SpecserveError
from .history import TokenCounts
from .messages import Constraint, Draft, VerifyRow
from .ports import RequestView
from .prefix import PrefixKeys
from .requests import GenerationRequest, RequestSummary, StepOutput

Rank = tuple[int, int, int]
"""Tier, priority number, order of arrival: the smaller is served first. No two requests have the same."""


class RequestStream:
    """What the caller holds of a request: iterate it for the rounds' output, or cancel it."""

    def __init__(self, request_id: str, on_cancel: Callable[[], None] | None = None) -> None:
        self.request_id = request_id
        self.cancelled = False
        self._on_cancel = on_cancel
        self._queue: asyncio.Queue[StepOutput | SpecserveError] = asyncio.Queue()
        self._done = False

    def cancel(self) -> None:
        """Give the request up; its pages and drafts are freed before the next round."""
        if not self.cancelled:
            self.cancelled = True
            if self._on_cancel is not None:
                self._on_cancel()

    def put(self, output: StepOutput | SpecserveError) -> None:
        """Hand one round's output, or the error that ends the stream, to the reader."""
        self._queue.put_nowait(output)

    def __aiter__(self) -> AsyncIterator[StepOutput]:
        return self

    async def __anext__(self) -> StepOutput:
        if self._done:
            raise StopAsyncIteration
        output = await self._queue.get()
        if isinstance(output, SpecserveError):
            self._done = True
            raise output
        self._done = output.finish_reason is not None
        return output


@dataclass(slots=True, eq=False)
class Running:
    """State of one admitted or waiting request. `kv_len` committed tokens have their KV rows in `table`; those of the
    last `len(moved_from)` are at these positions' slots, where a tree left them, until the next round moves them.

    `block_table` is `table` as messages carry it, None when that must be made anew. The first `num_filled` pages are
    known by their keys and never written again. `restarted`: the KV was given up at least once, so that what is found
    in the cache may be its own work.
    """

    request: GenerationRequest
    stream: RequestStream
    arrived_s: float
    token_ids: list[int]
    rank: Rank = (0, 0, 0)
    keys: PrefixKeys | None = None
    kv_len: int = 0
    moved_from: tuple[int, ...] = ()
    table: list[int] = field(default_factory=list)
    block_table: tuple[int, ...] | None = None
    num_filled: int = 0
    num_cached_tokens: int = 0
    restarted: bool = False
    output: Output = field(default_factory=Output)
    counts: TokenCounts | None = None
    known: dict[str, tuple[int, int]] = field(default_factory=dict)
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_counts: Counter[int] = field(default_factory=Counter)
    max_gamma: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    proposers: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.request.prediction_token_ids is not None:
            self.output.alignment = Alignment(self.request.prediction_token_ids)

    def pages(self) -> tuple[int, ...]:
        """Return the pages held, as messages carry them."""
        if self.block_table is None:
            self.block_table = tuple(self.table)
        return self.block_table

    @property
    def committed_len(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def placed_len(self) -> int:
        """Committed tokens whose KV rows are at their own positions."""
        return self.kv_len - len(self.moved_from)

    @property
    def reach(self) -> int:
        """Positions whose slots are needed: those of the committed tokens, and those still to be moved from."""
        return max(self.committed_len, self.moved_from[-1] + 1) if self.moved_from else self.committed_len

    @property
    def decoding(self) -> bool:
        """True when only the last committed token lacks its KV row: the request can decode, and speculate."""
        return self.kv_len == self.committed_len - 1

    @property
    def remaining_tokens(self) -> int:
        """Tokens the request may still produce."""
        return self.request.max_tokens - len(self.output.token_ids)

    def view(self, remaining_tokens: int) -> RequestView:
        """Return what the planner may know; `remaining_tokens` may still be committed."""
        request = self.request
        return RequestView(
            request.request_id,
            request.tier,
            request.mode,
            request.max_draft_tokens,
            request.proposer,
            self.committed_len,
            remaining_tokens,
            bool(request.prediction_token_ids),
        )

    def verify_row(self, draft: Draft | None, eos_token_ids: tuple[int, ...]) -> VerifyRow:
        """Return what the verifier needs to decide the next tokens, `draft` among them."""
        sampling = self.request.sampling
        if sampling.penalised and self.counts is None:
            self.counts = TokenCounts(self.request.prompt_token_ids, sampling)
        num_barred = max(self.request.min_tokens - len(self.output.token_ids), 0)
        grammar = self.request.grammar
        return VerifyRow(
            self.request.request_id,
            self.committed_len,
            sampling,
            draft.token_ids if draft is not None else (),
            draft.support_ids if draft is not None else None,
            draft.support_probs if draft is not None else None,
            self.request.num_logprobs,
            None if self.counts is None else self.counts.history(self.output.token_ids),
            ending_token_ids(self.request, eos_token_ids) if num_barred else (),
            num_barred,
            parents=draft.parents if draft is not None else None,
            constraint=None if grammar is None else Constraint(grammar, tuple(self.output.token_ids)),
        )

    def observe(self, reason: str, proposer: str | None, num_drafted: int, num_accepted: int) -> None:
        """Count one round; a round without drafts is no speculation round."""
        self.num_rounds += 1
        self.reasons[reason] += 1
        if num_drafted == 0 or proposer is None:
            return
        self.proposers[proposer] += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.accepted_counts[num_accepted] += 1
        self.max_gamma = max(self.max_gamma, num_drafted)

    def tpot_ms(self, now_s: float) -> float | None:
        """Return the milliseconds that each output token after the first took; None when there is none."""
        num_tokens = len(self.output.token_ids) - 1
        return (
            (now_s - self.first_token_s) * 1e3 / num_tokens if self.first_token_s is not None and num_tokens else None
        )

    def summary(self, now_s: float, policy_version: int) -> RequestSummary:
        """Return the counters as they stand, with the commonest reason and proposer."""
        started = self.admitted_s if self.admitted_s is not None else now_s
        first = self.first_token_s if self.first_token_s is not None else now_s
        alignment = self.output.alignment
        return RequestSummary(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=len(self.output.token_ids),
            cached_tokens=self.num_cached_tokens,
            num_rounds=self.num_rounds,
            num_spec_rounds=self.accepted_counts.total(),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            acceptance_histogram=tuple(self.accepted_counts[k] for k in range(self.max_gamma + 1)),
            mode=self.request.mode,
            reason=self.reasons.most_common(1)[0][0] if self.reasons else "single_round",
            proposer=self.proposers.most_common(1)[0][0] if self.proposers else None,
            tier=self.request.tier,
            policy_version=policy_version,
            queue_ms=(started - self.arrived_s) * 1e3,
            time_to_first_token_ms=(first - self.arrived_s) * 1e3,
            generation_ms=(now_s - first) * 1e3,
            accepted_prediction_tokens=alignment.num_appeared if alignment is not None else None,
        )


class Ranking:
    """Requests in the order of their ranks. Cost: O(log n) comparisons to add or remove one."""

    def __init__(self) -> None:
        self._items: list[Running] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Running]:
        return iter(self._items)

    def __getitem__(self, place: int) -> Running:
        return self._items[place]

    def __contains__(self, running: Running) -> bool:
        place = bisect_left(self._items, running.rank, key=_rank)
        return place < len(self._items) and self._items[place] is running

    def add(self, running: Running) -> None:
        """Put `running` in its place."""
        insort(self._items, running, key=_rank)

    def remove(self, running: Running) -> None:
        """Take `running` out."""
        place = bisect_left(self._items, running.rank, key=_rank)
        assert self._items[place] is running
        del self._items[place]


def _rank(running: Running) -> Rank:
    return running.rank
