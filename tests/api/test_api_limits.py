"""Whatever is too large, too deep or nonsense is refused by name and reaches no backend."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from specserve.deployments.api.app import build_api
from specserve.deployments.api.gate import Gate
from specserve.deployments.api.limits import RequestLimits

TEXT = {"model": "org/tiny", "prompt": "hi"}
CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
LIMITS = RequestLimits(max_body_bytes=20_000, max_prompt_tokens=20, max_choices=4, max_messages=3)


def client_of(backend: Any, limits: RequestLimits | None = None) -> httpx.AsyncClient:
    app = build_api(backend, Gate(limits=limits or RequestLimits()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def check(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"n": 5}, "n", None), ({"stop": "x" * 257}, "stop", None), ({"stop": ["x", "y" * 300]}, "stop", None),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", None),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", None), ({"metadata": "x"}, "metadata", None),
        ({"metadata": {"x" * 65: "y"}}, "metadata", None), ({"metadata": {"x": "y" * 513}}, "metadata", None),
        ({"metadata": {"x": 5}}, "metadata", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_field_over_its_limit_is_named(
    backend: Any, path: str, more: dict[str, Any], param: str, code: str | None
) -> None:
    body = (TEXT if path == "/v1/completions" else CHAT) | more
    check(await client_of(backend, LIMITS).post(path, json=body), 400, param, code)
    assert not backend.submitted


@pytest.mark.asyncio
async def test_a_prompt_over_the_operators_limit_is_named(backend: Any) -> None:
    client, too_long = client_of(backend, LIMITS), "context_length_exceeded"
    for text in ("x" * 21, "x" * 2561):
        code = too_long if len(text) == 21 else None
        check(await client.post("/v1/completions", json=TEXT | {"prompt": ["hi", text]}), 400, "prompt", code)
        sent = CHAT | {"messages": [{"role": "user", "content": text}]}
        check(await client.post("/v1/chat/completions", json=sent), 400, "messages", code)
    many = CHAT | {"messages": [{"role": "user", "content": "x"}] * 4}
    check(await client.post("/v1/chat/completions", json=many), 400, "messages")
    assert not backend.submitted


@pytest.mark.asyncio
async def test_what_is_at_the_limit_is_served(backend: Any) -> None:
    more = {"n": 4, "stop": "x" * 256, "metadata": {str(i).zfill(64): "x" * 512 for i in range(16)}}
    client = client_of(backend, LIMITS)
    assert (await client.post("/v1/completions", json=TEXT | more | {"prompt": "x" * 20})).status_code == 200


@pytest.mark.asyncio
async def test_a_large_body_is_refused_by_its_stated_length_unread(backend: Any) -> None:
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    for stated in ("20001", "9" * 30):
        headers = {"content-length": stated, "content-type": "application/json"}
        response = await client_of(backend, LIMITS).post("/v1/completions", content=unread(), headers=headers)
        check(response, 413, None, "body_too_large")
        assert response.headers["x-request-id"]


@pytest.mark.asyncio
@pytest.mark.parametrize("stated", [None, "10", "-5", "many"])
async def test_a_large_body_is_refused_once_too_much_of_it_came(backend: Any, stated: str | None) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1000
            yield b" " * 1000

    headers = {"content-type": "application/json"} | ({} if stated is None else {"content-length": stated})
    response = await client_of(backend, LIMITS).post("/v1/completions", content=endless(), headers=headers)
    check(response, 413, None, "body_too_large")
    assert sent <= 22_000


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000, b'{"prompt":' * 50_000, b'{"model": "org/tiny", "prompt": "hi", "metadata": ' + b"[" * 5000,
        b'{"model": "org/tiny", "prompt": "hi", "seed": ' + b"9" * 10_000 + b"}",
        b'{"model": "org/tiny", "prompt": "hi", "temperature": NaN}', b'{"model": "org/tiny", "prompt": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "hi"}', b'{"model": "org/tiny", "prompt": "hi", "stop": "\\udfff"}',
        b'{"model": "org/tiny", "prompt": "hi", "cache_salt": "\\udfff"}', b"\x00", b"\xff\xfe", b'"' + b"x" * 1000,
        b'{"model": "org/tiny", "prompt": "hi", "service_tier": "\\ud800"}', b'{"\\ud800": 1}',
        b'{"model": "org/tiny", "prompt": "hi", "speculation": {"\\ud800": 1}}', b"null", b"1e999",
        b'{"model": "org/tiny", "prompt": "hi", "logit_bias": {"\\ud800": 1}}',
        b'{"model": "org/tiny", "prompt": "hi", "max_tokens": 1e400}',
    ],
)  # fmt: skip
async def test_a_hostile_body_is_a_400(backend: Any, content: bytes) -> None:
    response = await client_of(backend).post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code in (400, 404), response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert not backend.submitted


@pytest.mark.asyncio
async def test_hostile_messages_are_a_400(backend: Any) -> None:
    for message in (b'{"role": "user", "content": "\\ud800"}', b'{"role": "user", "content": ' + b"[" * 900 + b"}"):
        content = b'{"model": "org/tiny", "messages": [' + message + b"]}"
        headers = {"content-type": "application/json"}
        response = await client_of(backend).post("/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == 400, response.text
    assert not backend.submitted


@pytest.mark.asyncio
@pytest.mark.parametrize("body", [b'{"prompt": "\\ud800"}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}'])
async def test_no_tokenizer_sees_half_of_a_surrogate_pair(client: httpx.AsyncClient, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    param = "prompt" if b"prompt" in body else "messages"
    check(await client.post("/tokenize", content=body, headers=headers), 400, param)


@pytest.mark.asyncio
async def test_methods_and_paths_that_are_not_there_have_openai_errors(client: httpx.AsyncClient) -> None:
    for method, path, status, code in (
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"), ("GET", "/nothing", 404, "not_found"),
        ("PUT", "/v1/models", 405, "method_not_allowed"), ("POST", "/health", 405, "method_not_allowed"),
    ):  # fmt: skip
        response = await client.request(method, path)
        check(response, status, None, code)
        assert ("allow" in response.headers) == (status == 405)
    for path in ("/health", "/ready"):
        assert (await client.head(path)).status_code == 200


@pytest.mark.asyncio
async def test_pages_of_other_origins_get_no_permission(client: httpx.AsyncClient) -> None:
    headers = {"origin": "https://elsewhere.test", "access-control-request-method": "POST"}
    for method in ("OPTIONS", "GET"):
        response = await client.request(method, "/v1/models", headers=headers)
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.asyncio
async def test_who_comes_before_the_model_is_told_when_to_come_back(client: httpx.AsyncClient, backend: Any) -> None:
    backend.ready = False
    for response in (await client.post("/v1/completions", json=TEXT), await client.get("/ready")):
        check(response, 503, None, "not_ready")
        assert response.headers["retry-after"] == "1"
    assert (await client.get("/health")).status_code == 200
