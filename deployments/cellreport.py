"""What a cell says of itself: counters and gauges as plain data."""

from typing import Any

from specserve.service.engine import Engine


def cell_report(engine: Engine) -> dict[str, Any]:
    """Return an engine's counters and gauges."""
    return {
        **engine.counters.totals(),
        "running": engine.num_running,
        "waiting": engine.num_waiting,
        "free_pages": engine.num_free_pages,
        "num_pages": engine.config.num_pages,
        "held_by_proposers": dict(engine.num_held_by_proposers),
    }
