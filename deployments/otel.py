"""The OpenTelemetry view of the stats, and one span a request; pushed by OTLP.

Names are those of OpenTelemetry's GenAI conventions, and `specserve.*` where there is none. No text of a prompt or an
answer is ever recorded. The counters are read when they are exported, and a request's span and times are written once
it is over, so nothing here is in the path of a token.
"""

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specserve.service.stats import FIRST_TOKEN_BOUNDS_S, REQUEST_BOUNDS_S, TOKEN_BOUNDS_S

from .api.backend import CellSnapshot
from .api.reply import VERSION
from .api.watching import CANCELLED, Watch

PROVIDER = "specserve"
Attributes = dict[str, str | int | float | bool | list[str]]
_log = logging.getLogger(__name__)


class Exporter:
    """Observes requests (`RequestObserver`) and exports what it saw, and the cell's counters, until it is closed."""

    def __init__(self, snapshot: Callable[[], CellSnapshot], reader: MetricReader, processor: SpanProcessor) -> None:
        resource = Resource.create({"service.instance.id": snapshot().engine}).merge(_name())
        self._meters = MeterProvider([reader], resource)
        self._tracers = TracerProvider(resource=resource)
        self._tracers.add_span_processor(processor)
        self._tracer = self._tracers.get_tracer(PROVIDER, VERSION)
        meter = self._meters.get_meter(PROVIDER, VERSION)
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration", "s", explicit_bucket_boundaries_advisory=REQUEST_BOUNDS_S
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", explicit_bucket_boundaries_advisory=FIRST_TOKEN_BOUNDS_S
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token", "s", explicit_bucket_boundaries_advisory=TOKEN_BOUNDS_S
        )
        for name, unit, read in COUNTERS:
            meter.create_observable_counter(name, [_callback(snapshot, read)], unit)
        for name, unit, read in GAUGES:
            meter.create_observable_gauge(name, [_callback(snapshot, read)], unit)

    def answered(self, watch: Watch) -> None:
        """Record the times of a request that is over, and its span."""
        attributes = _metric_attributes(watch)
        self._duration.record(watch.duration_s, attributes)
        if watch.error_type is None and watch.first_token_after_s is not None:
            self._first_token.record(watch.first_token_after_s, attributes)
            if watch.per_token_s is not None:
                self._per_token.record(watch.per_token_s, attributes)
        self._write_span(watch)

    def close(self) -> None:
        """Export what is left and stop."""
        self._tracers.shutdown()
        self._meters.shutdown()

    def _write_span(self, watch: Watch) -> None:
        span = self._tracer.start_span(
            f"{watch.operation} {watch.model}",
            context=TraceContextTextMapPropagator().extract(watch.trace_headers),
            kind=SpanKind.SERVER,
            attributes=span_attributes(watch),
            start_time=watch.started_ns,
        )
        for seen in watch.rounds:
            told = {"choice": seen.choice, "tokens": seen.num_tokens, "drafted": seen.num_drafted}
            told["accepted"] = seen.num_accepted
            span.add_event("specserve.round", {f"specserve.round.{key}": n for key, n in told.items()}, seen.at_ns)
        if watch.error_type is not None and watch.error_type != CANCELLED:
            span.set_status(Status(StatusCode.ERROR))
        span.end(watch.started_ns + round(watch.duration_s * 1e9))


def start(snapshot: Callable[[], CellSnapshot]) -> Exporter | None:
    """Return an exporter to where the environment says, None when the extra is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        _log.warning("no telemetry is exported: pip install 'specserve[otel]'")
        return None
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return Exporter(snapshot, reader, BatchSpanProcessor(OTLPSpanExporter()))


def span_attributes(watch: Watch) -> Attributes:
    """Return what a span says of a request: its parameters, its usage, its speculation."""
    first = watch.requests[0]
    found: Attributes = {
        **_metric_attributes(watch),
        "gen_ai.response.id": watch.response_id,
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": 0.0 if first.sampling.greedy else first.sampling.temperature,
        "gen_ai.request.top_p": first.sampling.top_p,
        "gen_ai.request.choice.count": len(watch.requests),
        "gen_ai.usage.input_tokens": len(first.prompt_token_ids),
        "gen_ai.usage.output_tokens": watch.num_tokens,
        "gen_ai.response.finish_reasons": [watch.finish_reasons[choice] for choice in sorted(watch.finish_reasons)],
        "openai.request.service_tier": first.tier,
        "specserve.speculation.mode": first.mode,
        "specserve.rounds": watch.num_rounds,
        "specserve.rounds_not_shown": watch.num_rounds - len(watch.rounds),
    }
    if watch.summaries:
        last = watch.summaries[max(watch.summaries)]
        summaries = watch.summaries.values()
        found |= {
            "gen_ai.usage.cache_read.input_tokens": last.cached_tokens,
            "specserve.speculation.reason": last.reason,
            "specserve.speculation.proposer": last.proposer or "none",
            "specserve.policy_version": last.policy_version,
            "specserve.spec.verify_steps": sum(summary.num_spec_rounds for summary in summaries),
            "specserve.spec.draft_tokens": sum(summary.num_draft_tokens for summary in summaries),
            "specserve.spec.accepted_tokens": sum(summary.num_accepted_tokens for summary in summaries),
        }
    return found


def _metric_attributes(watch: Watch) -> Attributes:
    found: Attributes = {
        "gen_ai.operation.name": watch.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": watch.model,
        "gen_ai.response.model": watch.model,
        "openai.response.service_tier": watch.tier,
    }
    return found if watch.error_type is None else {**found, "error.type": watch.error_type}


def _name() -> Resource:
    """Return the service's name, for those who did not set OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES."""
    named = "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "") or "OTEL_SERVICE_NAME" in os.environ
    return Resource({} if named else {"service.name": PROVIDER})


Read = Callable[[CellSnapshot], Iterable[tuple[float, dict[str, str]]]]


def _callback(snapshot: Callable[[], CellSnapshot], read: Read) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        cell = snapshot()
        about: dict[str, Any] = {"gen_ai.response.model": cell.model_id}
        return [Observation(value, {**about, **attributes}) for value, attributes in read(cell)]

    return observe


def _drafter(tier: str, proposer: str) -> dict[str, str]:
    return {"tier": tier, "proposer": proposer}


COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("specserve.rounds", "{round}", lambda cell: [(cell.stats.rounds, {})]),
    ("specserve.rounds_lost", "{round}", lambda cell: [(cell.stats.rounds_lost, {})]),
    ("specserve.requests", "{request}", lambda cell: [(cell.stats.requests, {})]),
    ("specserve.preemptions", "{request}", lambda cell: [(cell.stats.preempted, {})]),
    ("specserve.prompt_tokens", "{token}", lambda cell: [(cell.stats.prompt_tokens, {})]),
    (
        "specserve.output_tokens",
        "{token}",
        lambda cell: [(count, {"tier": tier}) for tier, count in cell.stats.generated.copy().items()],
    ),
    (
        "specserve.spec.verify_steps",
        "{step}",
        lambda cell: [(drafts, _drafter(*who)) for who, (drafts, _) in cell.stats.drafted().items()],
    ),
    (
        "specserve.spec.draft_tokens",
        "{token}",
        lambda cell: [(tokens, _drafter(*who)) for who, (_, tokens) in cell.stats.drafted().items()],
    ),
    (
        "specserve.spec.accepted_tokens",
        "{token}",
        lambda cell: [(count, _drafter(*who)) for who, count in cell.stats.accepted.copy().items()],
    ),
    (
        "specserve.spec.gamma",
        "{draft}",
        lambda cell: [
            (count, {**_drafter(*who), "gamma": str(gamma)}) for (who, gamma), count in cell.stats.gammas.copy().items()
        ],
    ),
    (
        "specserve.policy.decisions",
        "{decision}",
        lambda cell: [
            (count, {key: str(value) for key, value in decided._asdict().items()})
            for decided, count in cell.stats.decisions.copy().items()
        ],
    ),
    (
        "specserve.proposals_missed",
        "{message}",
        lambda cell: [(count, {"proposer": name}) for name, count in cell.stats.missed.copy().items()],
    ),
)
GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("specserve.requests_running", "{request}", lambda cell: [(cell.num_running, {})]),
    ("specserve.requests_waiting", "{request}", lambda cell: [(cell.num_waiting, {})]),
    ("specserve.kv_cache_usage", "1", lambda cell: [(1 - cell.num_free_pages / cell.num_pages, {})]),
    ("specserve.policy.version", "{version}", lambda cell: [(cell.policy_version, {})]),
    (
        "specserve.proposer_available",
        "1",
        lambda cell: [(float(up), {"proposer": name}) for name, up in cell.proposers.items()],
    ),
)
