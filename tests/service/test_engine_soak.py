"""Two thousand short requests through one engine: nothing is left behind, and no answer is wrong."""

import asyncio
import random
from collections.abc import Iterator

import pytest
from support.cells import RandomPlanner
from support.rounds import SMALL_VOCAB, Guessing, TokenRounds, answer, plain, started, token_engine
from support.trees import TreeProposer

from specserve.service.engine import Engine
from specserve.service.messages import Sampling
from specserve.service.proposers.prompt_lookup import PromptLookupProposer
from specserve.service.requests import GenerationRequest

NUM_REQUESTS = 2000
NUM_CLIENTS = 24
NUM_PAGES = 24


def arrivals(seed: int) -> Iterator[tuple[GenerationRequest, int | None]]:
    """Yield requests with the step after which each is given up, if it is: one in six, some before the first."""
    draw = random.Random(seed)
    for index in range(NUM_REQUESTS):
        length = draw.randint(1, 30)
        begins = draw.choice([(), tuple(range(1, 9)), tuple(range(5, 25))])
        prompt = (*begins, *(draw.randint(1, 3) for _ in range(length)))[: draw.randint(1, 34)]
        request = GenerationRequest(
            f"r{index}",
            prompt,
            Sampling(),
            draw.randint(1, 30),
            ignore_eos=True,
            tier=draw.choice(["priority", "default", "flex"]),
            priority=draw.randint(-1, 1),
            cache_salt=draw.choice(["", "a"]),
        )
        yield request, draw.choice([0, 1, 2]) if draw.random() < 0.17 else None


async def client(engine: Engine, work: Iterator[tuple[GenerationRequest, int | None]]) -> int:
    """Take requests from `work`, which all clients share, check every answer, and return how many there were."""
    served = 0
    for request, cancel_after in work:
        done = await answer(engine, request, cancel_after)
        expected = plain(request.prompt_token_ids, request.max_tokens)
        assert done.token_ids == (expected if cancel_after is None else expected[: len(done.token_ids)])
        served += 1
    return served


@pytest.mark.parametrize(
    ("lost", "scored"),
    [(False, False), (True, False), (True, True)],
    ids=["calm", "with target or verifier lost now and then", "with either lost after the target's part"],
)
def test_two_thousand_requests_leave_nothing_behind(lost: bool, scored: bool) -> None:
    async def main() -> None:
        draw = random.Random(9)
        failing = {number: draw.random() < 0.5 for number in range(20, 20_000, 61)} if lost else {}
        rounds = TokenRounds(NUM_PAGES, 4, lose=failing, scored_when_lost=scored)
        limits = {"max_running": 12, "prefill_tokens": 40, "prefill_tokens_busy": 16}
        asked = [request for request, _ in arrivals(4)]
        texts = {r.request_id: (*r.prompt_token_ids, *plain(r.prompt_token_ids, r.max_tokens)) for r in asked}
        trees = [TreeProposer(shape, texts, SMALL_VOCAB) for shape in ("mixed", "right_last")]
        proposers = [Guessing(0.7), PromptLookupProposer(1, 3), *trees]
        engine = token_engine(rounds, RandomPlanner(2), proposers, **limits)
        async with started(engine):
            work = arrivals(4)
            served = await asyncio.gather(*(client(engine, work) for _ in range(NUM_CLIENTS)))
        counters = engine.counters
        assert sum(served) == NUM_REQUESTS == counters.requests
        assert counters.finished + counters.cancelled == NUM_REQUESTS
        assert counters.cancelled > 200
        assert counters.preempted > 100
        assert counters.accepted_tokens > 1000
        assert counters.cached_tokens > 1000
        assert (counters.rounds_lost > 20) is lost
        assert (engine.num_running, engine.num_waiting, engine.num_free_pages) == (0, 0, NUM_PAGES)

    asyncio.run(asyncio.wait_for(main(), 120))
