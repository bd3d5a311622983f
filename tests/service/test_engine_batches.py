"""Requests join and leave in any round, in batches of 1 to 32, in chunks and after preemptions: no token changes."""

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cells import Cell, FixedPlanner, RandomPlanner, ScriptedProposer, save_tiny_llama
from support.rounds import Guessing, TokenRounds, answer, model_engine, plain, started, token_engine

from specserve.service.engine import Engine
from specserve.service.errors import BadRequestError
from specserve.service.messages import Sampling, ScoreBatch
from specserve.service.ports import Planner, Proposer
from specserve.service.requests import GenerationRequest
from specserve.service.stats import EngineStats


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder: Path = tmp_path_factory.mktemp("models")
    return Cell(save_tiny_llama(folder / "target", 1), draft=save_tiny_llama(folder / "draft", 2, layers=1))


def requests(count: int) -> list[GenerationRequest]:
    """Prompts of 1 to 40 tokens, some alike; greedy and seeded; every tier."""
    draw = random.Random(7)
    made = []
    for index in range(count):
        first, length = draw.choice([10, 20, 30]), draw.randint(1, 40)
        prompt = tuple((first + 3 * place) % 50 + 1 for place in range(length))
        seeded = Sampling(greedy=False, temperature=0.8, top_p=0.95, seed=index)
        sampling = draw.choice([Sampling(), seeded])
        tier = draw.choice(["priority", "default", "flex"])
        made.append(GenerationRequest(f"r{index}", prompt, sampling, draw.randint(1, 16), ignore_eos=True, tier=tier))
    return made


@pytest.fixture(scope="module")
def alone(cell: Cell) -> list[tuple[int, ...]]:
    """Every request's answer by plain decoding with nobody else there."""

    async def main() -> list[tuple[int, ...]]:
        with ThreadPoolExecutor(1) as executor:
            async with started(model_engine(cell, FixedPlanner(None, 0), executor, prefix_caching=False)) as engine:
                return [(await answer(engine, wanted)).token_ids for wanted in requests(32)]

    return asyncio.run(main())


async def joining(
    engine: Engine, wanted: GenerationRequest, at_round: int, cancel_after: int | None
) -> tuple[int, ...]:
    """Submit in round `at_round` or as soon as nothing else is going on, and return the tokens."""
    while engine.counters.rounds < at_round and engine.num_running + engine.num_waiting:
        await asyncio.sleep(0.001)  # not 0: dozens of waiting tasks would keep the interpreter from the rounds' thread
    return (await answer(engine, wanted, cancel_after)).token_ids


def check(
    cell: Cell, planner: Planner, extra: Sequence[Proposer], expected: Sequence[tuple[int, ...]], **limits: int
) -> EngineStats:
    """Let the requests join at random rounds, a quarter of them leave early; compare with `expected`."""
    draw = random.Random(len(expected))
    wanted = requests(len(expected))
    leaves = [draw.randint(0, 3) if draw.random() < 0.25 else None for _ in wanted]

    async def main() -> EngineStats:
        with ThreadPoolExecutor(1) as executor:
            async with started(model_engine(cell, planner, executor, extra, **limits)) as engine:
                jobs = [
                    joining(engine, one, draw.randint(0, 24), leave) for one, leave in zip(wanted, leaves, strict=True)
                ]
                found = await asyncio.gather(*jobs)
            for tokens, right, leave in zip(found, expected, leaves, strict=True):
                assert tokens == (right if leave is None else right[: len(tokens)])
            return engine.counters

    return asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 17, 32])
def test_who_else_is_in_the_batch_changes_nothing(cell: Cell, alone: list[tuple[int, ...]], count: int) -> None:
    check(cell, RandomPlanner(count), [], alone[:count])


@pytest.mark.parametrize(
    "name", ["prompt_lookup", "suffix", "draft", "random", "constant", "eos", "broken", "stale", "outside"]
)
def test_no_proposer_changes_a_token_in_a_batch_of_32(cell: Cell, alone: list[tuple[int, ...]], name: str) -> None:
    extra = [] if name in ("prompt_lookup", "suffix", "draft") else [ScriptedProposer(name)]
    check(cell, FixedPlanner(name, 5), extra, alone)


@pytest.mark.parametrize("name", ["prompt_lookup", "draft", "random"])
def test_preemption_changes_no_token_whoever_proposes(cell: Cell, alone: list[tuple[int, ...]], name: str) -> None:
    extra = [ScriptedProposer(name)] if name == "random" else []
    counters = check(cell, FixedPlanner(name, 5), extra, alone, num_pages=20, max_running=12)
    assert counters.preempted > 0


@pytest.mark.parametrize("name", ["prompt_lookup", "draft", "random"])
@pytest.mark.parametrize("prefill_tokens", [1, 5, 16])
def test_chunks_change_no_token_whoever_proposes(
    cell: Cell, alone: list[tuple[int, ...]], name: str, prefill_tokens: int
) -> None:
    extra = [ScriptedProposer(name)] if name == "random" else []
    check(cell, FixedPlanner(name, 5), extra, alone[:16], prefill_tokens=prefill_tokens)


def test_a_long_prompt_delays_a_decoding_request_by_no_more_than_its_share() -> None:
    """The decoding request gets a token in every round, and no round holds more prompt than `prefill_tokens_busy`."""
    batches: list[ScoreBatch] = []

    async def main() -> None:
        rounds = TokenRounds(256, 4, before=batches.append)
        engine = token_engine(rounds, FixedPlanner(None, 0), prefill_tokens=400, prefill_tokens_busy=24)
        async with started(engine):
            first = GenerationRequest("first", (1, 2), Sampling(), 60, ignore_eos=True)
            stream = engine.submit(first)
            await anext(stream)
            prompt = tuple(place % 30 + 1 for place in range(400))
            long = asyncio.create_task(answer(engine, GenerationRequest("long", prompt, Sampling(), 3)))
            tokens = [token for step in [step async for step in stream] for token in step.token_ids]
            assert (await long).token_ids == plain(prompt, 3)
        assert len(tokens) == 59

    asyncio.run(asyncio.wait_for(main(), 60))
    together = [batch for batch in batches if len(batch.rows) == 2]
    assert len(together) > 400 // 24
    for batch in together:
        assert {row.request_id: row.num_sampled for row in batch.rows}["first"] == 1
        assert sum(len(row.token_ids) for row in batch.rows if row.request_id == "long") <= 24


def test_two_requests_of_one_name_are_not_served_at_once() -> None:
    async def main() -> None:
        async with started(token_engine(TokenRounds(16, 4), FixedPlanner(None, 0))) as engine:
            stream = engine.submit(GenerationRequest("twin", (1, 2), Sampling(), 4))
            with pytest.raises(BadRequestError):
                engine.submit(GenerationRequest("twin", (3, 4), Sampling(), 4))
            async for _ in stream:
                pass
            again = await answer(engine, GenerationRequest("twin", (3, 4), Sampling(), 4))
            assert again.token_ids == plain((3, 4), 4)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_cancelling_twice_or_too_late_does_nothing() -> None:
    async def main() -> None:
        async with started(token_engine(TokenRounds(16, 4), FixedPlanner("guessing", 2), [Guessing(0.5)])) as engine:
            first = engine.submit(GenerationRequest("a", (1, 2), Sampling(), 4))
            async for _ in first:
                pass
            first.cancel()
            second = engine.submit(GenerationRequest("a", (1, 2), Sampling(), 4))
            third = engine.submit(GenerationRequest("b", (1, 2), Sampling(), 4))
            third.cancel()
            third.cancel()
            assert [token for step in [step async for step in second] for token in step.token_ids] == list(
                plain((1, 2), 4)
            )
        assert engine.counters.cancelled == 1
        assert engine.counters.finished == 2

    asyncio.run(asyncio.wait_for(main(), 60))
