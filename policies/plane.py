"""Least squares for costs: the non-negative linear law nearest to a few measured points, in relative terms."""

from collections.abc import Sequence

Point = tuple[Sequence[float], float, float]
"""Features, milliseconds, and the weight of the measurement."""
_USUAL = 0.2


def fit_plane(points: Sequence[Point], shape: Sequence[float], stiffness: Sequence[float]) -> list[float]:
    """Return the coefficients, none negative, that predict the points' milliseconds from their features.

    Minimises weighted squared relative errors, in a second pass with less weight for what lies far above the first:
    something else often slows a measurement, nothing hastens it. `shape` is what the coefficients look like without
    evidence, up to a factor that the points decide; `stiffness` weighs how much each must be contradicted before it
    gives way. Cost: O(points x features squared).
    """
    first = _fit(points, shape, stiffness)
    trusted = []
    for features, ms, weight in points:
        above = max(ms / max(_dot(features, first), 1e-9) - 1.0, 0.0) / _USUAL
        trusted.append((features, ms, weight / (1.0 + above * above)))
    return _fit(trusted, shape, stiffness)


def _fit(points: Sequence[Point], shape: Sequence[float], stiffness: Sequence[float]) -> list[float]:
    level = _level(points, shape)
    prior = [level * value for value in shape]
    size = len(shape)
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for features, ms, weight in points:
        scale = weight / (ms * ms)
        for i in range(size):
            row, scaled = matrix[i], scale * features[i]
            right[i] += scaled * ms
            for j in range(size):
                row[j] += scaled * features[j]
    for i in range(size):
        hold = stiffness[i] / (level * level)
        matrix[i][i] += hold
        right[i] += hold * prior[i]
    kept = list(range(size))
    while True:
        solved = _solve([[matrix[i][j] for j in kept] for i in kept], [right[i] for i in kept])
        worst = min(range(len(kept)), key=lambda k: solved[k])
        if solved[worst] >= 0.0 or len(kept) == 1:
            break
        del kept[worst]
    result = [0.0] * size
    for i, value in zip(kept, solved, strict=True):
        result[i] = max(value, 0.0)
    return result if any(result) else prior


def _level(points: Sequence[Point], shape: Sequence[float]) -> float:
    """Return the factor on `shape` that fits best on average."""
    total = weights = 0.0
    for features, ms, weight in points:
        total += weight * ms / _dot(features, shape)
        weights += weight
    return total / weights if weights > 0.0 else 1.0


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Return the solution of a small, symmetric, positive definite system by elimination."""
    size = len(right)
    for i in range(size):
        pivot = matrix[i][i]
        for k in range(i + 1, size):
            share = matrix[k][i] / pivot
            for j in range(i, size):
                matrix[k][j] -= share * matrix[i][j]
            right[k] -= share * right[i]
    for i in range(size - 1, -1, -1):
        right[i] = (right[i] - sum(matrix[i][j] * right[j] for j in range(i + 1, size))) / matrix[i][i]
    return right
