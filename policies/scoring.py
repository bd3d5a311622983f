"""What a forward costs, by running requests and draft tokens among them, as measured and corrected by every round.

Through the cells of similar batch sizes goes one curve; a plane through all cells says what was never measured.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

from .cells import KNOWN, REFIT_EVERY, Cell, Cells, bucket
from .plane import Point, fit_plane

_SHAPE = (1.0, 0.005, 0.02, 0.0)
_STIFFNESS = (0.01, 1.0, 1.0, 10.0)
_GUESS_MS = 10.0
_SHOWN = 0.005
_LEAN = 3.0
_FAR = 1e9


@dataclass(frozen=True, slots=True)
class Steps:
    """A piecewise linear cost: `values[j] + slopes[j] * (y - knots[j])` from knot j on. The last knot is far away."""

    knots: list[float]
    values: list[float]
    slopes: list[float]

    def at(self, y: float) -> float:
        """Return the cost at `y`."""
        j = 0
        while self.knots[j + 1] <= y:
            j += 1
        return self.values[j] + self.slopes[j] * (y - self.knots[j])


@dataclass(slots=True)
class Row:
    """The cells of similar batch sizes, by draft tokens; `version` counts the changes worth showing."""

    cells: list[Cell] = field(default_factory=list)
    version: int = 0


@dataclass(slots=True)
class ScoreCosts:
    """What target and verifier take, by running requests and draft tokens among them."""

    seen: Cells = field(default_factory=Cells)
    rows: dict[int, Row] = field(default_factory=dict)
    plane: list[float] = field(default_factory=lambda: [_GUESS_MS * share for share in _SHAPE])
    version: int = 0
    _unfitted: int = 0
    _steps: dict[int, tuple[tuple[str, int], Steps]] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        """What every cost of `steps` is to be multiplied by: the common speed."""
        return math.exp(self.seen.speed)

    def observe(self, num_requests: int, draft_tokens: float, ms: float) -> None:
        """Take in one measured round. Cost: O(1), now and then O(cells)."""
        if not (math.isfinite(ms) and ms > 0.0) or num_requests < 1:
            return
        sizes = (float(num_requests), float(draft_tokens))
        known = self.seen.of(sizes)
        expected = 0.0
        if known is not None and known.sizes != sizes:
            expected = math.log(self.plane_ms(*sizes) / self.plane_ms(*known.sizes))
        cell, is_new = self.seen.learn(sizes, ms, expected)
        row = self.rows.setdefault(bucket(num_requests), Row())
        if is_new:
            row.cells.append(cell)
            row.cells.sort(key=lambda c: c.sizes[1])
        self._unfitted += 1
        if is_new or self._unfitted >= REFIT_EVERY:
            self._fit()
        if is_new or abs(cell.log_ms - cell.shown_log) > _SHOWN:
            row.version += 1
            self.version += 1

    def plane_ms(self, num_requests: float, draft_tokens: float) -> float:
        """Return what the plane says."""
        fixed, by_request, by_token, by_both = self.plane
        tokens = num_requests + draft_tokens
        return fixed + by_request * num_requests + (by_token + by_both * num_requests) * tokens

    def num_plain(self, num_requests: int) -> float:
        """Return how often a round without drafts was measured at about this batch size."""
        cell = self.seen.of((num_requests, 0.0))
        return 0.0 if cell is None else cell.count

    def steps(self, num_requests: int) -> Steps:
        """Return the cost by draft tokens for a batch of this size, at the speed `factor`."""
        row = self.rows.get(bucket(num_requests))
        version = ("row", row.version) if row is not None else ("plane", self.version)
        cached = self._steps.get(num_requests)
        if cached is not None and cached[0] == version:
            return cached[1]
        steps = self._from_plane(num_requests) if row is None else self._from_row(num_requests, row)
        self._steps[num_requests] = version, steps
        return steps

    def _fit(self) -> None:
        self._unfitted = 0
        points: list[Point] = [
            (_features(*cell.sizes), math.exp(cell.log_ms), min(cell.count, KNOWN)) for cell in self.seen.cells.values()
        ]
        self.plane = fit_plane(points, _SHAPE, _STIFFNESS)

    def _from_row(self, num_requests: int, row: Row) -> Steps:
        """Return the curve through the row's cells, non-decreasing, and along the plane where there are none."""
        ys, values, weights = [], [], []
        for cell in row.cells:
            cell.shown_log = cell.log_ms
            draft_tokens = cell.sizes[1]
            shift = self.plane_ms(num_requests, draft_tokens) / self.plane_ms(*cell.sizes)
            ys.append(draft_tokens)
            values.append(math.exp(cell.log_ms) * shift)
            weights.append(min(cell.count, 50.0))
        _lean(ys, values, weights)
        _rise(values, weights)
        start = self.plane_ms(num_requests, 0.0)
        if ys[0] > 0.0:
            ratio = values[0] / self.plane_ms(num_requests, ys[0])
            ys.insert(0, 0.0)
            values.insert(0, start * ratio)
        ratio = values[-1] / self.plane_ms(num_requests, ys[-1])
        slope = (self.plane_ms(num_requests, ys[-1] + 1.0) - self.plane_ms(num_requests, ys[-1])) * ratio
        if ys[-1] > 0.0:
            slope = max(slope, (values[-1] - values[0]) / ys[-1])
        slopes = [(v - u) / (b - a) for (a, b), (u, v) in zip(pairwise(ys), pairwise(values), strict=True)]
        return Steps([*ys, _FAR], values, [*slopes, slope])

    def _from_plane(self, num_requests: int) -> Steps:
        """Return the plane's curve, corrected like the nearest batch sizes that were measured."""
        below = max((index for index in self.rows if index < bucket(num_requests)), default=None)
        above = min((index for index in self.rows if index > bucket(num_requests)), default=None)
        ratios = [self._ratio(self.rows[index]) for index in (below, above) if index is not None]
        ratio = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
        start = self.plane_ms(num_requests, 0.0) * ratio
        return Steps([0.0, _FAR], [start], [(self.plane_ms(num_requests, 1.0) * ratio - start)])

    def _ratio(self, row: Row) -> float:
        total = sum((cell.log_ms - math.log(self.plane_ms(*cell.sizes))) * cell.count for cell in row.cells)
        return total / sum(cell.count for cell in row.cells)


def _features(num_requests: float, draft_tokens: float) -> tuple[float, float, float, float]:
    """Return what a forward's cost is linear in: one, requests, tokens (one each and the drafts), and their product.

    As no coefficient is negative, a request costs at least as much as a draft token.
    """
    tokens = num_requests + draft_tokens
    return 1.0, num_requests, tokens, num_requests * tokens


def _lean(ys: list[float], values: list[float], weights: list[float]) -> None:
    """Draw hardly known values, in place, towards the line between the well known ones on both sides."""
    known = [i for i, weight in enumerate(weights) if weight >= KNOWN]
    for low, high in pairwise(known):
        slope = (values[high] - values[low]) / (ys[high] - ys[low])
        for i in range(low + 1, high):
            line = values[low] + slope * (ys[i] - ys[low])
            values[i] = (values[i] * weights[i] + line * _LEAN) / (weights[i] + _LEAN)


def _rise(values: list[float], weights: list[float]) -> None:
    """Make values non-decreasing, in place, by pooling neighbours that are not (isotonic regression)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        size = 1
        while pools and pools[-1][0] > value:
            other, heavy, count = pools.pop()
            value = (value * weight + other * heavy) / (weight + heavy)
            weight += heavy
            size += count
        pools.append((value, weight, size))
    values[:] = [value for value, _, size in pools for _ in range(size)]
