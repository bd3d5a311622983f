"""Prefix caching changes no token, finds what it should, and never what belongs to another salt."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.cells import Cell, Finished, FixedPlanner, save_tiny_llama
from support.rounds import Guessing, TokenRounds, answer, model_engine, plain, started, token_engine

from specserve.service.messages import Sampling
from specserve.service.requests import GenerationRequest

GREEDY = Sampling()
SEEDED = Sampling(greedy=False, temperature=0.8, top_p=0.95, seed=11)
PAGE = 4


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder: Path = tmp_path_factory.mktemp("models")
    return Cell(save_tiny_llama(folder / "target", 1), draft=save_tiny_llama(folder / "draft", 2, layers=1))


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + 7 * place) % 39 + 1 for place in range(length))


def request(name: str, tokens: Sequence[int], salt: str = "", max_tokens: int = 9) -> GenerationRequest:
    return GenerationRequest(name, tuple(tokens), GREEDY, max_tokens, ignore_eos=True, cache_salt=salt)


def cached(done: Finished) -> int:
    summary = done.steps[-1].summary
    assert summary is not None
    return summary.cached_tokens


def in_turn(requests: Sequence[GenerationRequest], **limits: int) -> list[Finished]:
    """Answer `requests` one after the other with drafts that are often wrong; each answer must be the plain one."""

    async def main() -> list[Finished]:
        rounds = TokenRounds(limits.pop("num_pages", 64), PAGE)
        async with started(token_engine(rounds, FixedPlanner("guessing", 5), [Guessing(0.6)], **limits)) as engine:
            done = [await answer(engine, wanted) for wanted in requests]
        assert engine.counters.cached_tokens == sum(map(cached, done))
        assert engine.counters.prompt_tokens == sum(len(wanted.prompt_token_ids) for wanted in requests)
        return done

    done = asyncio.run(asyncio.wait_for(main(), 60))
    for wanted, found in zip(requests, done, strict=True):
        assert found.token_ids == plain(wanted.prompt_token_ids, wanted.max_tokens)
    return done


@pytest.mark.parametrize("length", range(1, 14))
def test_the_same_prompt_is_found_but_for_its_last_token(length: int) -> None:
    first, second = in_turn([request("a", prompt(length)), request("b", prompt(length))])
    assert cached(first) == 0
    assert cached(second) == (length - 1) // PAGE * PAGE


def test_a_conversation_that_goes_on_finds_prompt_and_answer() -> None:
    for length in range(1, 9):
        said = prompt(length)
        answered = plain(said, 9)
        longer = (*said, *answered, 5, 6, 7)
        _, second = in_turn([request("a", said), request("b", longer)])
        assert cached(second) == (length + 8) // PAGE * PAGE


def test_only_the_common_beginning_is_found() -> None:
    said = prompt(16)
    others = [(*said[:same], 38, *said[same + 1 :]) for same in range(16)]
    done = in_turn([request("a", said), *(request(f"o{i}", other) for i, other in enumerate(others))])
    assert [cached(one) for one in done[1:]] == [same // PAGE * PAGE for same in range(16)]


def test_another_salt_finds_nothing_and_the_same_salt_does() -> None:
    done = in_turn([request(f"r{i}", prompt(13), salt) for i, salt in enumerate(["", "x", "y", "x", "", "X"])])
    assert [cached(one) for one in done] == [0, 0, 0, 12, 12, 0]


def test_caching_can_be_switched_off() -> None:
    done = in_turn([request("a", prompt(13)), request("b", prompt(13))], prefix_caching=False)
    assert [cached(one) for one in done] == [0, 0]


def test_room_is_made_by_forgetting_the_oldest() -> None:
    """Eight pages; each request fills five and a bit, so that nothing of the one before the last can be whole."""
    said = [prompt(20, first) for first in (1, 2, 3)]
    done = in_turn([request(f"r{i}", said[i % 3], max_tokens=4) for i in range(9)], num_pages=8)
    assert all(cached(one) < 16 for one in done)
    twice = in_turn([request(f"r{i}", said[i // 2], max_tokens=4) for i in range(6)], num_pages=8)
    assert [cached(one) for one in twice[1::2]] == [16] * 3


def test_of_requests_together_with_one_prompt_only_the_first_computes_it(cell: Cell) -> None:
    async def main() -> None:
        requests = [replace(request(f"r{i}", prompt(30)), sampling=replace(SEEDED, seed=i)) for i in range(6)]
        with ThreadPoolExecutor(1) as executor:
            async with started(model_engine(cell, FixedPlanner("draft", 3), executor)) as engine:
                done = await asyncio.gather(*(answer(engine, wanted) for wanted in requests))
            async with started(model_engine(cell, FixedPlanner(None, 0), executor, prefix_caching=False)) as engine:
                alone = [await answer(engine, wanted) for wanted in requests]
        assert [one.token_ids for one in done] == [one.token_ids for one in alone]
        assert [cached(one) for one in done] == [0, 28, 28, 28, 28, 28]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_was_known_is_gone_with_the_targets_kv() -> None:
    """The pages of the fake are wiped with it, so a page still believed in would give a wrong token."""

    async def main() -> None:
        rounds = TokenRounds(64, PAGE)
        async with started(token_engine(rounds, FixedPlanner("guessing", 5), [Guessing(0.7)])) as engine:
            before = await answer(engine, request("a", prompt(13)))
            rounds.lose = {engine.counters.rounds + 3: True}
            during = await asyncio.gather(*(answer(engine, request(f"d{i}", prompt(13 + i))) for i in range(3)))
            assert engine.counters.rounds_lost == 1
            rounds.lose = {engine.counters.rounds: True}
            after = await answer(engine, request("b", prompt(9, 5)))
            assert cached(after) == 0
        assert before.token_ids == plain(prompt(13), 9)
        assert [one.token_ids for one in during] == [plain(prompt(13 + i), 9) for i in range(3)]
        assert after.token_ids == plain(prompt(9, 5), 9)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_lost_verifier_costs_neither_tokens_nor_pages() -> None:
    async def main() -> None:
        rounds = TokenRounds(64, PAGE, lose=dict.fromkeys(range(2, 40, 3), False))
        async with started(token_engine(rounds, FixedPlanner("guessing", 5), [Guessing(0.7)])) as engine:
            done = await asyncio.gather(*(answer(engine, request(f"d{i}", prompt(13 + i))) for i in range(3)))
        assert engine.counters.rounds_lost > 0
        assert [one.token_ids for one in done] == [plain(prompt(13 + i), 9) for i in range(3)]

    asyncio.run(asyncio.wait_for(main(), 60))
