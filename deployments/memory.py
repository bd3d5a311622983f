"""Whether a cell's KV pages are short lately."""

import time
from collections.abc import Callable

from specserve.policies.pressure import Pressure
from specserve.service.engine import Engine


class Memory:
    """Looks at an engine's page pool now and then: the more often, the less it misses."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._pressure = Pressure()

    def short(self) -> bool:
        """Return whether memory that nobody drafts with is better given back."""
        free_share = self._engine.num_free_pages / self._engine.config.num_pages
        return self._pressure.note(free_share, self._engine.counters.preempted, self._clock())
