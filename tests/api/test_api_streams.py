"""Server-sent events, their last chunks and errors, and clients that leave."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError
from support.leaving import Leaving

from specserve.deployments.api.app import build_api
from specserve.deployments.api.backend import AnswerStyle
from specserve.service.errors import RoundLostError

CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "org/tiny", "prompt": "hi"}


async def frames(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[list[Any], bool]:
    """Return the chunks, and whether `[DONE]` ended them."""
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    done = lines[-1] == "[DONE]"
    return [json.loads(line) for line in (lines[:-1] if done else lines)], done


@pytest.mark.asyncio
async def test_a_chat_stream_has_one_event_a_visible_step(client: httpx.AsyncClient, backend: Any) -> None:
    chunks, done = await frames(client, "/v1/chat/completions", CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert done
    assert deltas == [{"role": "assistant", "content": "Hel"}, {"content": "lo"}, {}]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert ["metrics" in chunk for chunk in chunks] == [False, False, True]
    assert "usage" not in chunks[0]
    assert chunks[-1]["service_tier"] == "default"
    assert not backend.streams[0].cancelled.is_set()


@pytest.mark.asyncio
async def test_usage_comes_last_with_the_metrics(client: httpx.AsyncClient) -> None:
    chunks, done = await frames(client, "/v1/completions", TEXT | {"stream_options": {"include_usage": True}})
    assert done
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert ["metrics" in chunk for chunk in chunks] == [False] * 3 + [True]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks, _ = await frames(client, "/v1/completions", TEXT | {"stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [3, 5, 5, 5]


@pytest.mark.asyncio
async def test_logprobs_of_late_text_travel_with_it(client: httpx.AsyncClient) -> None:
    chunks, _ = await frames(client, "/v1/completions", TEXT | {"logprobs": 1})
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [part["tokens"] for part in parts] == [list("Hel"), list("lo"), []]
    assert [part["text_offset"] for part in parts] == [[0, 1, 2], [3, 4], []]


@pytest.mark.asyncio
async def test_choices_of_a_stream_are_told_apart_by_index(client: httpx.AsyncClient) -> None:
    chunks, done = await frames(client, "/v1/completions", TEXT | {"n": 2})
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in (0, 1)]
    assert done
    assert texts == ["Hello", "Hello"]
    assert ["metrics" in c for c in chunks].count(True) == 1
    assert chunks[-1]["metrics"]["speculative_decoding"] is None


@pytest.mark.asyncio
async def test_an_error_after_the_first_byte_is_the_last_event(
    client: httpx.AsyncClient, backend: Any, script: SimpleNamespace
) -> None:
    backend.script = lambda request: [script.step(request, "He"), RoundLostError("lost")]
    chunks, done = await frames(client, "/v1/completions", TEXT | {"n": 2})
    assert not done
    assert chunks[-1]["error"]["code"] == "round_lost"
    assert all("finish_reason" not in chunk or chunk["finish_reason"] is None for chunk in chunks)
    assert all(stream.cancelled.is_set() for stream in backend.streams)


@pytest.mark.asyncio
async def test_an_error_before_the_first_byte_has_its_own_status(client: httpx.AsyncClient, backend: Any) -> None:
    backend.script = lambda request: [RoundLostError("lost")]
    response = await client.post("/v1/completions", json=TEXT | {"stream": True, "n": 2})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "round_lost"
    assert response.headers["retry-after"] == "1"
    assert all(stream.cancelled.is_set() for stream in backend.streams)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_a_silent_stream_gets_comment_lines_before_and_between_its_events(
    backend: Any, script: SimpleNamespace
) -> None:
    backend.style = AnswerStyle(keep_alive_s=0.01)
    backend.script = lambda request: [script.step(request, "Hel")]
    client = Leaving(TEXT | {"stream": True}, "keep-alive", times=4)
    held = HeldBack(backend)
    visit = asyncio.create_task(client.visit(build_api(held)))
    await client.seen(2)
    held.release.set()
    await visit
    sent = [message["body"].decode() for message in client.messages if message.get("body")]
    event = next(place for place, text in enumerate(sent) if text.startswith("data:"))
    assert event >= 2
    assert {*sent[:event], *sent[event + 1 :]} == {": keep-alive\n\n"}
    assert [message["type"] for message in client.messages].count("http.response.start") == 1
    assert client.messages[0]["type"] == "http.response.start"
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_an_error_after_a_comment_line_is_an_event(backend: Any) -> None:
    backend.style = AnswerStyle(keep_alive_s=0.01)
    backend.script = lambda request: [RoundLostError("lost")]
    client = Leaving(TEXT | {"stream": True}, "error")
    held = HeldBack(backend)
    visit = asyncio.create_task(client.visit(build_api(held)))
    await client.seen(1, "keep-alive")
    held.release.set()
    await visit
    assert client.messages[0]["status"] == 200
    assert "round_lost" in client.messages[-1 if client.messages[-1].get("body") else -2]["body"].decode()


@pytest.mark.asyncio
async def test_a_stream_that_speaks_gets_no_comment_line(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json=TEXT | {"stream": True})
    assert all(line.startswith("data: ") for line in response.text.split("\n\n") if line)


@pytest.mark.asyncio
async def test_every_chunk_has_the_usage_so_far_and_the_last_what_became_of_the_prediction(
    client: httpx.AsyncClient,
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    predicted = {"prediction": {"type": "content", "content": "Help"}, "stream_options": options}
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        chunks, _ = await frames(client, path, body | predicted)
        used = [chunk["usage"] for chunk in chunks]
        counts = [usage["completion_tokens"] for usage in used]
        assert counts == sorted(counts)
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in used)
        details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
        assert [usage.get("completion_tokens_details") for usage in used] == [None, None, details, details]


class HeldBack:
    """The backend, whose streams wait for `release` before their first output."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.release = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def submit(self, request: Any) -> Any:
        stream = self._backend.submit(request)
        anext_, release = stream.__anext__, self.release

        class Held:
            cancel = stream.cancel

            def __aiter__(self) -> Any:
                return self

            async def __anext__(self) -> Any:
                await release.wait()
                return await anext_()

        return Held()


@pytest.mark.asyncio
@pytest.mark.parametrize(("stream", "after"), [(True, "Hel"), (True, None), (False, None)])
async def test_a_client_that_leaves_cancels_its_requests(
    backend: Any, script: SimpleNamespace, stream: bool, after: str | None
) -> None:
    backend.script = lambda request: [script.step(request, "Hel")]
    await Leaving(TEXT | {"stream": stream, "n": 2}, after).visit(build_api(backend))
    assert [s.cancelled.is_set() for s in backend.streams] == [True, True]
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_cancelled_handler_cancels_its_requests(backend: Any, script: SimpleNamespace, stream: bool) -> None:
    submitted = asyncio.Event()

    def stuck(request: Any) -> list[Any]:
        submitted.set()
        return []

    backend.script = stuck
    visit = asyncio.create_task(Leaving(TEXT | {"stream": stream}, "never").visit(build_api(backend)))
    await submitted.wait()
    visit.cancel()
    await asyncio.wait({visit})
    assert backend.streams[0].cancelled.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_the_openai_client_reads_everything(client: httpx.AsyncClient, backend: Any, script: Any) -> None:
    openai = AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=client, max_retries=0)
    chat: Any = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
    whole = await openai.chat.completions.create(**chat, service_tier="flex", logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content == "Hello"
    assert whole.usage
    assert whole.usage.total_tokens == 10
    assert whole.model_extra
    assert whole.model_extra["metrics"]["speculation"]["policy_version"] == 7
    assert backend.submitted[-1].tier == "flex"
    text = await openai.completions.create(model="org/tiny", prompt="hi", extra_body={"speculation": {"mode": "off"}})
    assert text.choices[0].text == "Hello"
    assert backend.submitted[-1].mode == "off"
    stream = await openai.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 5
    assert (await openai.models.retrieve("org/tiny")).id == "org/tiny"
    assert len((await openai.models.list()).data) == 1
    with pytest.raises(BadRequestError) as refused:
        await openai.chat.completions.create(**chat, presence_penalty=3)
    assert refused.value.param == "presence_penalty"
    assert refused.value.request_id
    backend.script = lambda request: [script.step(request, "He"), RoundLostError("lost")]
    with pytest.raises(APIError):
        _ = [c async for c in await openai.chat.completions.create(**chat, stream=True)]
