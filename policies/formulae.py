"""The closed formulae of speculative decoding with an independent acceptance rate (arXiv 2211.17192, section 3)."""


def expected_tokens_per_round(alpha: float, gamma: int) -> float:
    """Return the expected tokens emitted by one round, `(1 - alpha^(gamma + 1)) / (1 - alpha)`.

    Raises ValueError when alpha is outside [0, 1] or gamma is negative. Source: arXiv 2211.17192, equation 1.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], not {alpha}")
    if gamma < 0:
        raise ValueError(f"gamma must not be negative, not {gamma}")
    if alpha == 1.0:
        return float(gamma + 1)
    return float((1.0 - alpha ** (gamma + 1)) / (1.0 - alpha))


def speedup(alpha: float, gamma: int, cost: float) -> float:
    """Return the expected walltime gain over plain decoding when one draft step costs `cost` target steps.

    Raises ValueError when cost is negative. Source: arXiv 2211.17192, theorem 3.8.
    """
    if cost < 0.0:
        raise ValueError(f"cost must not be negative, not {cost}")
    return expected_tokens_per_round(alpha, gamma) / (gamma * cost + 1.0)


def best_gamma(alpha: float, cost: float, max_gamma: int) -> int:
    """Return the smallest gamma in 0..max_gamma with the greatest speedup; 0 means plain decoding is best."""
    return max(range(max_gamma + 1), key=lambda gamma: (speedup(alpha, gamma, cost), -gamma))
