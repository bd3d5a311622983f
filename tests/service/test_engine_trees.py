"""Trees change no token: every shape against plain decoding, over pages, losses, preemption and cached prefixes."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.cells import VOCAB_SIZE, Cell, FixedPlanner, RandomPlanner, save_tiny_llama
from support.rounds import SMALL_VOCAB, Guessing, TokenRounds, answer, model_engine, plain, started, token_engine
from support.trees import SHAPES, TreeProposer

from specserve.service.messages import Sampling, ScoreBatch
from specserve.service.ports import Planner
from specserve.service.requests import GenerationRequest
from specserve.service.stats import EngineStats

GREEDY = Sampling()
SEEDED = Sampling(greedy=False, temperature=0.8, top_p=0.95, seed=11)


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + 7 * place) % 39 + 1 for place in range(length))


def token_requests(count: int, max_tokens: int = 24) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"r{i}", prompt(3 + 5 * i % 17, i % 3), GREEDY, max_tokens, ignore_eos=True)
        for i in range(count)
    ]


def answer_tokens(
    shapes: Sequence[str],
    planner: Planner,
    requests: Sequence[GenerationRequest],
    rounds: TokenRounds,
    **limits: int,
) -> EngineStats:
    """Answer `requests` together over pages of tokens; every answer must be the plain one."""
    texts = {r.request_id: (*r.prompt_token_ids, *plain(r.prompt_token_ids, r.max_tokens)) for r in requests}
    proposers = [TreeProposer(shape, texts, SMALL_VOCAB) for shape in shapes]

    async def main() -> EngineStats:
        async with started(token_engine(rounds, planner, [*proposers, Guessing(0.7)], **limits)) as engine:
            done = await asyncio.gather(*(answer(engine, request) for request in requests))
        for request, found in zip(requests, done, strict=True):
            assert found.token_ids == plain(request.prompt_token_ids, request.max_tokens)
        return engine.counters

    return asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("page_tokens", [1, 3, 4, 16])
@pytest.mark.parametrize("gamma", [4, 7, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_tree_changes_a_token_across_pages(shape: str, gamma: int, page_tokens: int) -> None:
    planner = FixedPlanner(f"tree_{shape}", gamma)
    counters = answer_tokens([shape], planner, token_requests(2), TokenRounds(200, page_tokens))
    accepted = sum(outcome.num_accepted for outcome in planner.outcomes)
    assert accepted == counters.accepted_tokens
    assert accepted == 0 if shape == "all_wrong" else accepted > 8
    assert all(outcome.num_accepted <= outcome.num_drafted <= outcome.num_asked for outcome in planner.outcomes)


@pytest.mark.parametrize("seed", range(4))
def test_trees_and_chains_in_one_batch_change_no_token(seed: int) -> None:
    answer_tokens(list(SHAPES), RandomPlanner(seed), token_requests(8), TokenRounds(300, 4))


@pytest.mark.parametrize("verdicts", [False, True], ids=["before scoring", "after scoring"])
@pytest.mark.parametrize("kv", [False, True], ids=["verifier", "target"])
def test_a_lost_round_after_a_tree_is_played_again(kv: bool, verdicts: bool) -> None:
    """Whether the rows of the accepted path were moved already or not, they are moved once."""
    lose = dict.fromkeys([*range(3, 40, 3), 7, 8, 20, 21, 22], kv)
    rounds = TokenRounds(200, 4, lose=lose, scored_when_lost=verdicts)
    counters = answer_tokens(["right_last", "mixed"], RandomPlanner(1), token_requests(4), rounds)
    assert counters.rounds_lost > 5


def test_preemption_between_a_tree_and_its_move_changes_no_token() -> None:
    rounds = TokenRounds(24, 4)
    counters = answer_tokens(["right_last", "mixed"], RandomPlanner(2), token_requests(8), rounds, max_running=6)
    assert counters.preempted > 0


def test_cached_prefixes_hold_no_row_of_a_tree_that_was_not_moved() -> None:
    """Each request asks for what the one before it said, which ended with a tree."""
    said, requests = prompt(5), []
    for number in range(8):
        requests.append(GenerationRequest(f"r{number}", said, GREEDY, 9, ignore_eos=True))
        said = (*said, *plain(said, 9), 5)
    texts = {r.request_id: (*r.prompt_token_ids, *plain(r.prompt_token_ids, r.max_tokens)) for r in requests}

    async def main() -> None:
        proposer = TreeProposer("right_last", texts, SMALL_VOCAB)
        planner = FixedPlanner("tree_right_last", 12)
        async with started(token_engine(TokenRounds(64, 4), planner, [proposer])) as engine:
            done = [await answer(engine, request) for request in requests]
            assert engine.counters.cached_tokens > 40
        for request, found in zip(requests, done, strict=True):
            assert found.token_ids == plain(request.prompt_token_ids, request.max_tokens)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_neither_depth_nor_nodes_leave_the_context() -> None:
    batches: list[ScoreBatch] = []
    rounds = TokenRounds(64, 4, before=batches.append)
    request = GenerationRequest("r", prompt(10), GREEDY, 22, ignore_eos=True)
    answer_tokens(["right_last"], FixedPlanner("tree_right_last", 30), [request], rounds, max_model_len=32)
    assert max(row.start_position + len(row.token_ids) for batch in batches for row in batch.rows) <= 32
    assert any(row.parents is not None for batch in batches for row in batch.rows)


def test_a_tree_that_is_a_chain_travels_as_a_chain() -> None:
    batches: list[ScoreBatch] = []
    rounds = TokenRounds(64, 4, before=batches.append)
    request = GenerationRequest("r", prompt(10), GREEDY, 22, ignore_eos=True)
    answer_tokens(["in_place"], FixedPlanner("tree_in_place", 1), [request], rounds)
    assert all(row.parents is None and not row.moved_from for batch in batches for row in batch.rows)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder: Path = tmp_path_factory.mktemp("models")
    return Cell(save_tiny_llama(folder / "target", 1), draft=save_tiny_llama(folder / "draft", 2, layers=1))


def model_requests(count: int, sampling: Sampling) -> list[GenerationRequest]:
    prompts = [tuple((7 * i + 3 * place) % 50 + 10 for place in range(3 + 5 * i % 23)) for i in range(count)]
    return [
        GenerationRequest(f"r{i}", tokens, replace(sampling, seed=i), 20, ignore_eos=True)
        for i, tokens in enumerate(prompts)
    ]


def answers(
    cell: Cell, planner: Planner, requests: Sequence[GenerationRequest], texts: Mapping[str, Sequence[int]]
) -> list[tuple[int, ...]]:
    proposers = [TreeProposer(shape, texts, VOCAB_SIZE) for shape in SHAPES] if texts else []

    async def main() -> list[tuple[int, ...]]:
        with ThreadPoolExecutor(1) as executor:
            async with started(model_engine(cell, planner, executor, proposers)) as engine:
                done = await asyncio.gather(*(answer(engine, request) for request in requests))
        return [found.token_ids for found in done]

    return asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("count", [1, 8])
def test_trees_give_a_models_plain_answer(cell: Cell, sampling: Sampling, count: int) -> None:
    requests = model_requests(count, sampling)
    alone = answers(cell, FixedPlanner(None, 0), requests, {})
    texts = {r.request_id: (*r.prompt_token_ids, *tokens) for r, tokens in zip(requests, alone, strict=True)}
    for shape in SHAPES:
        planner = FixedPlanner(f"tree_{shape}", 9)
        assert answers(cell, planner, requests, texts) == alone, shape
        accepted = sum(outcome.num_accepted for outcome in planner.outcomes)
        assert accepted == 0 if shape == "all_wrong" else accepted > 4 * count, shape
    assert answers(cell, RandomPlanner(count), requests, texts) == alone
