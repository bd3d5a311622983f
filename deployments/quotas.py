"""What each key used of its limits in the last minute: in this cell, and, as last heard, in the others.

Pure: the time is an argument. A limit holds exactly for one cell. Cells hear of each other through the controller
(`usage.py`, about every half second), and each may let in besides what the others let in since.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from specserve.service.errors import QuotaExceededError

from .credentials import Limits, Principal, Tier
from .usage import NOTHING, KeyUse, Used

WINDOW_S = 60
RETRY_CONCURRENT_S = 1.0
RETRY_ELSEWHERE_S = 5.0


class Window:
    """An amount used within the last minute, summed by the second: at most 61 pairs of numbers.

    A second is forgotten when all of it is more than a minute old, so what is counted is never less than what any 60 s
    up to now hold.
    """

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()
        self._total = 0

    def used(self, now_s: float) -> int:
        """Return the amount that counts now."""
        while self._seconds and math.floor(now_s) - self._seconds[0][0] > WINDOW_S:
            self._total -= self._seconds.popleft()[1]
        return self._total

    def add(self, amount: int, now_s: float) -> int:
        """Count `amount` from now on, and return the second it is counted in."""
        self.used(now_s)
        second = math.floor(now_s)
        if self._seconds and self._seconds[-1][0] >= second:
            second, there = self._seconds.pop()
            amount_there = there + amount
        else:
            amount_there = amount
        self._seconds.append((second, amount_there))
        self._total += amount
        return second

    def give_back(self, amount: int, second: int) -> None:
        """Count `amount` less in `second`, unless that is forgotten already."""
        for place, (there, counted) in enumerate(self._seconds):
            if there == second:
                self._seconds[place] = (there, counted - amount)
                self._total -= amount

    def wait_s(self, excess: int, now_s: float) -> float:
        """Return the seconds until `excess` or more is forgotten; a guess when other cells used that much of it."""
        forgotten = 0
        for second, amount in self._seconds:
            forgotten += amount
            if forgotten >= excess:
                return second + WINDOW_S + 1 - now_s
        return RETRY_ELSEWHERE_S

    def reset_s(self, now_s: float) -> float:
        """Return the seconds until nothing counts any more."""
        return self._seconds[-1][0] + WINDOW_S + 1 - now_s if self.used(now_s) else 0.0


@dataclass(slots=True)
class Meter:
    """What one key used, of everything or of priority alone; `elsewhere` in other cells."""

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    running: int = 0
    elsewhere: Used = NOTHING

    def here(self, now_s: float) -> Used:
        """Return what counts in this cell."""
        return Used(self.requests.used(now_s), self.tokens.used(now_s), self.running)

    def all_cells(self, now_s: float) -> Used:
        """Return what counts in all cells."""
        return self.here(now_s).plus(self.elsewhere)

    def check_requests(self, limits: Limits, now_s: float) -> None:
        """Raise QuotaExceededError when one request more is too much."""
        most, used = limits.requests_per_minute, self.all_cells(now_s).requests
        if most is not None and used >= most:
            wait_s = self.requests.wait_s(used + 1 - most, now_s)
            raise QuotaExceededError(f"the limit of {most} requests a minute is reached", wait_s)

    def check_work(self, limits: Limits, tokens: int, choices: int, now_s: float) -> None:
        """Raise QuotaExceededError when `tokens` more in a minute, or `choices` more at a time, are too much."""
        used = self.all_cells(now_s)
        most = limits.max_concurrent
        if most is not None and used.running + choices > most:
            wait_s = RETRY_CONCURRENT_S if choices <= most else None
            raise QuotaExceededError(f"the limit of {most} choices at a time is reached", wait_s)
        most = limits.tokens_per_minute
        if most is not None and used.tokens + tokens > most:
            wait_s = self.tokens.wait_s(used.tokens + tokens - most, now_s) if tokens <= most else None
            raise QuotaExceededError(
                f"the limit of {most} tokens a minute leaves {max(0, most - used.tokens)}; "
                f"prompt and output of this request may take {tokens}",
                wait_s,
            )


@dataclass(slots=True)
class Lease:
    """What one request holds of its key's limits until it is settled."""

    meters: tuple[Meter, ...]
    seconds: tuple[int, ...]
    tokens: int
    choices: int
    settled: bool = False

    def settle(self, tokens: int, now_s: float) -> None:
        """Put the tokens really used in place of those held, once: the difference is given back, or counted now."""
        if self.settled:
            return
        self.settled = True
        for meter, second in zip(self.meters, self.seconds, strict=True):
            meter.running -= self.choices
            if tokens <= self.tokens:
                meter.tokens.give_back(self.tokens - tokens, second)
            else:
                meter.tokens.add(tokens - self.tokens, now_s)


class Quotas:
    """The meters of all keys; those without a key are not metered."""

    def __init__(self) -> None:
        self._meters: dict[str, tuple[Meter, Meter]] = {}

    def count_request(self, principal: Principal, now_s: float) -> None:
        """Count one HTTP request. Raises QuotaExceededError, and counts nothing, when it is too much."""
        if principal.key_id is not None:
            everything, _ = self._of(principal.key_id)
            everything.check_requests(principal.limits, now_s)
            everything.requests.add(1, now_s)

    def leaves_priority(self, principal: Principal, tokens: int, choices: int, now_s: float) -> bool:
        """Return whether the key's share of priority has room for this request."""
        if principal.key_id is None:
            return True
        _, priority = self._of(principal.key_id)
        try:
            priority.check_requests(principal.priority_limits, now_s)
            priority.check_work(principal.priority_limits, tokens, choices, now_s)
        except QuotaExceededError:
            return False
        return True

    def lease(self, principal: Principal, tier: Tier, tokens: int, choices: int, now_s: float) -> Lease:
        """Hold `tokens` and `choices` for a request of `tier`. Raises QuotaExceededError, and holds nothing."""
        if principal.key_id is None:
            return Lease((), (), tokens, choices)
        everything, priority = self._of(principal.key_id)
        everything.check_work(principal.limits, tokens, choices, now_s)
        meters = (everything, priority) if tier == "priority" else (everything,)
        if tier == "priority":
            priority.requests.add(1, now_s)
        for meter in meters:
            meter.running += choices
        return Lease(meters, tuple(meter.tokens.add(tokens, now_s) for meter in meters), tokens, choices)

    def headers(self, principal: Principal, now_s: float) -> dict[str, str]:
        """Return OpenAI's `x-ratelimit-*` headers for the limits that the key has."""
        if principal.key_id is None:
            return {}
        everything, _ = self._of(principal.key_id)
        limits, used = principal.limits, everything.all_cells(now_s)
        found: dict[str, str] = {}
        for name, most, amount, window in (
            ("requests", limits.requests_per_minute, used.requests, everything.requests),
            ("tokens", limits.tokens_per_minute, used.tokens, everything.tokens),
        ):
            if most is not None:
                found[f"x-ratelimit-limit-{name}"] = str(most)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, most - amount))
                found[f"x-ratelimit-reset-{name}"] = f"{window.reset_s(now_s):.3f}s"
        return found

    def report(self, now_s: float) -> dict[str, KeyUse]:
        """Return what each key uses in this cell."""
        uses = {
            key_id: KeyUse(everything.here(now_s), priority.here(now_s))
            for key_id, (everything, priority) in self._meters.items()
        }
        return {key_id: use for key_id, use in uses.items() if use != KeyUse()}

    def hear(self, others: Mapping[str, KeyUse]) -> None:
        """Count from now on what the other cells use: all of it, so a key that is not named is used nowhere else."""
        for key_id in self._meters.keys() | others.keys():
            everything, priority = self._of(key_id)
            use = others.get(key_id, KeyUse())
            everything.elsewhere, priority.elsewhere = use.everything, use.priority

    def _of(self, key_id: str) -> tuple[Meter, Meter]:
        return self._meters.setdefault(key_id, (Meter(), Meter()))
