"""The arrival rate of requests, faded exponentially."""

import math
from dataclasses import dataclass

WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Faded number of arrivals as of `last_s`."""

    mass: float = 0.0
    last_s: float = 0.0


def arrived(arrivals: Arrivals, now_s: float) -> Arrivals:
    """Return the arrivals with one more at `now_s`."""
    return Arrivals(_faded(arrivals, now_s) + 1.0, max(now_s, arrivals.last_s))


def arrival_rate(arrivals: Arrivals, now_s: float) -> float:
    """Return the recent requests per second, weighted exponentially over a window of `WINDOW_S`."""
    return _faded(arrivals, now_s) / WINDOW_S


def _faded(arrivals: Arrivals, now_s: float) -> float:
    return arrivals.mass * math.exp(-max(now_s - arrivals.last_s, 0.0) / WINDOW_S)
