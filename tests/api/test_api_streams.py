"""Server-sent events, their last chunks and errors, and clients that leave."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError

from specserve.deployments.api.app import build_api
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


class Leaving:
    """A raw ASGI client that leaves: once `after` has been answered, or at once when it is None."""

    def __init__(self, body: dict[str, Any], after: str | None) -> None:
        self._body = json.dumps(body).encode()
        self._after = after
        self._leave = asyncio.Event()
        self._asked = False
        if after is None:
            self._leave.set()

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self._after is not None and self._after.encode() in message.get("body", b""):
            self._leave.set()

    async def visit(self, app: Any) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
            "root_path": "", "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
        }  # fmt: skip
        await asyncio.wait_for(app(scope, self.receive, self.send), 20)


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
