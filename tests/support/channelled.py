"""A cell whose target, verifier and proposers answer behind sockets, as they do in actors, but in one process."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from specserve.deployments.hosts import Address, ProposerHost, TargetHost, VerifierHost
from specserve.deployments.remote import Locate, ProposerLink, RemoteProposerPort, RemoteRoundPort
from specserve.service.engine import Engine
from specserve.service.ports import Planner, ProposerPort

from .everybody import Everybody, Texts
from .rounds import started

SECRET = b"a secret of at least some bytes"


def at(address: Address) -> Locate:
    async def locate() -> Address:
        return address

    return locate


@asynccontextmanager
async def channelled(
    everybody: Everybody, planner: Planner, names: Collection[str], texts: Texts, limits: Mapping[str, int]
) -> AsyncIterator[Engine]:
    """Run an engine over three channels (`everybody.Placement`)."""
    config = everybody.config(limits)
    with ThreadPoolExecutor(1) as executor:
        parts = everybody.parts(names, texts, config.num_pages, config.page_tokens)
        hosts = (
            TargetHost(parts.target, SECRET, executor, parts.beside),
            VerifierHost(everybody.verifier, SECRET, executor),
            ProposerHost(parts.pooled, SECRET, executor),
        )
        target, verifier, pool = [at(await host.server.start("127.0.0.1", 0)) for host in hosts]
        rounds = RemoteRoundPort(target, verifier, SECRET)
        beside, pooled = ProposerLink(target, SECRET), ProposerLink(pool, SECRET)
        try:
            await rounds.connect()
            for link in (beside, pooled):
                link.start()
            await asyncio.gather(beside.wait_connected(), pooled.wait_connected())
            ports: dict[str, ProposerPort] = dict(parts.local)
            ports |= {name: RemoteProposerPort(name, beside, needs_pages=True) for name in parts.beside}
            ports |= {name: RemoteProposerPort(name, pooled) for name in parts.pooled}
            async with started(Engine(rounds, ports, planner, everybody.tokenizer, config)) as engine:
                yield engine
        finally:
            await rounds.close()
            for link in (beside, pooled):
                await link.close()
            for host in hosts:
                await host.server.stop()
