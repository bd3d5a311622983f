"""The arrival rate of requests, its trend, and how many requests are to be expected at once.

Faded averages lag behind: on a ramp, by the length of their window. Two windows tell the slope, and the slope where the
rate will be in a moment. As far as chance may account for it, a slope is none.
"""

import math
from dataclasses import dataclass

WINDOW_S = 10.0
_SHORT_WINDOW_S = 5.0
_DOUBT = 2.0
_IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Faded numbers of arrivals, over the long window and the short, as of `last_s`."""

    mass: float = 0.0
    short_mass: float = 0.0
    last_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """Faded request-seconds as of `last_s`, when `num` requests were running."""

    mass_s: float = 0.0
    num: int = 0
    last_s: float = 0.0


def arrived(arrivals: Arrivals, now_s: float) -> Arrivals:
    """Return the arrivals with one more at `now_s`; a clock that went back goes on from where it is."""
    mass = _faded(arrivals.mass, arrivals.last_s, now_s, WINDOW_S)
    short_mass = _faded(arrivals.short_mass, arrivals.last_s, now_s, _SHORT_WINDOW_S)
    return Arrivals(mass + 1.0, short_mass + 1.0, now_s)


def arrival_rate(arrivals: Arrivals, now_s: float) -> float:
    """Return the recent requests per second, weighted exponentially over a window of `WINDOW_S`."""
    return _faded(arrivals.mass, arrivals.last_s, now_s, WINDOW_S) / WINDOW_S


def expected_rate(arrivals: Arrivals, now_s: float, ahead_s: float) -> float:
    """Return the requests per second in `ahead_s` seconds if their trend goes on; the recent rate without a trend.

    The difference of two faded counts of a steady random stream has a known variance; what exceeds it twice is a trend.
    """
    rate = arrival_rate(arrivals, now_s)
    short = _faded(arrivals.short_mass, arrivals.last_s, now_s, _SHORT_WINDOW_S) / _SHORT_WINDOW_S
    per_rate = 0.5 / WINDOW_S + 0.5 / _SHORT_WINDOW_S - 2.0 / (WINDOW_S + _SHORT_WINDOW_S)
    chance = _DOUBT * math.sqrt(max(rate, short) * per_rate)
    excess = math.copysign(max(abs(short - rate) - chance, 0.0), short - rate)
    return max(rate + excess * (WINDOW_S + ahead_s) / (WINDOW_S - _SHORT_WINDOW_S), 0.0)


def running(crowd: Crowd, num: int, now_s: float) -> Crowd:
    """Return the crowd with `num` running from `now_s` on. Nobody was running for most of a long silence."""
    passed = max(now_s - crowd.last_s, 0.0)
    present = min(passed, _IDLE_S)
    mass_s = crowd.mass_s * math.exp(-present / WINDOW_S) + crowd.num * WINDOW_S * -math.expm1(-present / WINDOW_S)
    return Crowd(mass_s * math.exp(-(passed - present) / WINDOW_S), num, now_s)


def expected_crowd(crowd: Crowd, arrivals: Arrivals, now_s: float, ahead_s: float) -> float:
    """Return how many requests will be running in `ahead_s` seconds: the rate expected times the time they stay.

    They stay as long as they lately did, which is the recent number at once over the recent rate. Source: Little's law.
    """
    mass = _faded(arrivals.mass, arrivals.last_s, now_s, WINDOW_S)
    if mass <= 0.0:
        return float(crowd.num)
    return expected_rate(arrivals, now_s, ahead_s) * crowd.mass_s / mass


def _faded(mass: float, last_s: float, now_s: float, window_s: float) -> float:
    return mass * math.exp(-max(now_s - last_s, 0.0) / window_s)
