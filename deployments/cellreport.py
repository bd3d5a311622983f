"""What a cell says of itself: counters and gauges as plain data."""

from typing import Any

from specserve.service.engine import Engine

from .memory import Memory


def cell_report(engine: Engine, memory: Memory) -> dict[str, Any]:
    """Return an engine's counters and gauges, and whether its pages are short."""
    return {
        **engine.counters.totals(),
        "running": engine.num_running,
        "waiting": engine.num_waiting,
        "free_pages": engine.num_free_pages,
        "num_pages": engine.config.num_pages,
        "memory_short": memory.short(),
        "held_by_proposers": dict(engine.num_held_by_proposers),
    }
