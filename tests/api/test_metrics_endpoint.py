"""`GET /metrics`: the names that others scrape, and what the HTTP surface itself counts."""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from support.scrape import Samples, scrape

from specserve.deployments.api.app import build_api
from specserve.deployments.api.watching import CANCELLED
from specserve.service.errors import RoundLostError

TEXT = {"model": "org/tiny", "prompt": "hi"}
CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
VLLM = {
    "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc", "vllm:num_preemptions", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds", "vllm:prompt_tokens",
    "vllm:generation_tokens", "vllm:request_success",
}  # fmt: skip
GEN_AI = {
    "gen_ai_server_request_duration_seconds",
    "gen_ai_server_time_to_first_token_seconds",
    "gen_ai_server_time_per_output_token_seconds",
}


@pytest.mark.asyncio
async def test_the_names_that_others_scrape_are_there_with_their_labels(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families.keys() >= VLLM | GEN_AI
    samples = Samples(response.text)
    cell = {"model_name": "org/tiny", "engine": "cell-1"}
    assert samples.value("vllm:num_requests_running", **cell) == 2
    assert samples.value("vllm:num_requests_waiting", **cell) == 3
    assert samples.value("vllm:kv_cache_usage_perc", **cell) == pytest.approx(0.6)
    assert samples.value("specserve_proposer_available", proposer="ngram", **cell) == 1
    assert samples.value("specserve_policy_version_info", policy_version="7", **cell) == 1
    shadow = {"policy": "shadow", "policy_version": "9", **cell}
    assert samples.value("specserve_shadow_decisions_total", **shadow) == 20
    assert samples.value("specserve_shadow_changed_decisions_total", **shadow) == 5
    assert samples.value("specserve_shadow_draft_tokens_total", **shadow) == 40
    assert samples.value("process_resident_memory_bytes") > 0


@pytest.mark.asyncio
async def test_a_scraper_may_ask_for_openmetrics(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert {family.name for family in openmetrics_families(response.text)} >= VLLM | GEN_AI


@pytest.mark.asyncio
async def test_requests_that_got_a_lower_tier_are_counted_by_reason(client: httpx.AsyncClient, backend: Any) -> None:
    backend.http.downgrades["over_quota"] += 2
    assert (await scrape(client)).value("specserve_requests_downgraded_total", reason="over_quota") == 2


@pytest.mark.asyncio
async def test_answers_are_counted_by_route_and_status(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json=TEXT)
    await client.post("/v1/completions", json=TEXT | {"n": 0})
    await client.get("/v1/models/one")
    await client.get("/v1/models/two")
    for path in ("/a", "/b"):
        await client.get(path)
    samples = await scrape(client)
    counted = {(key["route"], key["status"]): value for key, value in samples.of("specserve_http_responses_total")}
    assert counted == {
        ("/v1/completions", "200"): 1,
        ("/v1/completions", "400"): 1,
        ("/v1/models/{model_id:path}", "404"): 2,
        ("unmatched", "404"): 2,
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_gen_ai_times_are_kept_by_operation_tier_and_error(
    client: httpx.AsyncClient, backend: Any, script: SimpleNamespace, stream: bool
) -> None:
    await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    await client.post("/v1/completions", json=TEXT | {"stream": stream, "n": 2})
    backend.script = lambda request: [script.step(request, "He"), RoundLostError("lost")]
    await client.post("/v1/completions", json=TEXT | {"stream": stream, "n": 2})
    samples = await scrape(client)

    def count(name: str, operation: str, error: str) -> float:
        labels = {"gen_ai_operation_name": operation, "gen_ai_request_model": "org/tiny", "error_type": error}
        tier = {"gen_ai_provider_name": "specserve", "openai_response_service_tier": "default"}
        return samples.value(f"gen_ai_server_{name}_seconds_count", **labels, **tier)

    assert count("request_duration", "chat", "") == 1
    assert count("request_duration", "text_completion", "") == 1
    assert count("request_duration", "text_completion", "RoundLostError") == 1
    assert count("time_to_first_token", "text_completion", "") == 1
    assert count("time_per_output_token", "chat", "") == 1


@pytest.mark.asyncio
async def test_a_client_that_leaves_is_an_error_of_its_own_kind(backend: Any, script: SimpleNamespace) -> None:
    backend.script = lambda request: [script.step(request, "He")]
    app = build_api(backend)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        waiting = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        while not backend.streams:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(backend.streams[0].cancelled.wait(), 10)
        samples = await scrape(client)
    assert samples.value("gen_ai_server_request_duration_seconds_count", error_type=CANCELLED) == 1
