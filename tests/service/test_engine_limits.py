"""Where requests end, what is refused, and what a cancelled request leaves behind."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.cells import Cell, FixedPlanner, save_tiny_llama

from specserve.service.errors import BadRequestError, EngineStoppedError, PromptTooLongError
from specserve.service.messages import Sampling
from specserve.service.requests import GenerationRequest
from specserve.service.running import RequestStream

PROMPT = (10, 20, 30, 40)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    return Cell(save_tiny_llama(tmp_path_factory.mktemp("models") / "target", 1))


async def drain(stream: RequestStream) -> None:
    async for _ in stream:
        pass


def request(**changes: object) -> GenerationRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "prompt_token_ids": PROMPT,
        "sampling": Sampling(),
        "max_tokens": 20,
        "ignore_eos": True,
    }
    return GenerationRequest(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens", range(1, 8))
@pytest.mark.parametrize("gamma", [0, 5])
def test_max_tokens_is_met_exactly(cell: Cell, max_tokens: int, gamma: int) -> None:
    (done,) = cell.run(FixedPlanner("draft" if gamma else None, gamma), [request(max_tokens=max_tokens)])
    assert len(done.token_ids) == max_tokens
    assert done.steps[-1].finish_reason == "length"
    assert done.steps[-1].summary is not None
    assert done.steps[-1].summary.completion_tokens == max_tokens


@pytest.mark.parametrize("place", range(6))
def test_a_stop_token_ends_the_request_at_every_accepted_position(cell: Cell, place: int) -> None:
    (plain,) = cell.run(FixedPlanner(None, 0), [request()])
    stop = plain.token_ids[place]
    first = plain.token_ids.index(stop)
    (done,) = cell.run(FixedPlanner("draft", 5), [request(stop_token_ids=(stop,))])
    assert done.token_ids == plain.token_ids[: first + 1]
    assert done.steps[-1].finish_reason == "stop"


@pytest.mark.parametrize("place", range(1, 6))
def test_a_stop_string_ends_text_and_tokens_as_in_plain_decoding(cell: Cell, place: int) -> None:
    (whole,) = cell.run(FixedPlanner(None, 0), [request()])
    piece = cell.tokenizer.decode(whole.token_ids[place : place + 1], skip_special_tokens=True)
    if not piece.isascii() or not piece:
        pytest.skip("the token is no text of its own")
    outcomes = [
        cell.run(planner, [request(stop=(piece,))])[0] for planner in (FixedPlanner(None, 0), FixedPlanner("draft", 5))
    ]
    assert outcomes[0].text == outcomes[1].text
    assert outcomes[0].token_ids == outcomes[1].token_ids
    assert piece not in outcomes[0].text


def test_logprobs_are_those_of_plain_decoding(cell: Cell) -> None:
    (plain,) = cell.run(FixedPlanner(None, 0), [request(num_logprobs=3)])
    (done,) = cell.run(FixedPlanner("draft", 5), [request(num_logprobs=3)])
    expected = [logprob for step in plain.steps for logprob in step.logprobs]
    found = [logprob for step in done.steps for logprob in step.logprobs]
    assert len(found) == len(done.token_ids)
    assert [f.logprob for f in found] == pytest.approx([e.logprob for e in expected], abs=1e-9)
    assert [[token for token, _ in f.top] for f in found] == [[token for token, _ in e.top] for e in expected]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_token_ids": ()}, "prompt"),
        ({"prompt_token_ids": (5000,)}, "prompt"),
        ({"prompt_token_ids": (-1,)}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 509}, "prompt"),
        ({"proposer": "oracle"}, "speculation.proposer"),
        ({"stop_token_ids": (3, 4096)}, "stop_token_ids"),
        ({"sampling": Sampling(logit_bias=((-1, 2.0),))}, "logit_bias"),
        ({"sampling": Sampling(logit_bias=((4096, 2.0),))}, "logit_bias"),
    ],
)
def test_a_request_that_cannot_succeed_is_refused_and_nothing_is_allocated(
    cell: Cell, changes: dict[str, object], param: str
) -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            engine = cell.engine(FixedPlanner(None, 0), (), executor)
            with pytest.raises(BadRequestError) as caught:
                engine.submit(request(**changes))
            assert caught.value.param == param
            assert engine.num_waiting == 0
            assert engine.counters.requests == 0

    asyncio.run(main())


def test_the_context_is_usable_to_its_last_token(cell: Cell) -> None:
    (done,) = cell.run(FixedPlanner("draft", 8), [request(max_tokens=508)])
    assert len(done.token_ids) == 508
    with pytest.raises(PromptTooLongError):
        cell.run(FixedPlanner(None, 0), [request(max_tokens=509)])


def test_a_cancelled_request_frees_its_pages_and_drafts_within_a_round(cell: Cell) -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            engine = cell.engine(FixedPlanner("draft", 4), (), executor)
            engine.start()
            streams = [engine.submit(request(request_id=f"r{i}", max_tokens=400)) for i in range(5)]
            for stream in streams:
                await anext(stream)
                stream.cancel()
            while engine.num_running or any(engine.num_held_by_proposers.values()):
                await asyncio.sleep(0)
            assert engine.num_free_pages == engine.config.num_pages
            assert engine.counters.cancelled == 5
            await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_stopping_the_engine_ends_open_streams_with_an_error(cell: Cell) -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            engine = cell.engine(FixedPlanner(None, 0), (), executor)
            engine.start()
            stream = engine.submit(request(max_tokens=400))
            await anext(stream)
            await engine.stop()
            with pytest.raises(EngineStoppedError):
                await drain(stream)

    asyncio.run(asyncio.wait_for(main(), 60))
