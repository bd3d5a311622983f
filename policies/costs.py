"""Measured cost tables: milliseconds of a forward by its tokens, and of a draft by its length, corrected online."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

_MIN_RATE = 0.05
_MAX_STEP = math.log(2.0)
_PRIOR_COUNT = 8.0
_SCORE_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_DRAFT_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds over `knots`, for each batch size in `rows`: non-decreasing in both.

    `residuals[k]` is the learned logarithm of true over tabled cost at knot k and `counts[k]` its weight of evidence;
    a knot without evidence follows its nearest neighbours that have some.
    """

    knots: tuple[int, ...]
    rows: tuple[tuple[int, tuple[float, ...]], ...]
    residuals: tuple[float, ...]
    counts: tuple[float, ...]

    def values(self, num_requests: int) -> list[float]:
        """Return the corrected cost at every knot for a batch of `num_requests`."""
        base = self._base(num_requests)
        values: list[float] = []
        floor = 0.0
        for value, residual in zip(base, self.residuals, strict=True):
            floor = max(floor, value * math.exp(residual))
            values.append(floor)
        return values

    def at(self, num_requests: int, y: float) -> float:
        """Return the cost at `y`, interpolated, and extended along the last slope beyond the table."""
        return interpolate(self.knots, self.values(num_requests), y)

    def evidence(self, y: float) -> float:
        """Return the number of measurements near `y`."""
        low, high, share = _locate(self.knots, y)
        return self.counts[low if share < 0.5 else high]

    def observe(self, num_requests: int, y: float, ms: float) -> "Curve":
        """Return the curve after one measurement: an exponential correction of the knots around `y`."""
        if not (math.isfinite(ms) and ms > 0.0):
            return self
        low, high, share = _locate(self.knots, y)
        predicted = interpolate(self.knots, self.values(num_requests), y)
        error = math.log(ms / max(predicted, 1e-9))
        residuals, counts = list(self.residuals), list(self.counts)
        for knot, weight in ((low, 1.0 - share), (high, share)):
            if weight < 0.25:
                continue
            rate = max(weight / (counts[knot] + 1.0), _MIN_RATE)
            step = error if counts[knot] < 2.0 else max(-_MAX_STEP, min(_MAX_STEP, error))
            residuals[knot] += rate * step
            counts[knot] = min(counts[knot] + weight, 1000.0)
            self._push(residuals, knot, num_requests)
        _spread(residuals, counts)
        return replace(self, residuals=tuple(residuals), counts=tuple(counts))

    def _push(self, residuals: list[float], knot: int, num_requests: int) -> None:
        """Keep costs monotone by moving the other knots, so that the newest evidence stands."""
        base = self._base(num_requests)
        logs = [math.log(max(value, 1e-9)) for value in base]
        here = logs[knot] + residuals[knot]
        for k in range(len(residuals)):
            there = logs[k] + residuals[k]
            if (k < knot and there > here) or (k > knot and there < here):
                residuals[k] = here - logs[k]

    def _base(self, num_requests: int) -> Sequence[float]:
        sizes = [size for size, _ in self.rows]
        low, high, share = _locate(sizes, num_requests)
        if low == high:
            return self.rows[low][1]
        first, last = self.rows[low][1], self.rows[high][1]
        return [a + (b - a) * share for a, b in zip(first, last, strict=True)]


@dataclass(frozen=True, slots=True)
class CostTable:
    """What a round costs: `score` over tokens in the forward, `drafts` over gamma for each proposer."""

    score: Curve
    drafts: Mapping[str, Curve] = field(default_factory=dict)

    def score_ms(self, num_requests: int, num_tokens: float) -> float:
        """Return the milliseconds of target and verifier for a forward of `num_tokens`."""
        return self.score.at(num_requests, num_tokens)

    def draft_ms(self, proposer: str, num_requests: int, gamma: float) -> float:
        """Return the milliseconds of one call for drafts of up to `gamma` tokens; 0 when nobody drafts."""
        if num_requests == 0 or gamma <= 0:
            return 0.0
        return self.draft_curve(proposer).at(num_requests, gamma)

    def draft_curve(self, proposer: str) -> Curve:
        """Return the proposer's curve, a guess when it was never measured."""
        return self.drafts.get(proposer) or _unmeasured_draft(proposer)

    def observe_score(self, num_requests: int, num_tokens: int, ms: float) -> "CostTable":
        """Return the table after one measured forward."""
        return replace(self, score=self.score.observe(num_requests, num_tokens, ms))

    def observe_draft(self, proposer: str, num_requests: int, gamma: int, ms: float) -> "CostTable":
        """Return the table after one measured call of a proposer."""
        curve = self.draft_curve(proposer).observe(num_requests, gamma, ms)
        return replace(self, drafts={**self.drafts, proposer: curve})


def measured_costs(
    score: Sequence[tuple[int, int, float]], drafts: Mapping[str, Sequence[tuple[int, int, float]]] | None = None
) -> CostTable:
    """Return a table from measurements: (num_requests, num_tokens, ms) and, by proposer, (num_requests, gamma, ms)."""
    curves = {name: _measured(points, _DRAFT_KNOTS) for name, points in (drafts or {}).items()}
    return CostTable(_measured(score, _SCORE_KNOTS), curves)


def unmeasured_costs() -> CostTable:
    """Return a guess that holds no evidence: nearly free verification, to be corrected by the first rounds."""
    return CostTable(_guess(_SCORE_KNOTS, 10.0, 0.05))


def interpolate(knots: Sequence[int], values: Sequence[float], y: float) -> float:
    """Return the piecewise linear value at `y`, along the last slope beyond the knots."""
    if y <= knots[0] or len(knots) == 1:
        return values[0]
    high = min(bisect_right(knots, y), len(knots) - 1)
    low = high - 1
    return values[low] + (values[high] - values[low]) * (y - knots[low]) / (knots[high] - knots[low])


def _locate(knots: Sequence[int], y: float) -> tuple[int, int, float]:
    if y <= knots[0]:
        return 0, 0, 0.0
    if y >= knots[-1]:
        return len(knots) - 1, len(knots) - 1, 0.0
    high = bisect_right(knots, y)
    return high - 1, high, (y - knots[high - 1]) / (knots[high] - knots[high - 1])


def _spread(residuals: list[float], counts: list[float]) -> None:
    known = [k for k, count in enumerate(counts) if count > 0.0]
    for k, count in enumerate(counts):
        if count > 0.0 or not known:
            continue
        place = bisect_right(known, k)
        if place == 0 or place == len(known):
            residuals[k] = residuals[known[0 if place == 0 else -1]]
        else:
            low, high = known[place - 1], known[place]
            residuals[k] = residuals[low] + (residuals[high] - residuals[low]) * (k - low) / (high - low)


def _measured(points: Sequence[tuple[int, int, float]], knots: Sequence[int]) -> Curve:
    if not points:
        raise ValueError("a measured curve needs at least one point")
    merged = tuple(sorted({*knots, *(y for _, y, _ in points)}))
    rows: list[tuple[int, tuple[float, ...]]] = []
    below = [0.0] * len(merged)
    for size in sorted({x for x, _, _ in points}):
        column = sorted((y, ms) for x, y, ms in points if x == size)
        ys, values = [y for y, _ in column], [ms for _, ms in column]
        for i in range(1, len(values)):
            values[i] = max(values[i], values[i - 1])
        below = [max(interpolate(ys, values, y), low) for y, low in zip(merged, below, strict=True)]
        rows.append((size, tuple(below)))
    return Curve(merged, tuple(rows), (0.0,) * len(merged), (_PRIOR_COUNT,) * len(merged))


def _guess(knots: tuple[int, ...], fixed_ms: float, slope_ms: float) -> Curve:
    row = tuple(fixed_ms + slope_ms * y for y in knots)
    return Curve(knots, ((1, row),), (0.0,) * len(knots), (0.0,) * len(knots))


def _unmeasured_draft(proposer: str) -> Curve:
    return _guess(_DRAFT_KNOTS, 0.5, 0.5) if proposer == "draft" else _guess(_DRAFT_KNOTS, 0.2, 0.02)
