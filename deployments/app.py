"""The Ray Serve application: Engine behind HTTP, its Target and Verifier actors, the Proposer pool, the Controller."""

import asyncio
import os
import time
from functools import partial
from typing import Any, cast

from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specserve.service.errors import ChannelError
from specserve.service.models import read_shape

from . import current
from .actors import BRIEF_OPENMP, QUIET_OPENMP, ProposerDeployment, TargetActor, VerifierActor
from .api.app import build_api
from .api.backend import Backend
from .api.gate import Gate, Gatekeeper
from .backend import EngineBackend
from .cell import cell_backend, engine_config, local_proposer_ports, model_grammars
from .cellreport import cell_report
from .controlplane import ControllerDeployment, RemoteController
from .credentials import Credentials
from .exchange import Follower
from .heap import freeze_heap
from .memory import Memory
from .pace import Pace
from .planning import PolicyPlanner
from .remote import Address, ProposerLink, RemoteProposerPort, RemoteRoundPort
from .scaling import cell_autoscaling, proposer_autoscaling
from .settings import BESIDE_TARGET, ServiceSettings, load_policy
from .startup import prepared_store

DRAIN_S = 120.0
"""How long the streams of a cell that is no longer needed may go on."""

api = build_api(cast(Backend, current.CurrentBackend()), cast(Gatekeeper, current.CurrentGate()), named_in_front=True)


@serve.deployment(
    name="Engine",
    ray_actor_options={"num_cpus": 1, "runtime_env": {"env_vars": QUIET_OPENMP}},
    placement_group_bundles=[{"CPU": 1}, {"CPU": 1}, {"CPU": 1}],
    placement_group_strategy="STRICT_PACK",
    max_ongoing_requests=1024,
    num_replicas=1,
    graceful_shutdown_timeout_s=5,
)
@serve.ingress(api)
class EngineDeployment:
    """One cell: HTTP ingress and round loop here; target and verifier are actors of the same placement group."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: dict[str, Any],
        secret: bytes,
        controller: DeploymentHandle,
        proposer: DeploymentHandle | None,
    ) -> None:
        parsed = ServiceSettings.model_validate(settings)
        self._target = _in_bundle(TargetActor, 1).remote(settings, secret)
        self._verifier = _in_bundle(VerifierActor, 2).remote(settings, secret)
        self._proposer = proposer
        self._link = ProposerLink(self._locate_proposer, secret, self._wants_drafts) if proposer is not None else None
        self._ready = False
        self._round_port = RemoteRoundPort(self._locate_target, self._locate_verifier, secret)
        self._planner = PolicyPlanner(load_policy(parsed.policy))
        self._planner.watch_demand("draft", parsed.proposer_idle_s)
        await self._round_port.connect()
        ports = local_proposer_ports(parsed)
        if self._link is not None:
            self._link.start()
            async with asyncio.timeout(120):
                await self._link.wait_connected()
            ports["draft"] = RemoteProposerPort("draft", self._link)
        attached = [name for name in BESIDE_TARGET if name in parsed.usable_proposers]
        if attached:
            beside_target = ProposerLink(self._locate_target, secret)
            beside_target.start()
            ports |= {name: RemoteProposerPort(name, beside_target, needs_pages=True) for name in attached}
        shape = read_shape(parsed.model_source)
        config, grammars = engine_config(parsed, shape), model_grammars(parsed, shape)
        self._backend: EngineBackend = cell_backend(parsed, config, self._round_port, ports, self._planner, grammars)
        self._memory = Memory(self._backend.engine)
        cell_id, reached = self._backend.cell_id, RemoteController(controller)
        gate = Gate(Credentials(parsed.api_keys), parsed.limits)
        follower = Follower(
            cell_id, self._planner, self._describe, reached, metrics=self._backend.snapshot, quotas=gate
        )
        self._backend.peers = partial(reached.metrics, cell_id)
        await follower.once()
        await self._backend.start()
        freeze_heap()
        self._ready, self._pace = True, Pace(self._backend.engine.counters, self._planner.tpot_slo_ms)
        self._backend.export_telemetry()
        current.install(self._backend, gate)
        self._exchange = asyncio.get_running_loop().create_task(follower.run())

    async def pids(self) -> dict[str, int]:
        """Return the process ids of the cell's parts, for tests that kill them."""
        found = {"engine": os.getpid(), "target": await self._target.pid.remote()}
        found["verifier"] = await self._verifier.pid.remote()
        if self._proposer is not None and self._link is not None and self._link.connected:
            found["proposer"] = await self._proposer.pid.remote()
        return found

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `scaling.cell_replicas` is told of this cell."""
        if not self._ready:
            return {}
        load = self._backend.load
        engine = self._backend.engine
        return {
            "running": float(engine.num_running),
            "waiting": float(engine.num_waiting),
            "places": float(load.places),
            "round_over_objective": self._pace.over_objective(),
        }

    async def report(self) -> dict[str, Any]:
        """Return the engine's counters and gauges."""
        return self._describe()

    def _describe(self) -> dict[str, Any]:
        return cell_report(self._backend.engine, self._memory)

    def check_health(self) -> None:
        """Raise when the round loop has ended, so that Serve replaces the replica."""
        if hasattr(self, "_backend") and self._backend.engine.failed:
            raise RuntimeError("the round loop has ended")

    async def _locate_target(self) -> Address:
        return await _address(self._target)

    async def _locate_verifier(self) -> Address:
        return await _address(self._verifier)

    def _wants_drafts(self) -> bool:
        """Return whether a proposer should be there: until drafts are measured, and while somebody may have some."""
        assert self._link is not None
        if not self._ready:
            return True
        return self._planner.wants("draft", self._link.connected, time.monotonic(), self._memory.short())

    async def _locate_proposer(self) -> Address:
        assert self._proposer is not None
        return cast(Address, tuple(await self._proposer.address.remote()))


def _in_bundle(actor_class: Any, bundle: int) -> Any:
    """Return `actor_class` bound to a bundle of the replica's own placement group."""
    strategy = PlacementGroupSchedulingStrategy(get_current_placement_group(), placement_group_bundle_index=bundle)
    return actor_class.options(
        num_cpus=1, scheduling_strategy=strategy, runtime_env={"env_vars": BRIEF_OPENMP}, max_restarts=-1
    )


async def _address(actor: Any) -> Address:
    try:
        return cast(Address, tuple(await actor.address.remote()))
    except RayError as error:
        raise ChannelError(f"the actor does not answer yet: {type(error).__name__}") from error


def build_app(settings: ServiceSettings, secret: bytes) -> serve.Application:
    """Return the application of one service, its policy store made ready; `secret` authenticates its channels."""
    prepared_store(settings, time.time())
    plain = settings.model_dump(mode="json")
    controller = ControllerDeployment.bind(  # type: ignore[attr-defined]
        plain
    )
    proposer = None
    if "draft" in settings.usable_proposers:
        vocab_size = read_shape(settings.model_source).vocab_size
        proposer = ProposerDeployment.options(  # type: ignore[attr-defined]
            autoscaling_config=proposer_autoscaling(settings.max_cells)
        ).bind(plain, vocab_size, secret)
    engine: Any = EngineDeployment
    if settings.max_cells > 1:
        scaled = cell_autoscaling(settings.max_cells)
        engine = engine.options(num_replicas=None, autoscaling_config=scaled, graceful_shutdown_timeout_s=DRAIN_S)
    return cast(serve.Application, engine.bind(plain, secret, controller, proposer))
