"""Imagined machines and texts for the simulator."""

import math
from collections.abc import Callable, Sequence

from specserve.policies.simulation import Machine, Stretch, Workload


def staircase(num_requests: int, tokens: int) -> float:
    """16 requests: 25 ms plain, 60 ms with four drafts each; one request: 10 ms, 11 ms. In steps of four tokens."""
    tokens = tokens if tokens <= 8 else 8 + 4 * math.ceil((tokens - 8) / 4)
    return 9.75 + 0.25 * min(tokens, 8) + 0.547 * max(tokens - 8, 0) + 0.593 * (num_requests - 1)


def drafting(by_step: float, by_token: float) -> Callable[[Sequence[int]], float]:
    """Return the cost of a draft model that runs once for each position, for those that still want one."""
    return lambda gammas: sum(by_step + by_token * sum(g > step for g in gammas) for step in range(max(gammas)))


MACHINE = Machine(
    staircase, {"draft": drafting(1.0, 0.12), "prompt_lookup": lambda gammas: 0.05}, catch_up_ms={"draft": 0.01}
)
COPY = Workload(
    "copy-heavy",
    (
        Stretch(60, {"draft": (1.0, 0.9), "prompt_lookup": (0.95, 0.9)}),
        Stretch(25, {"draft": (1.0, 0.4), "prompt_lookup": (0.15, 0.3)}),
    ),
)
OPEN = Workload("open-ended", (Stretch(100, {"draft": (1.0, 0.4), "prompt_lookup": (0.1, 0.3)}),))


def constant(draft: float, found: float, lookup: float) -> Workload:
    """Return requests without end whose text never changes."""
    stretch = Stretch(100, {"draft": (1.0, draft), "prompt_lookup": (found, lookup)})
    return Workload("constant", (stretch,), output_tokens=30_000)
