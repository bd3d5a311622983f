"""Measured cost tables: milliseconds of a forward and of a draft, corrected by every round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .cells import KNOWN, REFIT_EVERY, Cells
from .plane import Point, fit_plane
from .scoring import ScoreCosts

WITH_MODEL = ("draft", "eagle", "eagle3", "medusa", "mtp", "layer_skip", "early_exit")
_STIFFNESS = (0.1, 0.01, 1.0, 0.1)


@dataclass(slots=True)
class DraftCosts:
    """What one proposer's calls take: fixed, by step (the longest draft), by token of all drafts, and by token of
    context that it has to catch up on."""

    plane: list[float]
    seen: Cells = field(default_factory=Cells)
    _shape: tuple[float, ...] = ()
    _unfitted: int = 0

    def __post_init__(self) -> None:
        self._shape = tuple(self.plane)

    def observe(self, gamma: int, num_tokens: float, ms: float, behind: int = 0) -> None:
        """Take in one measured call: its longest draft, the tokens of all, and the context it had to catch up on."""
        if not (math.isfinite(ms) and ms > 0.0) or gamma < 1:
            return
        sizes = (float(gamma), float(num_tokens), float(max(behind, 0)))
        known = self.seen.of(sizes)
        expected = 0.0
        if known is not None and known.sizes != sizes:
            expected = math.log(self._plane_ms(*sizes) / self._plane_ms(*known.sizes))
        _, is_new = self.seen.learn(sizes, ms, expected)
        self._unfitted += 1
        if is_new or self._unfitted >= REFIT_EVERY:
            self._unfitted = 0
            points: list[Point] = [
                ((1.0, *cell.sizes), math.exp(cell.log_ms), min(cell.count, KNOWN)) for cell in self.seen.cells.values()
            ]
            self.plane = fit_plane(points, self._shape, _STIFFNESS)

    def coefficients(self) -> tuple[float, float, float]:
        """Return the milliseconds per call, per step and per token, at the present speed."""
        speed = math.exp(self.seen.speed)
        return self.plane[0] * speed, self.plane[1] * speed, self.plane[2] * speed

    @property
    def catch_up_ms(self) -> float:
        """The milliseconds of a token of context that the proposer has not seen."""
        return self.plane[3] * math.exp(self.seen.speed)

    def at(self, gamma: float, num_tokens: float) -> float:
        """Return the cost of a call whose requests the proposer knows."""
        return self._plane_ms(gamma, num_tokens, 0.0) * math.exp(self.seen.speed)

    def _plane_ms(self, gamma: float, num_tokens: float, behind: float) -> float:
        fixed, by_step, by_token, by_behind = self.plane
        return fixed + by_step * gamma + by_token * num_tokens + by_behind * behind


@dataclass(slots=True)
class CostTable:
    """What a round costs: `score` for target and verifier, `drafts` for each proposer."""

    score: ScoreCosts = field(default_factory=ScoreCosts)
    drafts: dict[str, DraftCosts] = field(default_factory=dict)

    def score_ms(self, num_requests: int, num_tokens: float) -> float:
        """Return the milliseconds of target and verifier for decoding `num_tokens`, drafts included."""
        return self.score.steps(num_requests).at(num_tokens - num_requests) * self.score.factor

    def draft_ms(self, proposer: str, num_requests: int, gamma: float) -> float:
        """Return the milliseconds of one call for drafts of `gamma` tokens each; 0 when nobody drafts."""
        if num_requests == 0 or gamma <= 0:
            return 0.0
        return self.draft(proposer).at(gamma, num_requests * gamma)

    def draft(self, proposer: str) -> DraftCosts:
        """Return the proposer's costs, a guess when it was never measured."""
        costs = self.drafts.get(proposer)
        if costs is None:
            guess = [0.5, 0.5, 0.02, 0.002] if proposer in WITH_MODEL else [0.1, 0.01, 0.001, 0.0]
            costs = self.drafts[proposer] = DraftCosts(guess)
        return costs


def measured_costs(
    score: Sequence[tuple[int, int, float]], drafts: Mapping[str, Sequence[tuple[int, int, float]]] | None = None
) -> CostTable:
    """Return a table from measurements: (num_requests, num_tokens, ms) and, by proposer, (num_requests, gamma, ms)."""
    table = CostTable()
    for num_requests, num_tokens, ms in score:
        table.score.observe(num_requests, num_tokens - num_requests, ms)
    for proposer, points in (drafts or {}).items():
        for num_requests, gamma, ms in points:
            table.draft(proposer).observe(gamma, num_requests * gamma, ms)
    return table


def unmeasured_costs() -> CostTable:
    """Return a guess that holds no evidence: nearly free verification, to be corrected by the first rounds."""
    return CostTable()
