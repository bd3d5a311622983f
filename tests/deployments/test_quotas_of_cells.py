"""A key's limits hold for a service, not for a cell: cells tell the controller what is used, and hear of the others."""

import asyncio
from pathlib import Path

import pytest
from support.steered import new_store

from specserve.deployments.api.gate import Gate
from specserve.deployments.controller import Controller
from specserve.deployments.credentials import Limits, Principal
from specserve.deployments.exchange import Follower
from specserve.deployments.planning import PolicyPlanner
from specserve.policies.document import simple_policy
from specserve.service.errors import QuotaExceededError

CALLER = Principal("k", frozenset({"client"}), ("default",), "default", Limits(requests_per_minute=4), Limits(), 0, "k")


def test_what_one_cell_let_in_is_not_let_in_by_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        controller = Controller(new_store(tmp_path))
        gates = [Gate(), Gate()]
        followers = [
            Follower(f"cell-{place}", PolicyPlanner(simple_policy("off"), 0), dict, controller, quotas=gate)
            for place, gate in enumerate(gates)
        ]
        for _ in range(3):
            gates[0].count("POST", CALLER)
        for follower in followers:
            assert await follower.once()
        gates[1].count("POST", CALLER)
        with pytest.raises(QuotaExceededError):
            gates[1].count("POST", CALLER)
        gates[0].count("POST", CALLER)  # the other's last one has not been heard of yet
        assert await followers[1].once()
        assert await followers[0].once()
        with pytest.raises(QuotaExceededError):
            gates[0].count("POST", CALLER)

    asyncio.run(asyncio.wait_for(main(), 30))
