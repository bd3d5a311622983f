"""How many replicas Serve keeps: its own numbers of requests replaced by what cells and proposers say of themselves.

Serve calls these in its controller, ten times a second, with what `record_autoscaling_stats` of each replica returned.
"""

import time
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from specserve.policies.scaling import Bounds, CellLoad, ProposerLoad, cells_wanted, proposers_wanted

_LOOK_BACK_S, _INTERVAL_S = 2.0, 1.0
_UP_S, _DOWN_S, _TO_ZERO_S = 4.0, 30.0, 3.0


def cell_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many cells there should be; as many as now while one of them has not said how it is."""
    reports = _newest(context)
    if not reports or len(reports) < context.current_num_replicas:
        return context.target_num_replicas, {}
    cells = [
        CellLoad(int(said["running"]), int(said["waiting"]), int(said["places"]), said["round_over_objective"])
        for said in reports
    ]
    return cells_wanted(cells, _bounds(context)), {}


def proposer_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas of a kind there should be; as many as now while one has not said how it is.

    From none, Serve starts one when a cell asks for its address.
    """
    reports = _newest(context)
    if not reports or len(reports) < context.current_num_replicas:
        return context.target_num_replicas, {}
    now_s = time.monotonic()
    num_cells = int(sum(said["cells"] for said in reports))
    busy, idle_s = sum(said["busy"] for said in reports), min(said["idle_s"] for said in reports)
    load = ProposerLoad(num_cells > 0, busy, num_cells, now_s - idle_s)
    return proposers_wanted(load, len(reports), now_s, _bounds(context)), {}


def cell_autoscaling(max_cells: int) -> AutoscalingConfig:
    """Return how Serve scales cells."""
    return _config(cell_replicas, 1, max_cells)


def proposer_autoscaling(max_replicas: int) -> AutoscalingConfig:
    """Return how Serve scales a kind of proposer; there is one at the start, for the cells to measure."""
    return _config(proposer_replicas, 0, max_replicas)


def _config(policy: Any, least: int, most: int) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=least,
        initial_replicas=1,
        max_replicas=most,
        metrics_interval_s=_INTERVAL_S,
        look_back_period_s=_LOOK_BACK_S,
        upscale_delay_s=_UP_S,
        downscale_delay_s=_DOWN_S,
        downscale_to_zero_delay_s=_TO_ZERO_S,
        policy=AutoscalingPolicy(policy_function=policy),
    )


def _bounds(context: AutoscalingContext) -> Bounds:
    return Bounds(context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas)


def _newest(context: AutoscalingContext) -> list[Mapping[str, float]]:
    """Return the last numbers of every replica that sent its own."""
    found: dict[Any, dict[str, float]] = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if series:
                found.setdefault(replica, {})[name] = series[-1].value
    return [said for said in found.values() if len(said) > 1]
