"""Every refusal names its field in OpenAI's error shape, and nothing reaches the backend."""

from typing import Any

import httpx
import pytest

from specserve.deployments.api.app import build_api
from specserve.service.errors import BadRequestError, EngineStoppedError, PromptTooLongError

CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "org/tiny", "prompt": "hi"}
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"n": 17}, "n"), ({"n": "1"}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"seed": 2**63}, "seed"),
    ({"stop": list("abcde")}, "stop"), ({"stop": ""}, "stop"), ({"stop_token_ids": [256]}, "stop_token_ids"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"service_tier": "gold"}, "service_tier"),
    ({"prediction": {"type": "content", "content": "x" * 65}}, "prediction"), ({"prediction": "x"}, "prediction"),
    ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": None}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content.0.type"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"256": 1}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"), ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"), ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"priority": "high"}, "priority"), ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": 5}, "cache_salt"),
    ({"speculation": {"mode": "fast"}}, "speculation.mode"), ({"speculation": {"gamma": 1}}, "speculation.gamma"),
    ({"speculation": {"max_draft_tokens": 65}}, "speculation.max_draft_tokens"),
    ({"speculation": {"acceptance": "typical"}}, "speculation.acceptance"),
]  # fmt: skip
ONLY_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"echo": True, "logprobs": 0}, "echo"), ({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [256]}, "prompt"), ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"), ({"prompt": ["a"] * 129}, "prompt"), ({"prompt": [[]]}, "prompt"),
]  # fmt: skip
ONLY_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools.0.function"), ({"tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
]  # fmt: skip
CASES = [
    *[("/v1/completions", TEXT | more, param) for more, param in [*BOTH, *ONLY_TEXT]],
    *[("/v1/chat/completions", CHAT | more, param) for more, param in [*BOTH, *ONLY_CHAT]],
]


def check(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["param"], error["code"]) == (param, code)
    assert response.headers["x-request-id"]


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body", "param"), CASES)
async def test_a_bad_field_is_named(
    client: httpx.AsyncClient, backend: Any, path: str, body: dict[str, Any], param: str
) -> None:
    check(await client.post(path, json=body), 400, param)
    assert not backend.submitted


@pytest.mark.asyncio
@pytest.mark.parametrize("missing", ["model", "prompt"])
async def test_a_missing_field_is_named(client: httpx.AsyncClient, missing: str) -> None:
    check(await client.post("/v1/completions", json={k: v for k, v in TEXT.items() if k != missing}), 400, missing)


@pytest.mark.asyncio
async def test_invalid_json_is_a_400(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    check(await client.post("/v1/completions", content=b"{", headers=headers), 400, None, "invalid_json")
    for content in (b"[]", b"", b"\xff"):
        assert (await client.post("/v1/completions", content=content, headers=headers)).status_code == 400


@pytest.mark.asyncio
async def test_what_is_not_there_is_a_404(client: httpx.AsyncClient) -> None:
    check(await client.post("/v1/completions", json=TEXT | {"model": "m"}), 404, "model", "model_not_found")
    check(await client.get("/v1/models/m"), 404, "model", "model_not_found")
    check(await client.post("/v1/responses", json={}), 404, None, "not_found")
    check(await client.get("/v1/completions"), 405, None, "method_not_allowed")


@pytest.mark.asyncio
async def test_a_prompt_that_cannot_fit_is_refused(client: httpx.AsyncClient, backend: Any) -> None:
    code = "context_length_exceeded"
    check(await client.post("/v1/completions", json=TEXT | {"prompt": "x" * 64}), 400, "prompt", code)
    check(await client.post("/v1/completions", json=TEXT | {"max_tokens": 63}), 400, "prompt", code)
    long = [{"role": "user", "content": "x" * 64}]
    check(await client.post("/v1/chat/completions", json=CHAT | {"messages": long}), 400, "messages", code)
    assert not backend.submitted
    assert (await client.post("/v1/completions", json=TEXT | {"prompt": "x" * 63})).status_code == 200


@pytest.mark.asyncio
async def test_a_refused_choice_cancels_those_before_it(client: httpx.AsyncClient, backend: Any) -> None:
    backend.refuse_after, backend.refusal = 1, BadRequestError("no such proposer", "speculation.proposer")
    for stream in (False, True):
        backend.submitted.clear()
        check(await client.post("/v1/completions", json=TEXT | {"n": 2, "stream": stream}), 400, "speculation.proposer")
        assert backend.streams[-1].cancelled.is_set()


@pytest.mark.asyncio
async def test_the_backends_own_limit_names_the_messages(client: httpx.AsyncClient, backend: Any) -> None:
    backend.refuse_after, backend.refusal = 0, PromptTooLongError("no pages", "prompt", "context_length_exceeded")
    check(await client.post("/v1/chat/completions", json=CHAT), 400, "messages", "context_length_exceeded")


@pytest.mark.asyncio
async def test_an_engine_that_stops_is_a_503_with_retry_after(client: httpx.AsyncClient, backend: Any) -> None:
    backend.script = lambda request: [EngineStoppedError("stopped")]
    response = await client.post("/v1/completions", json=TEXT)
    check(response, 503, None, "engine_stopped")
    assert response.headers["retry-after"] == "1"


@pytest.mark.asyncio
async def test_an_unforeseen_error_tells_nothing(backend: Any) -> None:
    backend.refuse_after, backend.refusal = 0, RuntimeError("secret")
    transport = httpx.ASGITransport(build_api(backend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post("/v1/completions", json=TEXT)
    check(response, 500, None, "internal_error")
    assert "secret" not in response.text
    assert response.headers["x-should-retry"] == "false"
