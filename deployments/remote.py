"""The engine's side of the channels: ports to a target, a verifier and proposers in other processes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from specserve.service.errors import ChannelError, ProposerUnavailableError, RoundLostError, SpecserveError
from specserve.service.messages import DraftBatch, ProposeBatch, ScoreBatch, VerdictBatch, VerifyBatch

from .channel import ChannelClient
from .codec import decode, encode

LOG = logging.getLogger(__name__)
Address = tuple[str, int]
Locate = Callable[[], Awaitable[Address]]
ROUND_TIMEOUT_S = 60.0
RETRY_S = 0.1
WATCH_S = 1.0


class RemoteRoundPort:
    """Runs rounds over two channels. `locate_target` and `locate_verifier` say where the actors listen now."""

    def __init__(self, locate_target: Locate, locate_verifier: Locate, secret: bytes) -> None:
        self._locate_target = locate_target
        self._locate_verifier = locate_verifier
        self._secret = secret
        self._target: ChannelClient | None = None
        self._verifier: ChannelClient | None = None

    async def connect(self) -> None:
        """Connect to whatever is not connected, waiting for restarted actors as long as it takes."""
        if self._verifier is None or not self._verifier.connected:
            self._verifier = await self._reach("verifier", self._locate_verifier)
        if self._target is None or not self._target.connected:
            self._target = await self._reach("target", self._locate_target)
        host, port = await self._locate_verifier()
        assert self._target is not None
        await self._target.call("connect", f"{host}:{port}".encode(), ROUND_TIMEOUT_S)

    async def run_round(self, score: ScoreBatch, verify: VerifyBatch) -> VerdictBatch:
        """Return the verdicts. Raises RoundLostError when either process is gone or silent."""
        if self._target is None or self._verifier is None:
            raise RoundLostError("target and verifier are not connected")
        scored = asyncio.ensure_future(self._target.call("score", encode(score), ROUND_TIMEOUT_S))
        calls: list[asyncio.Future[bytes]] = [scored]
        if verify.rows:
            calls.append(asyncio.ensure_future(self._verifier.call("verify", encode(verify), ROUND_TIMEOUT_S)))
        try:
            answers = await asyncio.gather(*calls)
        except (SpecserveError, TimeoutError) as error:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            raise RoundLostError(f"round {score.round} was lost: {error}") from error
        if not verify.rows:
            return VerdictBatch(verify.round, (), 0.0)
        return decode(answers[-1], VerdictBatch)

    async def recover(self) -> bool:
        """Reconnect; True when it was the target that had gone, and its KV with it."""
        while True:
            await asyncio.sleep(RETRY_S)
            target_lost = self._target is None or not self._target.connected
            try:
                await self.connect()
            except (SpecserveError, TimeoutError) as error:
                LOG.warning("reconnecting: %s", error)
                continue
            return target_lost

    async def close(self) -> None:
        """Close both channels."""
        for client in (self._target, self._verifier):
            if client is not None:
                await client.close()

    async def _reach(self, what: str, locate: Locate) -> ChannelClient:
        while True:
            try:
                host, port = await locate()
                client = ChannelClient(host, port, self._secret)
                await client.connect()
            except (ChannelError, OSError, TimeoutError) as error:
                LOG.warning("waiting for the %s: %s", what, error)
                await asyncio.sleep(RETRY_S)
            else:
                return client


class ProposerLink:
    """One connection to a proposer replica, shared by the ports of its proposers and kept up in the background.

    Where `wanted` says so only: a connection, and the question for an address, keep a replica up.
    """

    def __init__(self, locate: Locate, secret: bytes, wanted: Callable[[], bool] = lambda: True) -> None:
        self._locate = locate
        self._secret = secret
        self._wanted = wanted
        self._client: ChannelClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self.generation = 0

    @property
    def connected(self) -> bool:
        """True while a replica answers."""
        return self._client is not None and self._client.connected

    def start(self) -> None:
        """Begin to connect, to reconnect whenever the replica goes, and to let go of it while it is not wanted."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def wait_connected(self) -> None:
        """Return once a replica answers."""
        while not self.connected:
            await asyncio.sleep(RETRY_S)

    async def call(self, body: bytes, timeout_s: float) -> bytes:
        """Return the answer to one propose message. Raises ChannelError or TimeoutError."""
        if self._client is None or not self._client.connected:
            self._lost.set()
            raise ChannelError("no proposer replica is connected")
        try:
            return await self._client.call("propose", body, timeout_s)
        except ChannelError:
            if not self._client.connected:
                self._lost.set()
            raise

    async def close(self) -> None:
        """Stop reconnecting and close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._let_go()

    async def _let_go(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _keep(self) -> None:
        while True:
            if not self._wanted():
                await self._let_go()
            elif not self.connected:
                try:
                    host, port = await self._locate()
                    client = ChannelClient(host, port, self._secret)
                    await client.connect()
                except Exception as error:
                    LOG.warning("waiting for a proposer: %s", error)
                    await asyncio.sleep(RETRY_S)
                    continue
                self._client = client
                self.generation += 1
            self._lost.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._lost.wait()


class RemoteProposerPort:
    """One proposer behind a link."""

    def __init__(self, name: str, link: ProposerLink, needs_pages: bool = False) -> None:
        self.name = name
        self.needs_pages = needs_pages
        self._link = link

    @property
    def generation(self) -> int:
        """Counts connections: a new one may lead to a replica that knows nothing."""
        return self._link.generation

    @property
    def available(self) -> bool:
        """True while the link is up."""
        return self._link.connected

    async def propose(self, batch: ProposeBatch, timeout_s: float) -> DraftBatch:
        """Return the drafts. Raises ProposerUnavailableError when they are late, lost or unreadable."""
        try:
            return decode(await self._link.call(encode(batch), timeout_s), DraftBatch)
        except (SpecserveError, TimeoutError, ValueError) as error:
            raise ProposerUnavailableError(f"{self.name}: {error!r}") from error
