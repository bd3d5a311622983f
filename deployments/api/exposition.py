"""The Prometheus view of the stats: names that vLLM's users scrape, OpenTelemetry's GenAI names, and our own.

Nothing is counted here. `vllm:*` have vLLM's meaning and sum over tiers and proposers; `specserve_*` keep them apart.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specserve.service.stats import Decided, Drafter, EngineStats, Histogram, Latencies

from .backend import CellSnapshot
from .stats import HttpStats, Served

PROVIDER = "specserve"
GAMMA_BOUNDS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
CELL = ("model_name", "engine")
GEN_AI = (
    "gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model",
    "openai_response_service_tier", "error_type",
)  # fmt: skip

Value = tuple[tuple[str, ...], float]


class Counted(NamedTuple):
    """A counter: its name without `_total`, what it means, its labels beside the cell's, and how to read it."""

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[EngineStats], Iterable[Value]]


class Timed(NamedTuple):
    """A histogram of seconds, which every tier has one of."""

    name: str
    help: str
    read: Callable[[Latencies], Histogram]


def _plain(read: Callable[[EngineStats], int]) -> Callable[[EngineStats], Iterable[Value]]:
    return lambda stats: [((), read(stats))]


def _num_drafts(stats: EngineStats) -> int:
    return sum(drafts for drafts, _ in stats.drafted().values())


def _ended(stats: EngineStats) -> Iterable[Value]:
    reasons = sorted({reason for _, reason in stats.ended.copy()} | {"stop", "length"})
    return [((reason,), sum(n for (_, why), n in stats.ended.copy().items() if why == reason)) for reason in reasons]


def _decided(decided: Decided) -> tuple[str, ...]:
    return (decided.tier, decided.law, decided.reason, decided.proposer, str(decided.policy_version))


VLLM_COUNTERS = (
    Counted("vllm:spec_decode_num_drafts", "Drafts scored, one a request and round.", (), _plain(_num_drafts)),
    Counted("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", (), _plain(lambda stats: stats.draft_tokens)),
    Counted(
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens accepted.",
        (),
        _plain(lambda stats: stats.accepted_tokens),
    ),
    Counted(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by their place in the draft.",
        ("position",),
        lambda stats: [((str(place),), count) for place, count in sorted(stats.accepted_at.copy().items())],
    ),
    Counted("vllm:num_preemptions", "Requests whose KV was given up for others.", (), _plain(lambda s: s.preempted)),
    Counted("vllm:prompt_tokens", "Prompt tokens of admitted requests.", (), _plain(lambda stats: stats.prompt_tokens)),
    Counted("vllm:generation_tokens", "Tokens generated.", (), _plain(lambda stats: stats.output_tokens)),
    Counted("vllm:request_success", "Requests answered to their end.", ("finished_reason",), _ended),
)
VLLM_TIMES = (
    Timed("vllm:time_to_first_token_seconds", "From arrival to the first token.", lambda times: times.first_token),
    Timed(
        "vllm:inter_token_latency_seconds",
        "Per token after the first: the time since the round before, shared among the round's tokens.",
        lambda times: times.between_tokens,
    ),
    Timed("vllm:e2e_request_latency_seconds", "From arrival to the last token.", lambda times: times.whole),
    Timed("vllm:request_queue_time_seconds", "From arrival to admission.", lambda times: times.queue),
    Timed("vllm:request_prefill_time_seconds", "From admission to the first token.", lambda times: times.prefill),
    Timed("vllm:request_decode_time_seconds", "From the first token to the last.", lambda times: times.decode),
)
OWN_COUNTERS = (
    Counted("specserve_rounds", "Rounds begun.", (), _plain(lambda stats: stats.rounds)),
    Counted("specserve_rounds_lost", "Rounds lost with a process and done again.", (), _plain(lambda s: s.rounds_lost)),
    Counted("specserve_requests", "Requests taken in.", (), _plain(lambda stats: stats.requests)),
    Counted("specserve_requests_cancelled", "Requests whose client left.", (), _plain(lambda stats: stats.cancelled)),
    Counted("specserve_cached_prompt_tokens", "Prompt tokens found in cache.", (), _plain(lambda s: s.cached_tokens)),
    Counted(
        "specserve_requests_finished",
        "Requests answered to their end.",
        ("tier", "finished_reason"),
        lambda stats: sorted(stats.ended.copy().items()),
    ),
    Counted(
        "specserve_output_tokens",
        "Tokens generated.",
        ("tier",),
        lambda stats: [((tier,), count) for tier, count in sorted(stats.generated.copy().items())],
    ),
    Counted(
        "specserve_drafts",
        "Drafts scored, one a request and round.",
        ("tier", "proposer"),
        lambda stats: [(tuple(drafter), drafts) for drafter, (drafts, _) in sorted(stats.drafted().items())],
    ),
    Counted(
        "specserve_draft_tokens",
        "Tokens drafted.",
        ("tier", "proposer"),
        lambda stats: [(tuple(drafter), tokens) for drafter, (_, tokens) in sorted(stats.drafted().items())],
    ),
    Counted(
        "specserve_accepted_tokens",
        "Draft tokens accepted.",
        ("tier", "proposer"),
        lambda stats: [(tuple(drafter), stats.accepted[drafter]) for drafter in sorted(stats.drafted())],
    ),
    Counted(
        "specserve_decisions",
        "Decisions of the policy about a request in a round.",
        ("tier", "law", "reason", "proposer", "policy_version"),
        lambda stats: [(_decided(decided), count) for decided, count in sorted(stats.decisions.copy().items())],
    ),
    Counted(
        "specserve_proposals_missed",
        "Messages to a proposer that were not answered in time.",
        ("proposer",),
        lambda stats: [((name,), count) for name, count in sorted(stats.missed.copy().items())],
    ),
    Counted(
        "specserve_drafts_dropped",
        "Drafts that were stale or malformed.",
        ("proposer",),
        lambda stats: [((name,), count) for name, count in sorted(stats.dropped.copy().items())],
    ),
)
OWN_TIMES = tuple(
    Timed(timed.name.replace("vllm:", "specserve_").replace("e2e_request_latency", "request"), timed.help, timed.read)
    for timed in VLLM_TIMES
)


class StatsCollector(Collector):
    """Makes the families anew at every scrape from whatever `cells` returns."""

    def __init__(self, cells: Callable[[], Sequence[CellSnapshot]], http: HttpStats) -> None:
        self._cells = cells
        self._http = http

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        cells = self._cells()
        for counted in (*VLLM_COUNTERS, *OWN_COUNTERS):
            yield _counter(counted, cells)
        for timed in VLLM_TIMES:
            yield _over_tiers(timed, cells)
        for timed in OWN_TIMES:
            yield _by_tier(timed, cells)
        yield _gammas(cells)
        yield from _gauges(cells)
        yield from _http_families(self._http, cells)


def registry(cells: Callable[[], Sequence[CellSnapshot]], http: HttpStats) -> CollectorRegistry:
    """Return a registry of the stats and of this process's memory and processor time."""
    made = CollectorRegistry()
    made.register(StatsCollector(cells, http))
    ProcessCollector(registry=made)
    return made


def encoded(made: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the exposition in the format that a scraper's `Accept` header prefers, and its content type."""
    encode, content_type = choose_encoder(accept)
    return encode(made), content_type


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


def _http_families(http: HttpStats, cells: Sequence[CellSnapshot]) -> Iterator[Metric]:
    responses = CounterMetricFamily("specserve_http_responses", "Answers begun.", labels=("route", "status"))
    for (route, status), count in sorted(http.responses.copy().items()):
        responses.add_metric((route, str(status)), count)
    yield responses
    model = cells[0].model_id if cells else ""
    for name, help_text, found in (
        ("request_duration", "From a request's arrival to its last token.", http.durations),
        ("time_to_first_token", "From a request's arrival to its first token.", http.first_token),
        ("time_per_output_token", "Time after the first token, over the tokens after it.", http.per_token),
    ):
        family = HistogramMetricFamily(f"gen_ai_server_{name}_seconds", help_text, labels=GEN_AI)
        for served, histogram in sorted(found.copy().items()):
            family.add_metric(_gen_ai_labels(served, model), *_buckets(histogram))
        yield family


def _gen_ai_labels(served: Served, model: str) -> tuple[str, ...]:
    return (served.operation, PROVIDER, model, model, served.tier, served.error_type)


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative counts by upper bound, and the sum of all values."""
    cumulative: list[tuple[str, float]] = []
    so_far = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        so_far += count
        cumulative.append(("+Inf" if bound == float("inf") else str(float(bound)), so_far))
    return cumulative, histogram.total
