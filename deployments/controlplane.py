"""The controller as a Serve deployment, and how cells reach it."""

import asyncio
import os
from pathlib import Path
from typing import Any, cast

from ray import serve
from ray.serve.handle import DeploymentHandle

from .admin.serving import serve_admin
from .api.backend import CellSnapshot
from .controller import Controller
from .exchange import Reply, Report
from .policystore import PolicyStore
from .settings import ServiceSettings


@serve.deployment(name="Controller", num_replicas=1, max_ongoing_requests=1024, ray_actor_options={"num_cpus": 0})
class ControllerDeployment:
    """The one controller of a service; the admin port is served from its process, never by Serve's public route."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        parsed = ServiceSettings.model_validate(settings)
        assert parsed.policy_store is not None
        self._controller = Controller(PolicyStore(Path(parsed.policy_store)))
        self._admin = asyncio.get_running_loop().create_task(serve_admin(self._controller, parsed))

    async def exchange(self, cell_id: str, report: Report) -> Reply:
        """See `Controller.exchange`."""
        return await self._controller.exchange(cell_id, report)

    async def answer(self, cell_id: str, question_id: int, content: object) -> None:
        """See `Controller.answer`."""
        await self._controller.answer(cell_id, question_id, content)

    async def metrics(self, cell_id: str) -> list[CellSnapshot]:
        """See `Controller.metrics`."""
        return self._controller.metrics(cell_id)

    async def pid(self) -> int:
        """Return the process id, for tests that kill it."""
        return os.getpid()


class RemoteController:
    """The controller behind a Serve handle; a `ControllerPort`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def exchange(self, cell_id: str, report: Report) -> Reply:
        """See `Controller.exchange`."""
        return cast(Reply, await self._handle.exchange.remote(cell_id, report))

    async def answer(self, cell_id: str, question_id: int, content: object) -> None:
        """See `Controller.answer`."""
        await self._handle.answer.remote(cell_id, question_id, content)

    async def metrics(self, cell_id: str) -> list[CellSnapshot]:
        """See `Controller.metrics`."""
        return cast(list[CellSnapshot], await self._handle.metrics.remote(cell_id))
