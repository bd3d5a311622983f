"""Speculation must not change a token: every proposer, alone and mixed, against plain decoding, in float64."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from support.cells import Cell, FixedPlanner, ScriptedProposer, save_tiny_llama
from support.everybody import (
    HEAD_CHAINS,
    MIXTURES,
    NUM_REQUESTS,
    PROPOSERS,
    SAMPLINGS,
    SITUATIONS,
    SUFFIXES,
    Everybody,
    Rotating,
    check,
    inline,
)
from support.rounds import answer

from specserve.service.messages import Acceptance, Sampling
from specserve.service.requests import GenerationRequest

CASES = [*product(PROPOSERS, SAMPLINGS), *((name, "greedy") for name in HEAD_CHAINS)]
COUNTS = [
    (count, situation)
    for count in (1, NUM_REQUESTS)
    for situation in SITUATIONS
    if count > 1 or situation != "preemption"
]


@pytest.mark.parametrize(("count", "situation"), COUNTS)
@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_no_proposer_changes_a_token(
    everybody: Everybody, name: str, sampling: str, count: int, situation: str
) -> None:
    planner = Rotating([name])
    check(everybody, planner, [name], sampling, count, situation)
    num_drafted, num_accepted = planner.counts(name)
    print("ACC", name, sampling, count, situation, num_drafted, num_accepted)
    if count > 1:
        assert 0 < num_accepted < num_drafted


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("planner", MIXTURES.values(), ids=MIXTURES)
def test_no_mixture_of_proposers_changes_a_token(
    everybody: Everybody, planner: Callable[[], Rotating], situation: str
) -> None:
    mixed = planner()
    check(everybody, mixed, mixed.names, "both", NUM_REQUESTS, situation)
    assert all(mixed.counts(name)[0] for name in set(mixed.names) - set(SUFFIXES))


@pytest.mark.parametrize("name", [name for name in (*PROPOSERS, *HEAD_CHAINS) if "plugin" not in name])
def test_drafts_are_as_good_after_a_cached_prefix(everybody: Everybody, name: str) -> None:
    """Heads find the hidden states of the pages whose KV is found."""
    planner = Rotating([name], lengths=(4,))
    texts = everybody.texts["greedy"]
    waves = [[goes_on(f"w{wave}r{index}", text) for index, text in enumerate(texts)] for wave in range(2)]

    async def main() -> None:
        limits = {"page_tokens": 4, "num_pages": 160}
        async with inline(everybody, planner, [name], {}, limits) as engine:
            for wave in waves:
                done = await asyncio.gather(*(answer(engine, one) for one in wave))
                assert [found.token_ids for found in done] == [text[28:] for text in texts]
        assert engine.counters.cached_tokens >= NUM_REQUESTS * 24

    asyncio.run(asyncio.wait_for(main(), 120))
    (cold_drafted, cold_accepted), (drafted, accepted) = planner.counts(name, "w0"), planner.counts(name, "w1")
    assert cold_accepted > 0.1 * cold_drafted
    assert accepted / drafted >= 0.9 * cold_accepted / cold_drafted


def goes_on(request_id: str, text: tuple[int, ...]) -> GenerationRequest:
    """Return a request that begins with 28 tokens of `text`; half of what it predicts is right."""
    predicted = (*text[28:34], *text[:6])
    return GenerationRequest(
        request_id, text[:28], SAMPLINGS["greedy"], 12, ignore_eos=True, prediction_token_ids=predicted
    )


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("name", PROPOSERS)
def test_every_proposers_drafts_pass_a_ratio_test(everybody: Everybody, name: str, acceptance: Acceptance) -> None:
    planner = Rotating([name])
    texts = everybody.texts["coupled"]
    sampling = replace(SAMPLINGS["coupled"], acceptance=acceptance)
    requests = [replace(one, sampling=sampling) for one in everybody.requests("coupled", NUM_REQUESTS)]
    known = {one.request_id: (*text, *text) for one, text in zip(requests, texts, strict=True)}

    async def main() -> None:
        limits = {"page_tokens": 4, "num_pages": 160}
        async with inline(everybody, planner, [name], known, limits) as engine:
            done = await asyncio.gather(*(answer(engine, one) for one in requests))
        assert not engine.counters.missed + engine.counters.dropped
        assert [len(found.token_ids) for found in done] == [one.max_tokens for one in requests]

    asyncio.run(asyncio.wait_for(main(), 120))
    num_drafted, num_accepted = planner.counts(name)
    assert 0 < num_accepted < num_drafted


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    """A cell whose draft model is its target."""
    return Cell(save_tiny_llama(tmp_path_factory.mktemp("models") / "target", 1))


def requests(sampling: Sampling, count: int = 3, max_tokens: int = 24) -> list[GenerationRequest]:
    prompts = [tuple((7 * index + 3 * place) % 50 + 10 for place in range(3 + 5 * index)) for index in range(count)]
    return [
        GenerationRequest(f"r{index}", prompt, sampling, max_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_output_is_plain_decodings_when_everything_is_accepted(cell: Cell, sampling: Sampling) -> None:
    plain = cell.run(FixedPlanner(None, 0), requests(sampling))
    planner = FixedPlanner("draft", 5)
    assert [d.token_ids for d in cell.run(planner, requests(sampling))] == [d.token_ids for d in plain]
    assert all(outcome.num_accepted == outcome.num_drafted for outcome in planner.outcomes)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", ["right", "wrong", "random", "constant", "eos", "broken", "stale", "outside"])
def test_output_is_plain_decodings_under_an_adversarial_proposer(cell: Cell, sampling: Sampling, name: str) -> None:
    (request,) = requests(sampling, 1)
    (plain,) = cell.run(FixedPlanner(None, 0), [request])
    answers = {len(request.prompt_token_ids) + place: token for place, token in enumerate(plain.token_ids)}
    planner = FixedPlanner(name, 4)
    (done,) = cell.run(planner, [request], [ScriptedProposer(name, answers)])
    assert done.token_ids == plain.token_ids
    accepted = sum(outcome.num_accepted for outcome in planner.outcomes)
    assert accepted > 0 if name == "right" else name in ("constant", "eos", "random") or accepted == 0


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_ratio_test_of_a_perfect_draft_accepts_nearly_everything(cell: Cell, acceptance: Acceptance) -> None:
    sampling = Sampling(greedy=False, temperature=1.0, top_k=20, seed=3, acceptance=acceptance)
    planner = FixedPlanner("draft", 4)
    cell.run(planner, requests(sampling, 4, 40))
    drafted = sum(outcome.num_drafted for outcome in planner.outcomes)
    accepted = sum(outcome.num_accepted for outcome in planner.outcomes)
    assert accepted / drafted > 0.97
