"""The guard of a canary: what its requests got, and whether that is bad enough to end it."""

import math
from collections import Counter
from dataclasses import dataclass, field

from .rollout import Guard

_STEP = math.log(1.05)
_LEAST_MS = 1e-3
_ENOUGH_TESTED = 50


@dataclass(slots=True)
class Tally:
    """What became of the requests of one version; only ever counted up.

    `tpot` counts requests by their milliseconds per output token after the first, in steps of 5%; `tested` and
    `accepted` are draft tokens.
    """

    finished: int = 0
    failed: int = 0
    tested: int = 0
    accepted: int = 0
    tpot: Counter[int] = field(default_factory=Counter)

    def end(self, failed: bool, tpot_ms: float | None = None) -> None:
        """Count a request that ended."""
        self.finished += not failed
        self.failed += failed
        if tpot_ms is not None:
            self.tpot[round(math.log(max(tpot_ms, _LEAST_MS)) / _STEP)] += 1

    def test(self, num_tested: int, num_accepted: int) -> None:
        """Count the tokens of a draft."""
        self.tested += num_tested
        self.accepted += num_accepted

    def plus(self, other: "Tally") -> "Tally":
        """Return both together."""
        return Tally(
            self.finished + other.finished,
            self.failed + other.failed,
            self.tested + other.tested,
            self.accepted + other.accepted,
            self.tpot + other.tpot,
        )

    def since(self, start: "Tally") -> "Tally":
        """Return what was added since `start`; everything when it is a new count, as after a restart."""
        if self.finished < start.finished or self.failed < start.failed or self.tested < start.tested:
            return self
        return Tally(
            self.finished - start.finished,
            self.failed - start.failed,
            self.tested - start.tested,
            self.accepted - start.accepted,
            self.tpot - start.tpot,
        )

    @property
    def tpot_p95_ms(self) -> float | None:
        """The milliseconds per output token that 95 of 100 requests kept, to 5%; None without requests."""
        left = math.ceil(0.95 * self.tpot.total())
        for bucket in sorted(self.tpot):
            left -= self.tpot[bucket]
            if left <= 0:
                return math.exp(bucket * _STEP)
        return None


def verdict(guard: Guard, canary: Tally, active: Tally) -> str | None:
    """Return why the canary must end, as a sentence; None while there is no reason."""
    ended = canary.finished + canary.failed
    if ended < guard.min_requests:
        return None
    errors = canary.failed / ended if ended else 0.0
    if guard.error_rate is not None and errors > guard.error_rate:
        return f"{errors:.1%} of the canary's requests failed, over {guard.error_rate:.1%}"
    p95, usual = canary.tpot_p95_ms, active.tpot_p95_ms
    if guard.tpot_p95_ms is not None and p95 is not None and p95 > guard.tpot_p95_ms:
        return f"the canary's TPOT p95 is {p95:.1f} ms, over {guard.tpot_p95_ms:.1f} ms"
    ratio, comparable = guard.tpot_p95_ratio, active.finished >= guard.min_requests
    if ratio is not None and comparable and p95 is not None and usual is not None and p95 > usual * ratio:
        return f"the canary's TPOT p95 is {p95:.1f} ms, over {ratio:.2f} x {usual:.1f} ms"
    if guard.acceptance_floor is not None and canary.tested >= _ENOUGH_TESTED:
        rate = canary.accepted / canary.tested
        if rate < guard.acceptance_floor:
            return f"the canary's acceptance is {rate:.2f}, under {guard.acceptance_floor:.2f}"
    return None
