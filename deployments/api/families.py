"""The counters and histograms of `/metrics`: their names, what they mean, and where in the stats they are.

`vllm:*` have vLLM's meaning and sum over tiers and proposers; `specserve_*` keep them apart.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from specserve.service.stats import Decided, EngineStats, Histogram, Latencies

from .stats import HttpStats, Served

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


class TimedHttp(NamedTuple):
    """A histogram of seconds, which every kind of HTTP request has one of."""

    name: str
    help: str
    read: Callable[[HttpStats], dict[Served, Histogram]]


def _plain(read: Callable[[EngineStats], int]) -> Callable[[EngineStats], Iterable[Value]]:
    return lambda stats: [((), read(stats))]


def _num_drafts(stats: EngineStats) -> int:
    return sum(drafts for drafts, _ in stats.drafted().values())


def _ended(stats: EngineStats) -> Iterable[Value]:
    reasons = sorted({reason for _, reason in stats.ended.copy()} | {"stop", "length"})
    return [((reason,), sum(n for (_, why), n in stats.ended.copy().items() if why == reason)) for reason in reasons]


def _with_objective(stats: EngineStats) -> Iterable[Value]:
    tiers = sorted({tier for tier, _ in stats.objectives.copy()})
    return [((tier, "tpot"), stats.objectives[tier, True] + stats.objectives[tier, False]) for tier in tiers]


def _objective_met(stats: EngineStats) -> Iterable[Value]:
    tiers = sorted({tier for tier, _ in stats.objectives.copy()})
    return [((tier, "tpot"), stats.objectives[tier, True]) for tier in tiers]


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
    Counted("specserve_slo", "Finished requests whose tier has an objective.", ("tier", "slo"), _with_objective),
    Counted("specserve_slo_met", "Those that met it.", ("tier", "slo"), _objective_met),
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


GEN_AI_TIMES = (
    TimedHttp("gen_ai_server_request_duration_seconds", "From arrival to the last token.", lambda http: http.durations),
    TimedHttp(
        "gen_ai_server_time_to_first_token_seconds", "From arrival to the first token.", lambda http: http.first_token
    ),
    TimedHttp(
        "gen_ai_server_time_per_output_token_seconds",
        "Time after the first token, over the tokens after it.",
        lambda http: http.per_token,
    ),
)
