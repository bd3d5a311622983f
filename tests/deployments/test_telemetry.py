"""One stats object: `/metrics` says to the token what the answers said, whatever the tiers, modes and proposers."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.scrape import Samples, scrape

from specserve.deployments.api.app import build_api
from specserve.deployments.backend import EngineBackend
from specserve.deployments.cell import inline_backend
from specserve.deployments.settings import ServiceSettings

POLICY = {
    "name": "mixed",
    "tiers": {
        "priority": {"law": "fixed", "gamma": 6, "max_gamma": 12, "tpot_slo_ms": 1e6},
        "default": {"law": "adaptive"},
        "flex": {"law": "off", "tpot_slo_ms": 1e-6},
    },
}
PROMPT = (
    "def add(first, second):\n    total = first + second\n    return total\n\n\ndef add(first, second):\n    total ="
)
WISHES: list[dict[str, Any]] = [
    {"service_tier": "priority"},
    {"service_tier": "priority", "speculation": {"mode": "on", "max_draft_tokens": 3, "proposer": "draft"}},
    {"service_tier": "fast", "speculation": {"mode": "off"}},
    {"service_tier": "flex"},
    {"service_tier": "flex", "speculation": {"mode": "on", "max_draft_tokens": 9, "proposer": "prompt_lookup"}},
    {},
    {"speculation": {"mode": "on", "max_draft_tokens": 5}, "temperature": 0.8, "seed": 3},
    {"stop": "return", "ignore_eos": False},
    {"speculation": {"mode": "auto", "max_draft_tokens": 2}, "temperature": 1.0, "max_tokens": 1},
]


@asynccontextmanager
async def serving(folder: Path) -> Any:
    """A started inline cell and a client of its app."""
    file = folder / "policy.yaml"
    file.write_text(yaml.safe_dump(POLICY))
    settings = ServiceSettings(placement="inline", dtype="float32", num_threads=1, num_pages=512, policy=str(file))
    backend = inline_backend(settings)
    await backend.start()
    transport = httpx.ASGITransport(build_api(backend))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            yield backend, client
    finally:
        await backend.engine.stop()


async def answered(client: httpx.AsyncClient, number: int, wish: dict[str, Any]) -> dict[str, Any]:
    """Return what the answer says of itself; every second one is streamed, every third a chat."""
    body = {"model": "specserve-embedded", "max_tokens": 40, "temperature": 0, "ignore_eos": True, **wish}
    chat = number % 3 == 2
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    if number % 2:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return {**response.json(), "finish": response.json()["choices"][0]["finish_reason"]}
    response = await client.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    return {**events[-1], "finish": events[-2]["choices"][0]["finish_reason"]}


@pytest.mark.asyncio
async def test_the_counters_are_the_sums_of_the_answers(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        before = await scrape(client)
        wishes = WISHES * 2
        done = await asyncio.gather(*(answered(client, number, wish) for number, wish in enumerate(wishes)))
        after = await scrape(client)

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    spoken = [answer["metrics"]["speculative_decoding"] for answer in done]
    tiers = [answer["metrics"]["speculation"]["tier"] for answer in done]
    usages = [answer["usage"] for answer in done]
    sums = {name: sum(one[name] for one in spoken) for name in spoken[0] if name.startswith("num_")}
    assert sums["num_accepted_draft_tokens"] > 20
    assert grown("vllm:spec_decode_num_drafts_total") == sums["num_spec_steps"]
    assert grown("vllm:spec_decode_num_draft_tokens_total") == sums["num_draft_tokens"]
    assert grown("vllm:spec_decode_num_accepted_tokens_total") == sums["num_accepted_draft_tokens"]
    for place in range(12):
        reached = sum(sum(one["acceptance_histogram"][place + 1 :]) for one in spoken)
        assert grown("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(place)) == reached
    assert grown("vllm:generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert grown("vllm:prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown("specserve_cached_prompt_tokens_total") == cached
    finishes = [answer["finish"] for answer in done]
    for reason in ("stop", "length"):
        assert grown("vllm:request_success_total", finished_reason=reason) == finishes.count(reason)
    assert "stop" in finishes
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        spoken_name = {"drafts": "num_spec_steps", "accepted_tokens": "num_accepted_draft_tokens"}.get(
            name, f"num_{name}"
        )
        for tier in ("priority", "default", "flex"):
            of_tier = sum(one[spoken_name] for one, its in zip(spoken, tiers, strict=True) if its == tier)
            assert grown(f"specserve_{name}_total", tier=tier) == of_tier, (name, tier)
    assert_times_add_up(after, usages)
    for tier, met in (("priority", True), ("flex", False)):
        assert grown("specserve_slo_total", tier=tier, slo="tpot") == tiers.count(tier)
        assert grown("specserve_slo_met_total", tier=tier) == met * tiers.count(tier)
    assert grown("specserve_slo_total", tier="default") == 0
    assert_decisions_add_up(after, sums["num_draft_tokens"])


def assert_times_add_up(after: Samples, usages: list[dict[str, Any]]) -> None:
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert after.value(f"vllm:{name}_seconds_count") == len(usages)
    later = sum(usage["completion_tokens"] - 1 for usage in usages)
    assert after.value("vllm:inter_token_latency_seconds_count") == later
    assert after.value("specserve_inter_token_latency_seconds_count") == later
    assert after.value("gen_ai_server_request_duration_seconds_count", error_type="") == len(usages)
    assert after.value("vllm:num_requests_running") == 0
    assert after.value("vllm:kv_cache_usage_perc") == 0


def assert_decisions_add_up(after: Samples, num_draft_tokens: float) -> None:
    decisions = dict(after_decisions(after))
    assert sum(decisions.values()) == after.value("specserve_gamma_count")
    assert after.value("specserve_gamma_sum") == num_draft_tokens
    laws = {(tier, law) for tier, law, _ in decisions}
    assert laws == {("priority", "fixed"), ("default", "adaptive"), ("flex", "off")}
    assert decisions["priority", "fixed", "mode_off"] > 0
    assert decisions["flex", "off", "policy_off"] > 0
    assert decisions["flex", "off", "mode_on"] > 0
    assert decisions["priority", "fixed", "fixed"] > 0


def after_decisions(samples: Samples) -> Iterator[tuple[tuple[str, str, str], float]]:
    found: dict[tuple[str, str, str], float] = {}
    for labels, value in samples.of("specserve_decisions_total"):
        assert labels["policy_version"] == "1"
        key = (labels["tier"], labels["law"], labels["reason"])
        found[key] = found.get(key, 0) + value
    yield from found.items()


@pytest.mark.asyncio
async def test_a_client_that_leaves_keeps_the_counters_whole(tmp_path: Path) -> None:
    async with serving(tmp_path) as (backend, client):
        sent = {"model": "specserve-embedded", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
        waiting = asyncio.create_task(client.post("/v1/completions", json=sent))
        while backend.engine.counters.output_tokens < 5:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while not left(backend):
            await asyncio.sleep(0)
        samples = await scrape(client)
    assert samples.value("specserve_requests_cancelled_total") == 1
    assert samples.total("vllm:request_success_total") == 0
    assert samples.value("vllm:generation_tokens_total") >= 5
    assert samples.value("vllm:num_requests_running") == 0


def left(backend: EngineBackend) -> bool:
    return backend.engine.counters.cancelled == 1
