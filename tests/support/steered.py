"""A controller, its admin app and one cell whose rounds a test plays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from specserve.deployments.admin.app import build_admin
from specserve.deployments.controller import Controller
from specserve.deployments.credentials import Credentials
from specserve.deployments.exchange import Follower
from specserve.deployments.planning import PolicyPlanner
from specserve.deployments.policystore import Note, PolicyStore
from specserve.policies.document import policy_to_dict, simple_policy
from specserve.service.ports import Outcome, RequestView, RoundCost

NAMES = frozenset({"draft"})


def new_store(folder: Path, policy: str = "fixed:3") -> PolicyStore:
    """Return a store whose first version is `policy`."""
    store = PolicyStore(folder / "policies.db")
    store.prepare(policy_to_dict(simple_policy(policy)), Note(1.0, "start", "a test"))
    return store


class Steered:
    """One service: its controller, a client of its admin app, and a cell."""

    def __init__(self, controller: Controller, client: httpx.AsyncClient) -> None:
        self.controller = controller
        self.client = client
        self.planner = PolicyPlanner(simple_policy("off"), 0)
        self.follower = Follower("cell-1", self.planner, lambda: {"rounds": 7}, controller)

    async def ask(self, method: str, path: str, **sent: Any) -> Any:
        """Return the body of an answer that is no error."""
        answer = await self.client.request(method, f"/admin/v1/{path}", **sent)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def play(self, *request_ids: str, rounds: int = 1, tier: str = "default") -> list[tuple[int, str]]:
        """Plan and learn some rounds of the requests; return the last round's lengths and reasons."""
        views = [RequestView(name, tier, "auto", None, None, 20, 500) for name in request_ids]
        for _ in range(rounds):
            decisions = self.planner.plan(views, NAMES, 0.0)
            outcomes = [
                Outcome(view.request_id, tier, "draft", one.gamma, one.gamma, one.gamma // 2)
                for view, one in zip(views, decisions, strict=True)
                if one.gamma
            ]
            num_tokens = len(views) + sum(one.gamma for one in decisions)
            self.planner.learn(outcomes, RoundCost(len(views), num_tokens, 10.0, ()))
        return [(one.gamma, one.reason) for one in decisions]


@asynccontextmanager
async def steered(controller: Controller, credentials: Credentials | None = None) -> AsyncIterator[Steered]:
    """Run the cell's exchange with `controller`; at the end no task is left."""
    before = asyncio.all_tasks()
    app = build_admin(controller, credentials or Credentials())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        service = Steered(controller, client)
        assert await service.follower.once()
        following = asyncio.ensure_future(service.follower.run())
        try:
            yield service
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
    assert asyncio.all_tasks() == before
