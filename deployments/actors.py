"""Ray's thin shells round target, verifier and proposers: build the part, listen, say where."""

import os
from typing import Any

import ray
from ray import serve

from specserve.service.models import load_model, resolve_dtype
from specserve.service.ports import Proposer
from specserve.service.target import Target
from specserve.service.torch_thread import torch_thread
from specserve.service.verifier import Verifier

from .cell import draft_proposer, model_grammars, target_and_attached
from .heap import freeze_heap
from .hosts import Address, ProposerHost, TargetHost, VerifierHost
from .scaling import proposer_autoscaling
from .settings import ServiceSettings

QUIET_OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""For processes that compute nothing large: no thread of theirs spins."""

BRIEF_OPENMP = {"GOMP_SPINCOUNT": "2000"}
"""For those that do: threads wait about 0.1 ms for the next product of the same forward, then leave the core to others.

Sleeping at once costs a forward of Gemma-3-270M 7 ms of 9; the default spins for 15 ms after it, on a core that the
verifier or the engine needs.
"""


def node_address() -> str:
    """Return the address other processes reach this node's channels at: loopback for a cluster of one machine."""
    return os.environ.get("SPECSERVE_CHANNEL_HOST", "127.0.0.1")


class _Listening:
    """Starts a host's server once and remembers where it listens; nothing large is made in the process after it."""

    def __init__(self, host: TargetHost | VerifierHost | ProposerHost) -> None:
        self._host = host
        self._address: Address | None = None
        freeze_heap()

    async def address(self) -> Address:
        if self._address is None:
            self._address = await self._host.server.start(node_address(), 0)
        return self._address


def _target(settings: ServiceSettings) -> tuple[Target, dict[str, Proposer]]:
    return target_and_attached(
        settings, load_model(settings.model_source, resolve_dtype(settings.dtype), settings.device)
    )


def _verifier(settings: ServiceSettings) -> Verifier:
    model = load_model(settings.model_source, resolve_dtype(settings.dtype), settings.device)
    grammars = model_grammars(settings, model.shape)
    grammars.prepare()
    return Verifier(model, grammars)


@ray.remote(max_restarts=-1, num_cpus=0, max_concurrency=8)
class TargetActor:
    """Hosts the target model and the proposers beside it. A restart loses the KV and nothing else."""

    def __init__(self, settings: dict[str, Any], secret: bytes) -> None:
        parsed = ServiceSettings.model_validate(settings)
        executor = torch_thread(parsed.num_threads, shared_processors=True)
        target, attached = executor.submit(_target, parsed).result()
        self._listening = _Listening(TargetHost(target, secret, executor, attached))

    async def address(self) -> Address:
        """Return where the target listens."""
        return await self._listening.address()

    async def pid(self) -> int:
        """Return the process id, for those who want to kill it."""
        return os.getpid()


@ray.remote(max_restarts=-1, num_cpus=0, max_concurrency=8)
class VerifierActor:
    """Hosts the head and the acceptance rule. A restart loses nothing."""

    def __init__(self, settings: dict[str, Any], secret: bytes) -> None:
        parsed = ServiceSettings.model_validate(settings)
        executor = torch_thread(parsed.num_threads, shared_processors=True)
        verifier = executor.submit(_verifier, parsed).result()
        self._listening = _Listening(VerifierHost(verifier, secret, executor))

    async def address(self) -> Address:
        """Return where the verifier listens."""
        return await self._listening.address()

    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()


@serve.deployment(
    name="Proposer",
    ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": BRIEF_OPENMP}},
    autoscaling_config=proposer_autoscaling(1),
    max_ongoing_requests=64,
)
class ProposerDeployment:
    """Hosts the proposers that have a model. Decides nothing, may die at any time, and is there while cells want it."""

    def __init__(self, settings: dict[str, Any], vocab_size: int, secret: bytes) -> None:
        parsed = ServiceSettings.model_validate(settings)
        executor = torch_thread(parsed.num_threads, shared_processors=True)
        draft = executor.submit(draft_proposer, parsed, vocab_size, resolve_dtype(parsed.dtype)).result()
        self._host = ProposerHost({draft.name: draft}, secret, executor)
        self._listening = _Listening(self._host)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `scaling.proposer_replicas` is told of this replica."""
        return self._host.demand()

    async def address(self) -> Address:
        """Return where this replica listens; engines stay with the replica that answered."""
        return await self._listening.address()

    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()
