"""Page boundaries, the end of the context, the end of the pool: drafts are cut there and no token changes."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cells import Cell, FixedPlanner, Reckless, ScriptedProposer, save_tiny_llama
from support.rounds import Guessing, TokenRounds, answer, model_engine, plain, started, token_engine

from specserve.service.messages import DraftBatch, ProposeBatch, Sampling
from specserve.service.requests import GenerationRequest

PAGE = 4
CONTEXT = 24
SEEDED = Sampling(greedy=False, temperature=0.8, top_p=0.95, seed=11)


class Answers:
    """Right or wrong about every request, from the answers known beforehand."""

    def __init__(self, name: str, answers: dict[str, dict[int, int]]) -> None:
        self.name = name
        self._one = {request_id: ScriptedProposer(name, known) for request_id, known in answers.items()}

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        drafts = []
        for row in batch.rows:
            alone = ProposeBatch(batch.round, self.name, (row,))
            drafts.extend(self._one[row.request_id].propose(alone).drafts)
        return DraftBatch(batch.round, tuple(drafts), 0)


def prompt(length: int) -> tuple[int, ...]:
    return tuple((5 * place + length) % 30 + 1 for place in range(length))


def to_the_edge(length: int) -> GenerationRequest:
    return GenerationRequest(f"r{length}", prompt(length), SEEDED, CONTEXT - length, ignore_eos=True)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder: Path = tmp_path_factory.mktemp("models")
    return Cell(save_tiny_llama(folder / "target", 1), draft=save_tiny_llama(folder / "draft", 2, layers=1))


@pytest.fixture(scope="module")
def answers(cell: Cell) -> dict[int, tuple[int, ...]]:
    """Plain decoding's answer to a prompt of each length, up to the last token of the context."""

    async def main() -> dict[int, tuple[int, ...]]:
        with ThreadPoolExecutor(1) as executor:
            engine = model_engine(cell, FixedPlanner(None, 0), executor, max_model_len=CONTEXT, prefix_caching=False)
            async with started(engine):
                return {n: (await answer(engine, to_the_edge(n))).token_ids for n in range(1, CONTEXT)}

    return asyncio.run(main())


@pytest.mark.parametrize("gamma", range(9))
@pytest.mark.parametrize("name", ["prompt_lookup", "draft", "right", "wrong", "random", "eos"])
def test_every_offset_to_a_page_and_to_the_end_of_the_context_is_plain_decodings(
    cell: Cell, answers: dict[int, tuple[int, ...]], name: str, gamma: int
) -> None:
    """Lengths 1 to 23 of 24 tokens in pages of 4: each draft begins at every place in a page, and meets the end."""
    known = {f"r{n}": {n + place: token for place, token in enumerate(found)} for n, found in answers.items()}
    extra = [Answers(name, known)] if name not in ("prompt_lookup", "draft") else []

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            planner = Reckless(name, gamma)
            engine = model_engine(cell, planner, executor, extra, max_model_len=CONTEXT, prefill_tokens=40)
            async with started(engine):
                done = await asyncio.gather(*(answer(engine, to_the_edge(n)) for n in answers))
            assert [one.token_ids for one in done] == list(answers.values())
            assert all(outcome.num_drafted <= outcome.num_asked for outcome in planner.outcomes)
            if name == "right" and gamma:
                assert all(outcome.num_accepted == outcome.num_asked for outcome in planner.outcomes)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("gamma", range(9))
@pytest.mark.parametrize("length", range(1, 16))
def test_a_request_as_large_as_the_pool_gets_its_drafts_cut(length: int, gamma: int) -> None:
    wanted = GenerationRequest("r", prompt(length), Sampling(), 16 - length, ignore_eos=True)

    async def main() -> None:
        rounds = TokenRounds(4, PAGE)
        async with started(token_engine(rounds, Reckless("guessing", gamma), [Guessing(0.8)])) as engine:
            done = await answer(engine, wanted)
        assert done.token_ids == plain(wanted.prompt_token_ids, wanted.max_tokens)
        assert engine.counters.preempted == 0

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("gamma", range(1, 9))
def test_nobody_is_preempted_for_a_draft(gamma: int) -> None:
    """Three requests whose committed tokens fill the pool to its last page: drafts find room or are cut."""
    requests = [GenerationRequest(f"r{i}", prompt(5 + i), Sampling(), 11 - i, ignore_eos=True) for i in range(3)]

    async def main() -> None:
        rounds = TokenRounds(12, PAGE)
        async with started(token_engine(rounds, Reckless("guessing", gamma), [Guessing(0.5)])) as engine:
            done = await asyncio.gather(*(answer(engine, wanted) for wanted in requests))
        assert [one.token_ids for one in done] == [plain(r.prompt_token_ids, r.max_tokens) for r in requests]
        assert engine.counters.preempted == 0
        assert engine.counters.draft_tokens > 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_draft_without_a_free_page_is_not_even_asked_for() -> None:
    planner = Reckless("guessing", 8)

    async def main() -> None:
        rounds = TokenRounds(2, PAGE)
        async with started(token_engine(rounds, planner, [Guessing(1.0)])) as engine:
            one = GenerationRequest("r", prompt(5), Sampling(), 3, ignore_eos=True)
            done = await answer(engine, one)
        assert done.token_ids == plain(one.prompt_token_ids, 3)
        assert [outcome.num_asked for outcome in planner.outcomes] == [1]

    asyncio.run(asyncio.wait_for(main(), 60))
