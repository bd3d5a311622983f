"""Keys open the API, decide tiers, places and shared prefixes, and bound what their holders use."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import AsyncOpenAI, AuthenticationError, PermissionDeniedError, RateLimitError

from specserve.deployments.api.app import build_api
from specserve.deployments.api.backend import Load
from specserve.deployments.api.gate import Gate
from specserve.deployments.api.limits import RequestLimits
from specserve.deployments.credentials import Credentials, key_hash
from specserve.service.errors import BadRequestError

TEXT = {"model": "org/tiny", "prompt": "hi", "max_tokens": 5}
SECRET = "a prompt nobody may log"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keyed(backend: Any, clock: Clock, tmp_path: Path) -> Any:
    """Return what makes a client of the given entry's key, beside another tenant and a viewer."""

    def build(more: dict[str, Any] | None = None, limits: RequestLimits | None = None, key: str | None = "mine") -> Any:
        entries = [
            {"id": "mine", "sha256": key_hash("mine")} | (more or {}),
            {"id": "theirs", "sha256": key_hash("theirs")},
            {"id": "watcher", "sha256": key_hash("watcher"), "role": "viewer"},
        ]
        file = tmp_path / "keys.yaml"
        file.write_text(yaml.safe_dump({"keys": entries}))
        app = build_api(backend, Gate(Credentials(str(file)), limits, clock))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    return build


def check(response: httpx.Response, status: int, code: str | None, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert response.headers["x-request-id"]


def post(client: httpx.AsyncClient, **more: Any) -> Any:
    return client.post("/v1/completions", json=TEXT | more)


@pytest.mark.asyncio
async def test_every_route_but_the_probes_needs_a_key(keyed: Any, backend: Any) -> None:
    client = keyed(key=None)
    app = client._transport.app
    paths = {getattr(route, "path", "/") for route in app.routes} | {"/metrics", "/docs", "/openapi.json", "/nothing"}
    assert {"/v1/completions", "/version"} <= paths
    for path in paths:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            response = await client.request(method, path.replace("{model_id:path}", "org/tiny"))
            if path in ("/health", "/ready"):
                assert response.status_code == (200 if method in ("GET", "HEAD") else 405)
                continue
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == 'Bearer realm="specserve"'
    assert not backend.submitted
    check(await client.get("/v1/models"), 401, "missing_api_key")
    client.headers["authorization"] = "Bearer wrong"
    response = await client.get("/v1/models")
    check(response, 401, "invalid_api_key")
    assert response.headers["www-authenticate"].endswith('error="invalid_token"')


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["//health", "/health/", "/health/../v1/models", "/Health", "/v1/models?x=/health"])
async def test_a_path_that_looks_like_a_probe_is_none(keyed: Any, path: str) -> None:
    assert (await keyed(key=None).get(path)).status_code == 401


@pytest.mark.asyncio
async def test_nobody_without_a_key_sends_a_body(keyed: Any, backend: Any) -> None:
    async def endless() -> Any:
        raise AssertionError("the body was read")
        yield b""

    check(await keyed(key=None).post("/v1/completions", content=endless()), 401, "missing_api_key")


@pytest.mark.asyncio
async def test_a_viewer_looks_and_does_not_generate(keyed: Any, backend: Any) -> None:
    client = keyed(key="watcher")
    assert (await client.get("/v1/models")).status_code == 200
    check(await post(client), 403, "wrong_role")
    assert not backend.submitted


@pytest.mark.asyncio
async def test_neither_keys_nor_prompts_are_logged(keyed: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for key in ("mine", "secret-and-wrong"):
            await post(keyed(key=key), prompt=SECRET, unknown_field=SECRET, service_tier="priority")
            await post(keyed(key=key), prompt=[SECRET, 5], n=SECRET)
    assert SECRET not in caplog.text
    assert "Bearer" not in caplog.text
    assert "secret-and-wrong" not in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("tiers", "asked", "served", "downgrade"),
    [
        (["default", "flex"], None, "default", None),
        (["default", "flex"], "scale", "default", None),
        (["default", "flex"], "priority", "default", "not_allowed"),
        (["default", "flex"], "fast", "default", "not_allowed"),
        (["priority", "default"], "auto", "priority", None),
        (["priority", "default"], "fast", "priority", None),
        (["priority", "default"], "default", "default", None),
        (["priority", "default"], "flex", None, None),
        (["flex"], "auto", "flex", None),
        (["flex"], "priority", None, None),
        (["flex"], "default", None, None),
    ],
)
async def test_a_key_decides_the_tiers(
    keyed: Any, backend: Any, tiers: list[str], asked: str | None, served: str | None, downgrade: str | None
) -> None:
    response = await post(keyed({"tiers": tiers}), service_tier=asked)
    if served is None:
        check(response, 403, "tier_not_allowed", "service_tier")
        assert not backend.submitted
        return
    assert response.status_code == 200
    assert backend.submitted[-1].tier == served
    assert response.headers.get("x-service-tier-downgrade") == downgrade


@pytest.mark.asyncio
async def test_priority_beyond_its_share_is_served_as_default_and_says_so(
    keyed: Any, backend: Any, clock: Clock, script: Any
) -> None:
    backend.script = lambda request: [script.end(request, 0)]
    client = keyed({"tiers": ["priority", "default"], "priority_limits": {"requests_per_minute": 2}})
    answers = [await post(client, stream=stream) for stream in (False, True, False, True)]
    assert [request.tier for request in backend.submitted] == ["priority", "priority", "default", "default"]
    assert [answer.headers.get("x-service-tier-downgrade") for answer in answers] == [None, None] + ["over_quota"] * 2
    assert backend.http.downgrades == {"over_quota": 2}
    clock.now_s += 61
    await post(client)
    assert backend.submitted[-1].tier == "priority"


@pytest.mark.asyncio
async def test_priority_alone_cannot_be_downgraded(keyed: Any) -> None:
    client = keyed({"tiers": ["priority"], "priority_limits": {"requests_per_minute": 1}})
    assert (await post(client)).status_code == 200
    check(await post(client), 429, "rate_limit_exceeded")


@pytest.mark.asyncio
async def test_a_client_lowers_itself_and_raises_itself_as_its_key_allows(keyed: Any, backend: Any) -> None:
    assert (await post(keyed(), priority=3)).status_code == 200
    check(await post(keyed(), priority=-1), 403, "not_allowed", "priority")
    assert (await post(keyed({"min_priority": -2}), priority=-2)).status_code == 200
    check(await post(keyed({"min_priority": 1})), 403, "not_allowed", "priority")
    assert [request.priority for request in backend.submitted] == [3, -2]


@pytest.mark.asyncio
async def test_prefixes_are_shared_within_a_tenant_alone(keyed: Any, backend: Any) -> None:
    for key, more, salt in (
        ("mine", {}, None), ("theirs", {}, None), ("mine", {}, "s"), ("theirs", {}, "s"), ("mine", {}, "theirs/"),
        ("mine", {"tenant": "theirs"}, None),
    ):  # fmt: skip
        assert (await post(keyed(more, key=key), cache_salt=salt)).status_code == 200
    salts = [request.cache_salt for request in backend.submitted]
    assert len(set(salts[:5])) == 5
    assert salts[5] == salts[1]


@pytest.mark.asyncio
async def test_requests_a_minute_are_bounded_and_every_answer_tells(keyed: Any, clock: Clock, backend: Any) -> None:
    client = keyed({"limits": {"requests_per_minute": 3}})
    assert (await client.get("/v1/models")).headers["x-ratelimit-remaining-requests"] == "3"
    bad = await post(client, n=0)
    assert (bad.status_code, bad.headers["x-ratelimit-remaining-requests"]) == (400, "2")
    backend.refuse_after, backend.refusal = 0, RuntimeError("unforeseen")
    fault = await post(client)
    assert (fault.status_code, fault.headers["x-ratelimit-remaining-requests"]) == (500, "1")
    backend.refusal = None
    stream = await post(client, stream=True)
    assert (stream.status_code, stream.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    clock.now_s += 30
    refused = await post(client)
    check(refused, 429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "31"
    assert refused.headers["x-ratelimit-limit-requests"] == "3"
    assert refused.headers["x-ratelimit-reset-requests"] == "31.000s"
    assert "x-should-retry" not in refused.headers
    clock.now_s += 31
    assert (await post(client)).status_code == 200


@pytest.mark.asyncio
async def test_tokens_are_held_while_a_request_runs_and_settled_at_its_end(
    keyed: Any, backend: Any, script: Any
) -> None:
    seen = []
    client = keyed({"limits": {"tokens_per_minute": 100}})

    def observing(request: Any) -> list[Any]:
        gate = client._transport.app.user_middleware[-1].kwargs["gate"]
        seen.append(gate._quotas._meters["mine"][0].tokens.used(1000.0))
        return list(script.hello(request))

    backend.script = observing
    first = await post(client, max_tokens=50)
    assert (seen, first.headers["x-ratelimit-remaining-tokens"]) == ([52], "93")
    await post(client, max_tokens=20, n=2, stream=True)
    assert seen[1:] == [7 + 2 + 40] * 2
    assert (await client.get("/v1/models")).headers["x-ratelimit-remaining-tokens"] == "81"
    check(await post(client, prompt="x" * 50, max_tokens=14, n=3), 429, "rate_limit_exceeded")
    assert (await client.get("/v1/models")).headers["x-ratelimit-remaining-tokens"] == "81"


@pytest.mark.asyncio
async def test_what_can_never_fit_is_not_to_be_retried(keyed: Any, backend: Any) -> None:
    for limits, more in (({"tokens_per_minute": 6}, {}), ({"max_concurrent": 2}, {"n": 3})):
        response = await post(keyed({"limits": limits}), **more)
        check(response, 429, "rate_limit_exceeded")
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
    assert not backend.submitted


@pytest.mark.asyncio
async def test_a_refused_request_leaves_its_keys_tokens(keyed: Any, backend: Any) -> None:
    client = keyed({"limits": {"tokens_per_minute": 100, "max_concurrent": 1}})
    backend.refuse_after, backend.refusal = 0, BadRequestError("no such proposer", "speculation.proposer")
    for _ in range(3):
        response = await post(client)
        check(response, 400, None, "speculation.proposer")
        assert response.headers["x-ratelimit-remaining-tokens"] == "100"


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_choices_at_a_time_are_bounded_until_the_client_leaves(keyed: Any, backend: Any, stream: bool) -> None:
    client = keyed({"limits": {"max_concurrent": 2}})
    submitted = asyncio.Event()

    def stuck(request: Any) -> list[Any]:
        submitted.set()
        return []

    whole, backend.script = backend.script, stuck
    visit = asyncio.create_task(post(client, n=2, stream=stream))
    await submitted.wait()
    refused = await post(client)
    check(refused, 429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "1"
    visit.cancel()
    await asyncio.wait({visit})
    backend.script = whole
    assert (await post(client, n=2)).status_code == 200


@pytest.mark.asyncio
async def test_flex_is_shed_while_others_wait(keyed: Any, backend: Any) -> None:
    limits = RequestLimits(flex_max_waiting=2)
    for unfinished, status in ((0, 200), (34, 200), (35, 429)):
        backend.load = Load(unfinished, 32)
        response = await post(keyed(limits=limits), service_tier="flex")
        assert response.status_code == status, unfinished
        assert (await post(keyed(limits=limits))).status_code == 200
    check(response, 429, "resource_unavailable")
    assert response.headers["retry-after"] == "10"


@pytest.mark.asyncio
async def test_a_full_queue_refuses_before_anything_is_allocated(keyed: Any, backend: Any) -> None:
    client = keyed(limits=RequestLimits(max_waiting=4))
    for unfinished, choices, status in ((0, 16, 200), (35, 1, 200), (35, 2, 503), (36, 1, 503), (20, 16, 200)):
        backend.submitted.clear()
        backend.load = Load(unfinished, 32)
        response = await post(client, n=choices, max_tokens=1)
        assert response.status_code == status
        if status == 503:
            check(response, 503, "overloaded")
            assert response.headers["retry-after"] == "1"
            assert not backend.submitted


@pytest.mark.asyncio
async def test_the_openai_client_understands_every_refusal(keyed: Any, backend: Any) -> None:
    def openai(client: httpx.AsyncClient, key: str) -> AsyncOpenAI:
        return AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=client, max_retries=0)

    entry = {"tiers": ["flex"], "limits": {"requests_per_minute": 2}}
    call: Any = {"model": "org/tiny", "prompt": "hi", "max_tokens": 5}
    with pytest.raises(AuthenticationError):
        await openai(keyed(entry), "wrong").completions.create(**call)
    mine = openai(keyed(entry), "mine")
    assert (await mine.completions.create(**call)).choices[0].text == "Hello"
    with pytest.raises(PermissionDeniedError):
        await mine.completions.create(**call, extra_body={"service_tier": "default"})
    with pytest.raises(RateLimitError) as limited:
        await mine.completions.create(**call)
    assert limited.value.code == "rate_limit_exceeded"
