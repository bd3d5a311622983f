"""The controller: owns the active policy and hears from every cell once a second. Never in the path of a token."""

from typing import Any

from ray import serve

from specserve.policies.document import policy_to_dict
from specserve.service.stats import EngineStats

from .settings import load_policy


@serve.deployment(name="Controller", num_replicas=1, ray_actor_options={"num_cpus": 0})
class ControllerDeployment:
    """Holds the policy's version and the last report of each cell."""

    def __init__(self, policy: str) -> None:
        self._version = 1
        self._policy = policy_to_dict(load_policy(policy))
        self._reports: dict[str, dict[str, Any]] = {}

    async def exchange(self, cell_id: str, report: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Take in a cell's counters and return the active policy's version and document."""
        self._reports[cell_id] = report
        return self._version, self._policy

    async def activate(self, policy: dict[str, Any]) -> int:
        """Make `policy` the active one and return its version."""
        self._version += 1
        self._policy = policy
        return self._version

    async def state(self) -> dict[str, Any]:
        """Return what is known of every cell."""
        return {"policy_version": self._version, "policy": self._policy, "cells": dict(self._reports)}


def cell_report(counters: EngineStats, **gauges: Any) -> dict[str, Any]:
    """Return an engine's counters and gauges as plain data."""
    return {**counters.totals(), **gauges}
