"""OpenTelemetry: one span a request under the caller's, the GenAI names, and never a word of the text."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.cells import FixedPlanner
from support.rounds import Guessing, TokenRounds, token_engine, tokenizer

from specserve.deployments.api.app import build_api
from specserve.deployments.api.backend import AnswerStyle
from specserve.deployments.api.watching import MAX_ROUNDS
from specserve.deployments.backend import OTLP_ENDPOINT, EngineBackend
from specserve.deployments.otel import Exporter

SECRET = "the-secret-of-the-prompt"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Telling:
    """A backend over token rounds, exporting to memory."""

    def __init__(self) -> None:
        engine = token_engine(TokenRounds(256, 4), FixedPlanner("guessing", 4), [Guessing(0.7)])

        async def nothing() -> None:
            pass

        self.backend = EngineBackend(engine, "tiny", tokenizer(), nothing, AnswerStyle())
        self.spans = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        self.exporter = Exporter(self.backend.snapshot, self.reader, SimpleSpanProcessor(self.spans))
        self.backend.observers.append(self.exporter)

    async def post(self, **body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(build_api(self.backend))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            sent = {"model": "tiny", "prompt": [3, 4, 5], "ignore_eos": True, **body}
            return await client.post("/v1/completions", json=sent, headers=HEADERS)

    def metrics(self) -> dict[str, list[Any]]:
        found = json.loads(self.reader.get_metrics_data().to_json())
        metrics = [m for r in found["resource_metrics"] for s in r["scope_metrics"] for m in s["metrics"]]
        return {metric["name"]: metric["data"]["data_points"] for metric in metrics}


@pytest.fixture
def telling() -> Iterator[Telling]:
    made = Telling()
    yield made
    made.exporter.close()


async def one(telling: Telling, **body: Any) -> ReadableSpan:
    await telling.backend.start()
    response = await telling.post(**body)
    await telling.backend.engine.stop()
    assert response.status_code == 200, response.text
    (span,) = telling.spans.get_finished_spans()
    return span


@pytest.mark.asyncio
async def test_a_request_is_a_span_of_its_callers_trace(telling: Telling) -> None:
    span = await one(telling, max_tokens=24, service_tier="priority", speculation={"mode": "on"})
    assert span.name == "text_completion tiny"
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    told = span.attributes
    assert told["gen_ai.operation.name"] == "text_completion"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 24)
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert (told["openai.request.service_tier"], told["openai.response.service_tier"]) == ("priority", "priority")
    assert told["specserve.policy_version"] == 7
    assert 0 < told["specserve.spec.accepted_tokens"] <= told["specserve.spec.draft_tokens"]
    assert span.end_time > span.start_time


@pytest.mark.asyncio
async def test_rounds_are_events_up_to_a_bound(telling: Telling) -> None:
    span = await one(telling, max_tokens=400, speculation={"mode": "off"})
    rounds = [event.attributes for event in span.events]
    assert len(rounds) == MAX_ROUNDS
    assert span.attributes["specserve.rounds"] == len(rounds) + span.attributes["specserve.rounds_not_shown"]
    drafted = sum(event["specserve.round.drafted"] for event in rounds)
    assert sum(event["specserve.round.accepted"] for event in rounds) <= drafted
    assert all(event["specserve.round.tokens"] >= 1 for event in rounds)


@pytest.mark.asyncio
async def test_the_metrics_say_what_the_engine_counted(telling: Telling) -> None:
    span = await one(telling, max_tokens=24)
    metrics = telling.metrics()
    for name in ("verify_steps", "draft_tokens", "accepted_tokens"):
        (point,) = metrics[f"specserve.spec.{name}"]
        assert point["value"] == span.attributes[f"specserve.spec.{name}"]
        assert point["attributes"] == {"gen_ai.response.model": "tiny", "tier": "default", "proposer": "guessing"}
    assert sum(point["value"] for point in metrics["specserve.policy.decisions"]) > 0
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        (point,) = metrics[f"gen_ai.server.{name}"]
        assert point["count"] == 1
    (output,) = metrics["specserve.output_tokens"]
    assert output["value"] == 24


@pytest.mark.asyncio
async def test_no_text_leaves(telling: Telling) -> None:
    telling.backend.engine.config = replace(telling.backend.engine.config, vocab_size=len(tokenizer()))
    span = await one(telling, prompt=SECRET, max_tokens=8, stop=[SECRET], user=SECRET)
    assert span.attributes["gen_ai.usage.input_tokens"] > 1
    assert SECRET not in span.to_json()
    assert SECRET not in json.dumps(telling.metrics())


def test_nothing_is_exported_unless_the_environment_says_where(
    telling: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OTLP_ENDPOINT, raising=False)
    before = list(telling.backend.observers)
    telling.backend.export_telemetry()
    assert telling.backend.observers == before


class Collecting(BaseHTTPRequestHandler):
    """Takes in whatever is pushed, by path."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.seen[self.path] += 1  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Collecting) as server:
        server.seen = Counter()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.asyncio
async def test_metrics_and_traces_are_pushed_to_where_the_environment_says(
    telling: Telling, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OTLP_ENDPOINT, f"http://127.0.0.1:{collector.server_address[1]}")
    telling.backend.export_telemetry()
    await one(telling, max_tokens=8)
    pushing = telling.backend.observers[-1]
    assert isinstance(pushing, Exporter)
    await asyncio.to_thread(pushing.close)
    assert collector.seen["/v1/traces"] >= 1
    assert collector.seen["/v1/metrics"] >= 1
