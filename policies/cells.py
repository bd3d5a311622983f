"""Measurements in classes of similar rounds, so that every kind of round counts alike, however often it ran.

A common speed follows what makes every round slower or faster at once, so that it does not pass for a difference
between them.
"""

import math
from dataclasses import dataclass, field

KNOWN = 8.0
"""So many measurements make a cell well known."""
REFIT_EVERY = 64
_MAX_COUNT = 1000.0
_CELL_RATE = 0.01
_SPEED_RATE = 0.1
_NOISE_RATE = 0.05
_FIRST_NOISE = 0.05
_SLOWED = 0.2


def bucket(value: float) -> int:
    """Return the index of a class of similar sizes: exact to 8, then four classes an octave."""
    size = round(value)
    if size <= 8:
        return size
    octave = (size - 1).bit_length() - 1
    return 4 * octave - 4 + ((size - 1) >> (octave - 2)) - 3


@dataclass(slots=True)
class Cell:
    """Rounds of similar size: the logarithm of their milliseconds at common speed, and how often they were measured.

    `sizes` are the average round's. `shown_log` is the value that curves were last made from.
    """

    sizes: tuple[float, ...]
    log_ms: float
    count: float
    shown_log: float


@dataclass(slots=True)
class Cells:
    """Cells by class, and the speed and noise they have in common."""

    cells: dict[tuple[int, ...], Cell] = field(default_factory=dict)
    speed: float = 0.0
    noise: float = _FIRST_NOISE

    def of(self, sizes: tuple[float, ...]) -> Cell | None:
        """Return the cell of rounds of such sizes, if one was ever measured."""
        return self.cells.get(tuple(map(bucket, sizes)))

    def learn(self, sizes: tuple[float, ...], ms: float, expected: float) -> tuple[Cell, bool]:
        """Return the cell of one measurement, after it, and whether the cell is new.

        `expected` is the logarithm of the cost of this round over that of the cell's average round, as far as known.
        A known cell's errors move the common speed first, and the cell itself slowly.
        """
        key = tuple(map(bucket, sizes))
        log_ms = math.log(ms) - self.speed - expected
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = Cell(sizes, log_ms, 1.0, log_ms)
            return cell, True
        error = log_ms - cell.log_ms
        limit = max(3.0 * self.noise, 0.05)
        if cell.count >= 2.0 and error > limit:
            error = limit
        if cell.count >= 3.0:
            self.noise += _NOISE_RATE * (min(abs(log_ms - cell.log_ms), 0.5) - self.noise)
            error = max(-limit, error)
        if cell.count >= KNOWN:
            self.speed += _SPEED_RATE * error
            rate = max(1.0 / (cell.count + 1.0), _CELL_RATE)
        else:
            # Something else often slows a measurement, nothing hastens it: a first one that was far slower is dropped.
            slowed = error < -_SLOWED and cell.count <= 2.0
            rate = 0.9 if slowed else 1.0 / (cell.count + 1.0)
        cell.log_ms += rate * error
        if sizes != cell.sizes:
            cell.sizes = tuple(mean + rate * (size - mean) for mean, size in zip(cell.sizes, sizes, strict=True))
        cell.count = min(cell.count + 1.0, _MAX_COUNT)
        return cell, False
