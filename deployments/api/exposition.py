"""The Prometheus view of the stats: names that vLLM's users scrape, OpenTelemetry's GenAI names, and our own.

Nothing is counted here.
"""

from collections.abc import Iterator, Sequence
from typing import cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from specserve.service.stats import Drafter, Histogram, Latencies

from .backend import CellSnapshot
from .families import GEN_AI_TIMES, OWN_COUNTERS, OWN_TIMES, VLLM_COUNTERS, VLLM_TIMES, Counted, Timed
from .stats import Served

PROVIDER = "specserve"
GAMMA_BOUNDS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
CELL = ("model_name", "engine")
GEN_AI = (
    "engine", "gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model",
    "openai_response_service_tier", "error_type",
)  # fmt: skip


class Exposition:
    """The families of one scrape: every cell's, and this process's memory and time."""

    def __init__(self, cells: Sequence[CellSnapshot]) -> None:
        self._cells = cells

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        cells = self._cells
        for counted in (*VLLM_COUNTERS, *OWN_COUNTERS):
            yield _counter(counted, cells)
        for timed in VLLM_TIMES:
            yield _over_tiers(timed, cells)
        for timed in OWN_TIMES:
            yield _by_tier(timed, cells)
        yield _gammas(cells)
        yield from _gauges(cells)
        yield from _shadows(cells)
        yield from _http_families(cells)
        yield from ProcessCollector(registry=None).collect()

    def encoded(self, accept: str) -> tuple[bytes, str]:
        """Return the text in the format that a scraper's `Accept` header prefers, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(cast(CollectorRegistry, self)), content_type


def _counter(counted: Counted, cells: Sequence[CellSnapshot]) -> Metric:
    family = CounterMetricFamily(counted.name, counted.help, labels=(*CELL, *counted.labels))
    for cell in cells:
        for labels, value in counted.read(cell.stats):
            family.add_metric((cell.model_id, cell.engine, *labels), value)
    return family


def _over_tiers(timed: Timed, cells: Sequence[CellSnapshot]) -> Metric:
    family = HistogramMetricFamily(timed.name, timed.help, labels=CELL)
    for cell in cells:
        blank = timed.read(Latencies())
        for latencies in cell.stats.latencies.copy().values():
            histogram = timed.read(latencies)
            blank.counts = [ours + theirs for ours, theirs in zip(blank.counts, histogram.counts, strict=True)]
            blank.total += histogram.total
        family.add_metric((cell.model_id, cell.engine), *_buckets(blank))
    return family


def _by_tier(timed: Timed, cells: Sequence[CellSnapshot]) -> Metric:
    family = HistogramMetricFamily(timed.name, timed.help, labels=(*CELL, "tier"))
    for cell in cells:
        for tier, latencies in sorted(cell.stats.latencies.copy().items()):
            family.add_metric((cell.model_id, cell.engine, tier), *_buckets(timed.read(latencies)))
    return family


def _gammas(cells: Sequence[CellSnapshot]) -> Metric:
    labels = (*CELL, "tier", "proposer")
    family = HistogramMetricFamily("specserve_gamma", "Tokens drafted for a request in a round.", labels=labels)
    for cell in cells:
        found: dict[Drafter, Histogram] = {}
        for (drafter, gamma), count in cell.stats.gammas.copy().items():
            found.setdefault(drafter, Histogram(GAMMA_BOUNDS)).observe(gamma, count)
        for drafter, histogram in sorted(found.items()):
            family.add_metric((cell.model_id, cell.engine, *drafter), *_buckets(histogram))
    return family


def _gauges(cells: Sequence[CellSnapshot]) -> Iterator[Metric]:
    running = GaugeMetricFamily("vllm:num_requests_running", "Requests that take part in rounds.", labels=CELL)
    waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait for a place.", labels=CELL)
    used = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV pages held, 0 to 1.", labels=CELL)
    proposer = GaugeMetricFamily(
        "specserve_proposer_available", "1 when the proposer can be asked.", labels=(*CELL, "proposer")
    )
    version = GaugeMetricFamily(
        "specserve_policy_version_info", "The policy version in force.", labels=(*CELL, "policy_version")
    )
    for cell in cells:
        labels = (cell.model_id, cell.engine)
        running.add_metric(labels, cell.num_running)
        waiting.add_metric(labels, cell.num_waiting)
        used.add_metric(labels, 1 - cell.num_free_pages / cell.num_pages)
        version.add_metric((*labels, str(cell.policy_version)), 1)
        for name, available in cell.proposers.items():
            proposer.add_metric((*labels, name), available)
    yield from (running, waiting, used, proposer, version)


def _shadows(cells: Sequence[CellSnapshot]) -> Iterator[Metric]:
    """Yield what policies that are only watched would have done beside the acting one."""
    labels = (*CELL, "policy", "policy_version")
    decisions = CounterMetricFamily("specserve_shadow_decisions", "Decisions that a shadow made too.", labels=labels)
    changed = CounterMetricFamily("specserve_shadow_changed_decisions", "Those that differ.", labels=labels)
    tokens = CounterMetricFamily("specserve_shadow_draft_tokens", "Tokens it would have asked for.", labels=labels)
    for cell in cells:
        if cell.shadow is not None:
            place = (cell.model_id, cell.engine, "shadow", str(cell.shadow.version))
            decisions.add_metric(place, cell.shadow.decisions)
            changed.add_metric(place, cell.shadow.changed)
            tokens.add_metric(place, cell.shadow.shadow_draft_tokens)
    yield from (decisions, changed, tokens)


def _http_families(cells: Sequence[CellSnapshot]) -> Iterator[Metric]:
    responses = CounterMetricFamily("specserve_http_responses", "Answers begun.", labels=(*CELL, "route", "status"))
    for cell in cells:
        for (route, status), count in sorted(cell.http.responses.copy().items()):
            responses.add_metric((cell.model_id, cell.engine, route, str(status)), count)
    yield responses
    downgrades = CounterMetricFamily(
        "specserve_requests_downgraded", "Requests served as a lower tier than asked.", labels=(*CELL, "reason")
    )
    for cell in cells:
        for why, count in sorted(cell.http.downgrades.copy().items()):
            downgrades.add_metric((cell.model_id, cell.engine, why), count)
    yield downgrades
    for timed in GEN_AI_TIMES:
        family = HistogramMetricFamily(timed.name, timed.help, labels=GEN_AI)
        for cell in cells:
            for served, histogram in sorted(timed.read(cell.http).copy().items()):
                family.add_metric(_gen_ai_labels(served, cell), *_buckets(histogram))
        yield family


def _gen_ai_labels(served: Served, cell: CellSnapshot) -> tuple[str, ...]:
    model = cell.model_id
    return (cell.engine, served.operation, PROVIDER, model, model, served.tier, served.error_type)


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative counts by upper bound, and the sum of all values."""
    cumulative: list[tuple[str, float]] = []
    so_far = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        so_far += count
        cumulative.append(("+Inf" if bound == float("inf") else str(float(bound)), so_far))
    return cumulative, histogram.total
