"""How many replicas there should be: cells by queue and round time, proposers by the drafts that are wanted of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BUSY, _EASY = 0.8, 0.5
_LATE, _EARLY = 1.0, 0.5
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The fewest and the most replicas an operator allows."""

    least: int
    most: int

    def within(self, num: float) -> int:
        """Return the number, kept within."""
        return min(max(math.ceil(num), self.least), self.most)


@dataclass(frozen=True, slots=True)
class CellLoad:
    """One cell: requests running and waiting, the places it has, and what a round takes over what it should."""

    num_running: int
    num_waiting: int
    num_places: int
    round_over_objective: float = 0.0


@dataclass(frozen=True, slots=True)
class ProposerLoad:
    """One kind of proposer: whether a cell wants it (`Demand`), the share of time its drafts keep a replica busy, added
    up over the cells, how many cells ask, and when it was last asked for."""

    wanted: bool
    busy: float
    num_cells: int
    asked_s: float


def cells_wanted(cells: Sequence[CellLoad], bounds: Bounds) -> int:
    """Return how many cells there should be: as many as keep places free and rounds within the objective.

    Up as soon as a cell is over; down by one at a time, and only when the rest would be at half at most.
    """
    if not cells:
        return bounds.least
    now = len(cells)
    load = sum(max(_filled(cell), cell.round_over_objective) for cell in cells)
    if load > _LATE * now:
        return bounds.within(max(load / _LATE, now))
    if now > 1 and load <= _EARLY * (now - 1):
        return bounds.within(now - 1)
    return bounds.within(now)


def proposers_wanted(load: ProposerLoad, now: int, now_s: float, bounds: Bounds) -> int:
    """Return how many replicas of one kind of proposer there should be.

    None when no cell wants it, and when nobody asked for a while. A cell keeps to one replica, so there are never more
    than cells.
    """
    if not load.wanted:
        return 0
    if now_s - load.asked_s > _IDLE_S:
        return bounds.within(0)
    most = Bounds(max(bounds.least, 1), max(min(bounds.most, load.num_cells), 1))
    if now == 0 or load.busy > _BUSY * now:
        return most.within(max(load.busy / _BUSY, 1))
    if now > 1 and load.busy <= _EASY * (now - 1):
        return most.within(now - 1)
    return most.within(now)


def _filled(cell: CellLoad) -> float:
    return (cell.num_running + cell.num_waiting) / cell.num_places
