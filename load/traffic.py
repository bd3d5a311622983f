"""Open-loop traffic: when requests come, whatever the server does, and in which tier. Seeded, so that runs compare."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import LoadError


@dataclass(frozen=True, slots=True)
class Shape:
    """A rate over time: `rates` requests a second, joined by straight lines of equal length over `seconds`."""

    rates: tuple[float, ...]
    seconds: float

    def rate(self, at_s: float) -> float:
        """Return the requests a second expected at `at_s`."""
        if len(self.rates) == 1:
            return self.rates[0]
        place = min(max(at_s / self.seconds, 0.0), 1.0) * (len(self.rates) - 1)
        below = min(int(place), len(self.rates) - 2)
        return self.rates[below] + (self.rates[below + 1] - self.rates[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come: seconds after the start, and its `service_tier`."""

    at_s: float
    tier: str


def shape(text: str, seconds: float) -> Shape:
    """Return the shape written as rates, `1-30-1` for a ramp up and down. Raises LoadError."""
    try:
        rates = tuple(float(part) for part in text.split("-"))
    except ValueError:
        rates = ()
    if not rates or not all(math.isfinite(rate) and rate >= 0 for rate in rates) or max(rates) == 0:
        raise LoadError(f"A shape is requests a second, joined by dashes, like 1-30-1; not {text!r}.")
    return Shape(rates, seconds)


def tier_shares(parts: tuple[str, ...]) -> dict[str, float]:
    """Return each tier's share of the requests from `name=weight` parts. Raises LoadError."""
    weights: dict[str, float] = {}
    for part in parts:
        name, _, weight = part.partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            weights[name] = -1.0
        if not name or not (0 < weights[name] < math.inf):
            raise LoadError(f"A tier is name=weight, like priority=1; not {part!r}.")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def arrivals(traffic: Shape, shares: Mapping[str, float], seed: int) -> tuple[Arrival, ...]:
    """Return the arrivals of a Poisson process with the shape's rate, each in a tier drawn by the shares.

    Source: Lewis and Shedler 1979, thinning.
    """
    draw = random.Random(seed)
    most = max(traffic.rates)
    names, weights = list(shares), list(shares.values())
    found: list[Arrival] = []
    at_s = draw.expovariate(most)
    while at_s < traffic.seconds:
        if draw.random() * most < traffic.rate(at_s):
            found.append(Arrival(at_s, draw.choices(names, weights)[0]))
        at_s += draw.expovariate(most)
    return tuple(found)
