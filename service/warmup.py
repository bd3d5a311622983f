"""Before the first request: run synthetic rounds, so that caches are warm and the planner knows what a round costs."""

import time
from collections.abc import Mapping
from typing import Protocol

from .errors import ProposerUnavailableError
from .messages import ProposeBatch, ProposeRow, Sampling, ScoreBatch, ScoreRow, VerifyBatch, VerifyRow
from .ports import Planner, ProposerPort, RoundCost, RoundPort

WARM_UP_ID = "warm-up"
TOKENS_PER_ROW = (1, 2, 3, 5, 9)
BATCH_SIZES = (1, 4, 16)
DRAFT_LENGTHS = (1, 4, 8)
REPEATS = 3
WARM_UP_TIMEOUT_S = 20.0
SCORED_ROUND, DRAFTED_ROUND = -2, -1
"""Before every round of a request; a proposer beside the target drafts for no round that was scored already."""


class WarmUpLimits(Protocol):
    """What of the engine's configuration matters here."""

    @property
    def page_tokens(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_running(self) -> int: ...


async def warm_up(
    round_port: RoundPort, proposers: Mapping[str, ProposerPort], planner: Planner, limits: WarmUpLimits
) -> None:
    """Teach `planner` the cost of rounds of several sizes and of every proposer's drafts. Cost: a second or so.

    Runs before any request exists, so it may write to any KV page.
    """
    batch_sizes = [size for size in BATCH_SIZES if size <= limits.max_running]
    for batch_size in batch_sizes:
        if batch_size * -(-16 // limits.page_tokens) > limits.num_pages:
            continue
        for num_tokens in TOKENS_PER_ROW:
            for repeat in range(REPEATS):
                score_ms = await _timed_round(round_port, batch_size, num_tokens, limits)
                if repeat:
                    planner.learn((), RoundCost(batch_size, batch_size * num_tokens, score_ms, ()))
    for port in proposers.values():
        for gamma in DRAFT_LENGTHS:
            for repeat in range(REPEATS):
                spent = await _timed_draft(port, gamma, limits)
                if repeat and spent is not None:
                    planner.learn((), RoundCost(1, 0, 0.0, ((port.name, gamma, spent),)))


async def _timed_round(round_port: RoundPort, batch_size: int, num_tokens: int, limits: WarmUpLimits) -> float:
    pages = -(-16 // limits.page_tokens)
    tokens = tuple(token % limits.vocab_size for token in range(5, 5 + num_tokens))
    rows = tuple(
        ScoreRow(f"{WARM_UP_ID}-{row}", 0, tokens, num_tokens, tuple(range(row * pages, (row + 1) * pages)))
        for row in range(batch_size)
    )
    verify = tuple(VerifyRow(row.request_id, 1, Sampling(), tokens[1:], None, None, None) for row in rows)
    started = time.perf_counter()
    await round_port.run_round(ScoreBatch(SCORED_ROUND, rows), VerifyBatch(SCORED_ROUND, verify))
    return (time.perf_counter() - started) * 1e3


async def _timed_draft(port: ProposerPort, gamma: int, limits: WarmUpLimits) -> float | None:
    pages = tuple(range(-(-(4 + gamma) // limits.page_tokens))) if port.needs_pages else ()
    row = ProposeRow(WARM_UP_ID, 4, 0, (5, 6, 5, 6), gamma, Sampling(), block_table=pages)
    started = time.perf_counter()
    try:
        await port.propose(ProposeBatch(DRAFTED_ROUND, port.name, (row,), ()), WARM_UP_TIMEOUT_S)
        spent = (time.perf_counter() - started) * 1e3
        await port.propose(ProposeBatch(DRAFTED_ROUND, port.name, (), (WARM_UP_ID,)), WARM_UP_TIMEOUT_S)
    except ProposerUnavailableError:
        return None
    return spent
