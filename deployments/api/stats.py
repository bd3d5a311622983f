"""What the HTTP surface has seen: answers by route and status, and how long generation requests took."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from specserve.service.stats import FIRST_TOKEN_BOUNDS_S, REQUEST_BOUNDS_S, TOKEN_BOUNDS_S, Histogram, bounded_tier

from .watching import Operation, Watch


class Served(NamedTuple):
    """A kind of generation request; `error_type` is empty for those that went well."""

    operation: Operation
    tier: str
    error_type: str


@dataclass(slots=True)
class HttpStats:
    """Counts since the start. Times are those of whole HTTP requests, however many choices they have."""

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    downgrades: Counter[str] = field(default_factory=Counter)
    durations: dict[Served, Histogram] = field(default_factory=dict)
    first_token: dict[Served, Histogram] = field(default_factory=dict)
    per_token: dict[Served, Histogram] = field(default_factory=dict)

    def answered(self, watch: Watch) -> None:
        """Count a generation request that is over."""
        served = Served(watch.operation, bounded_tier(watch.tier), watch.error_type or "")
        self.durations.setdefault(served, Histogram(REQUEST_BOUNDS_S)).observe(watch.duration_s)
        if watch.error_type is not None or watch.first_token_after_s is None:
            return
        self.first_token.setdefault(served, Histogram(FIRST_TOKEN_BOUNDS_S)).observe(watch.first_token_after_s)
        if watch.per_token_s is not None:
            self.per_token.setdefault(served, Histogram(TOKEN_BOUNDS_S)).observe(watch.per_token_s)
