"""OpenAI's own client: what it parses, what it raises, and what it tries again."""

from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import openai
import pytest

from specserve.service.errors import EngineStoppedError

CHAT: Any = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT: Any = {"model": "org/tiny", "prompt": "hi"}


@pytest.fixture
def ours(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=client)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would have slept between its tries."""
    seconds: list[float] = []

    async def sleep(delay: float) -> None:
        seconds.append(delay)

    monkeypatch.setattr(anyio, "sleep", sleep)
    return seconds


def failing(script: SimpleNamespace, times: int, error: Exception) -> Any:
    """Return a script that fails so often before it answers."""
    failures = iter([error] * times)

    def answer(request: Any) -> list[Any]:
        failure = next(failures, None)
        return script.hello(request) if failure is None else [failure]

    return answer


@pytest.mark.asyncio
async def test_our_own_fields_go_in_by_extra_body_and_come_out_by_model_extra(
    ours: openai.AsyncOpenAI, backend: Any
) -> None:
    wish = {"speculation": {"mode": "on", "max_draft_tokens": 3}, "ignore_eos": True}
    whole = await ours.completions.create(**TEXT, extra_body=wish)
    assert backend.submitted[0].max_draft_tokens == 3
    assert backend.submitted[0].ignore_eos
    assert whole.model_extra
    assert whole.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] == 3
    stream = await ours.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}, extra_body=wish
    )
    chunks = [chunk async for chunk in stream]
    assert [bool(chunk.model_extra and "metrics" in chunk.model_extra) for chunk in chunks] == [False] * 3 + [True]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 64}, openai.BadRequestError, "messages"),
    ],
)
async def test_a_refusal_is_the_clients_own_exception_and_is_not_tried_again(
    ours: openai.AsyncOpenAI, slept: list[float], body: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as refused:
        await ours.chat.completions.create(**CHAT | body)
    assert refused.value.param == param
    assert refused.value.request_id
    assert slept == []


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_503_is_tried_again_after_the_time_it_names(
    ours: openai.AsyncOpenAI, backend: Any, slept: list[float], stream: bool
) -> None:
    submit, tries = backend.submit, iter([True, True])

    def refusing(request: Any) -> Any:
        if next(tries, False):
            raise EngineStoppedError("stopped")
        return submit(request)

    backend.submit = refusing
    answer = await ours.completions.create(**TEXT, stream=stream)
    text = "".join([c.choices[0].text async for c in answer]) if stream else answer.choices[0].text
    assert text == "Hello"
    assert slept == [1.0, 1.0]


@pytest.mark.asyncio
async def test_after_two_more_tries_it_gives_up(
    ours: openai.AsyncOpenAI, backend: Any, script: SimpleNamespace, slept: list[float]
) -> None:
    backend.script = failing(script, 3, EngineStoppedError("stopped"))
    with pytest.raises(openai.InternalServerError) as failed:
        await ours.completions.create(**TEXT)
    assert failed.value.status_code == 503
    assert failed.value.code == "engine_stopped"
    assert len(slept) == 2


@pytest.mark.asyncio
async def test_an_error_in_a_stream_is_raised_where_the_stream_is_read(
    ours: openai.AsyncOpenAI, backend: Any, script: SimpleNamespace, slept: list[float]
) -> None:
    backend.script = lambda request: [script.step(request, "He"), EngineStoppedError("stopped")]
    stream = await ours.chat.completions.create(**CHAT, stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError) as failed:
        await read()
    assert (texts, failed.value.code) == (["He"], "engine_stopped")
    assert slept == []
