"""What an engine has seen since it started, counted where it happens. Views of it are made by whoever reads it."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .ports import Decision
from .requests import RequestSummary
from .scheduler import TIER_ORDER

OTHER = "other"
NONE = "none"
MAX_REASONS = 64
MAX_VERSIONS = 8
"""Counts of decisions are kept for the newest versions of the policy only: every change would add series for ever."""

REQUEST_BOUNDS_S = (0.001, 0.0025, 0.005, *(0.01 * 2**power for power in range(14)))
FIRST_TOKEN_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
TOKEN_BOUNDS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip


@dataclass(slots=True)
class Histogram:
    """Counts of values by upper bound. `counts` has one place more than `bounds`, for what is larger than all."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Drafter(NamedTuple):
    """Who drafted for whom."""

    tier: str
    proposer: str


class Decided(NamedTuple):
    """The kind of a decision about one request in one round."""

    tier: str
    law: str
    reason: str
    proposer: str
    policy_version: int


@dataclass(slots=True)
class Latencies:
    """Seconds that the requests of a tier took. `between_tokens` counts each token after a request's first with its
    share of the time since the round before."""

    queue: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    prefill: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS_S))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS_S))
    decode: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    whole: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))


@dataclass(slots=True)
class EngineStats:
    """Only ever counted up. Of `prompt_tokens`, the cache spared `cached_tokens`.

    `gammas` counts request rounds by (tier, proposer, tokens drafted), `accepted_at` accepted draft tokens by their
    place in the draft, from 0, `objectives` finished requests by (tier, whether they met its TPOT objective). A round
    that was lost counts once, in `rounds_lost`, and its drafts nowhere.
    """

    rounds: int = 0
    requests: int = 0
    cancelled: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rounds_lost: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    gammas: Counter[tuple[Drafter, int]] = field(default_factory=Counter)
    accepted: Counter[Drafter] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    decisions: Counter[Decided] = field(default_factory=Counter)
    generated: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    objectives: Counter[tuple[str, bool]] = field(default_factory=Counter)
    latencies: dict[str, Latencies] = field(default_factory=dict)
    _reasons: set[str] = field(default_factory=set)
    _versions: list[int] = field(default_factory=list)

    @property
    def finished(self) -> int:
        """Requests answered to their end."""
        return self.ended.total()

    @property
    def proposals_missed(self) -> int:
        """Messages to proposers that no usable answer came back to in time."""
        return self.missed.total()

    @property
    def drafts_dropped(self) -> int:
        """Drafts that were stale or malformed."""
        return self.dropped.total()

    @property
    def draft_tokens(self) -> int:
        """Tokens drafted and scored."""
        return sum(gamma * count for (_, gamma), count in self.gammas.copy().items())

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that the verifier accepted."""
        return self.accepted.total()

    @property
    def output_tokens(self) -> int:
        """Tokens committed."""
        return self.generated.total()

    def totals(self) -> dict[str, int]:
        """Return what was counted, whatever the tier, reason and proposer."""
        return {name: getattr(self, name) for name in TOTALS}

    def drafted(self) -> dict[Drafter, tuple[int, int]]:
        """Return drafts and draft tokens of everyone who drafted."""
        found: dict[Drafter, tuple[int, int]] = {}
        for (drafter, gamma), count in self.gammas.copy().items():
            if gamma:
                drafts, tokens = found.get(drafter, (0, 0))
                found[drafter] = (drafts + count, tokens + gamma * count)
        return found

    def decide(self, tier: str, decision: Decision, version: int, num_drafted: int, num_accepted: int) -> None:
        """Count one request's part of a round that was committed."""
        drafter = Drafter(bounded_tier(tier), decision.proposer if decision.proposer and num_drafted else NONE)
        self.gammas[drafter, num_drafted] += 1
        if num_accepted:
            self.accepted[drafter] += num_accepted
            for place in range(num_accepted):
                self.accepted_at[place] += 1
        if version not in self._versions:
            self._newer(version)
        reason = decision.reason
        if reason not in self._reasons:
            if len(self._reasons) >= MAX_REASONS:
                reason = OTHER
            self._reasons.add(reason)
        self.decisions[Decided(drafter.tier, decision.law, reason, decision.proposer or NONE, version)] += 1

    def commit(self, tier: str, num_tokens: int, since_s: float | None) -> None:
        """Count committed tokens; `since_s` is the time since the request's last ones, None when it had none."""
        tier = bounded_tier(tier)
        self.generated[tier] += num_tokens
        if since_s is not None and num_tokens:
            self._latencies(tier).between_tokens.observe(since_s / num_tokens, num_tokens)

    def end(self, summary: RequestSummary, finish_reason: str, tpot_slo_ms: float | None = None) -> None:
        """Count a finished request, against its tier's objective if that has one."""
        tier = bounded_tier(summary.tier)
        self.ended[tier, finish_reason] += 1
        num_later = summary.completion_tokens - 1
        if tpot_slo_ms is not None and num_later > 0:
            self.objectives[tier, summary.generation_ms / num_later <= tpot_slo_ms] += 1
        latencies = self._latencies(tier)
        latencies.queue.observe(summary.queue_ms / 1e3)
        latencies.prefill.observe((summary.time_to_first_token_ms - summary.queue_ms) / 1e3)
        latencies.first_token.observe(summary.time_to_first_token_ms / 1e3)
        latencies.decode.observe(summary.generation_ms / 1e3)
        latencies.whole.observe((summary.time_to_first_token_ms + summary.generation_ms) / 1e3)

    def _latencies(self, tier: str) -> Latencies:
        if tier not in self.latencies:
            self.latencies[tier] = Latencies()
        return self.latencies[tier]

    def _newer(self, version: int) -> None:
        self._versions.append(version)
        if len(self._versions) > MAX_VERSIONS:
            gone = self._versions.pop(0)
            self.decisions = Counter({key: count for key, count in self.decisions.items() if key[4] != gone})


TOTALS = (
    "rounds", "requests", "finished", "cancelled", "preempted", "prompt_tokens", "cached_tokens", "rounds_lost",
    "proposals_missed", "drafts_dropped", "draft_tokens", "accepted_tokens", "output_tokens",
)  # fmt: skip


def bounded_tier(tier: str) -> str:
    """Return the tier's name, or `other` for one that is not ours: a label has few values."""
    return tier if tier in TIER_ORDER else OTHER
