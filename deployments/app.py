"""The Ray Serve application: Engine behind HTTP, its Target and Verifier actors, the Proposer pool, the Controller."""

import asyncio
import logging
import os
from typing import Any, cast

from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specserve.policies.document import policy_from_dict
from specserve.service.errors import ChannelError
from specserve.service.models import read_shape

from . import current
from .actors import BRIEF_OPENMP, QUIET_OPENMP, ProposerDeployment, TargetActor, VerifierActor
from .api.app import build_api
from .api.backend import Backend
from .backend import EngineBackend
from .cell import cell_backend, engine_config, local_proposer_ports
from .controller import ControllerDeployment, cell_report
from .planning import PolicyPlanner
from .remote import Address, ProposerLink, RemoteProposerPort, RemoteRoundPort
from .settings import ServiceSettings, load_policy

LOG = logging.getLogger(__name__)
EXCHANGE_EVERY_S = 0.5

api = build_api(cast(Backend, current.CurrentBackend()))


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
        self._controller = controller
        self._cell_id = f"cell-{os.getpid()}"
        self._target = _in_bundle(TargetActor, 1).remote(settings, secret)
        self._verifier = _in_bundle(VerifierActor, 2).remote(settings, secret)
        self._proposer = proposer
        self._link = ProposerLink(self._locate_proposer, secret) if proposer is not None else None
        self._round_port = RemoteRoundPort(self._locate_target, self._locate_verifier, secret)
        self._planner = PolicyPlanner(load_policy(parsed.policy))
        await self._round_port.connect()
        ports = local_proposer_ports(parsed)
        if self._link is not None:
            self._link.start()
            await asyncio.wait_for(self._link.wait_connected(), 120)
            ports["draft"] = RemoteProposerPort("draft", self._link)
        config = engine_config(parsed, read_shape(parsed.model_source))
        self._backend: EngineBackend = cell_backend(parsed, config, self._round_port, ports, self._planner)
        await self._backend.start()
        self._backend.export_telemetry()
        current.install(self._backend)
        self._exchange = asyncio.get_running_loop().create_task(self._exchange_for_ever())

    async def pids(self) -> dict[str, int]:
        """Return the process ids of the cell's parts, for tests that kill them."""
        found = {"engine": os.getpid(), "target": await self._target.pid.remote()}
        found["verifier"] = await self._verifier.pid.remote()
        if self._proposer is not None:
            found["proposer"] = await self._proposer.pid.remote()
        return found

    async def report(self) -> dict[str, Any]:
        """Return the engine's counters and gauges."""
        engine = self._backend.engine
        return cell_report(
            engine.counters,
            running=engine.num_running,
            waiting=engine.num_waiting,
            free_pages=engine.num_free_pages,
            num_pages=engine.config.num_pages,
            held_by_proposers=dict(engine.num_held_by_proposers),
        )

    def check_health(self) -> None:
        """Raise when the round loop has ended, so that Serve replaces the replica."""
        if hasattr(self, "_backend") and self._backend.engine.failed:
            raise RuntimeError("the round loop has ended")

    async def _locate_target(self) -> Address:
        return await _address(self._target)

    async def _locate_verifier(self) -> Address:
        return await _address(self._verifier)

    async def _locate_proposer(self) -> Address:
        assert self._proposer is not None
        return cast(Address, tuple(await self._proposer.address.remote()))

    async def _exchange_for_ever(self) -> None:
        """Report to the controller and follow its policy; without it the last snapshot stays in force."""
        while True:
            try:
                version, document = await self._controller.exchange.remote(self._cell_id, await self.report())
                if version != self._planner.policy_version:
                    self._planner.set_policy(policy_from_dict(document), version)
            except Exception as error:
                LOG.warning("the controller does not answer; policy %d stays: %s", self._planner.policy_version, error)
            await asyncio.sleep(EXCHANGE_EVERY_S)


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
    """Return the application of one service; `secret` authenticates its channels."""
    plain = settings.model_dump(mode="json")
    controller = ControllerDeployment.bind(  # type: ignore[attr-defined]
        settings.policy
    )
    proposer = None
    if "draft" in settings.usable_proposers:
        vocab_size = read_shape(settings.model_source).vocab_size
        proposer = ProposerDeployment.bind(  # type: ignore[attr-defined]
            plain, vocab_size, secret
        )
    return EngineDeployment.bind(  # type: ignore[attr-defined]
        plain, secret, controller, proposer
    )
