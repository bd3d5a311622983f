"""Target, verifier and proposers behind channels: plain classes that an actor, or a test, can hold. No ray here.

Torch work runs on the executor's one thread, so that the channel's event loop always answers.
"""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from specserve.service.errors import ChannelError
from specserve.service.messages import Features, ProposeBatch, ScoreBatch, VerifyBatch
from specserve.service.ports import Proposer
from specserve.service.target import Target
from specserve.service.verifier import Verifier

from .channel import ChannelClient, ChannelServer, Handler
from .codec import decode, encode

Address = tuple[str, int]
FEATURES_TIMEOUT_S = 30.0
MAX_PENDING_ROUNDS = 8
BUSY_WINDOW_S = 5.0


class TargetHost:
    """Scores batches and pushes the hidden states straight to the verifier; answers for the proposers beside it."""

    def __init__(
        self, target: Target, secret: bytes, executor: ThreadPoolExecutor, attached: Mapping[str, Proposer]
    ) -> None:
        self._target = target
        self._secret = secret
        self._executor = executor
        self._verifier: ChannelClient | None = None
        propose = _proposing(attached, executor)
        self.server = ChannelServer({"score": self._score, "connect": self._connect, "propose": propose}, secret)

    async def _connect(self, body: bytes) -> bytes:
        host, port = body.decode().rsplit(":", 1)
        if self._verifier is not None:
            await self._verifier.close()
        self._verifier = ChannelClient(host, int(port), self._secret)
        await self._verifier.connect()
        return b""

    async def _score(self, body: bytes) -> bytes:
        batch = decode(body, ScoreBatch)
        features = await asyncio.get_running_loop().run_in_executor(self._executor, self._target.score, batch)
        if self._verifier is None or not self._verifier.connected:
            raise ChannelError("the target has no verifier to push to")
        await self._verifier.call("features", encode(features), FEATURES_TIMEOUT_S)
        return b""


class VerifierHost:
    """Joins the features of a round with its verify message, whichever comes first."""

    def __init__(self, verifier: Verifier, secret: bytes, executor: ThreadPoolExecutor) -> None:
        self._verifier = verifier
        self._executor = executor
        self._features: dict[int, asyncio.Future[Features]] = {}
        self.server = ChannelServer({"features": self._receive, "verify": self._verify}, secret)

    def _slot(self, round_number: int) -> asyncio.Future[Features]:
        if round_number not in self._features:
            self._features[round_number] = asyncio.get_running_loop().create_future()
            for stale in sorted(self._features)[:-MAX_PENDING_ROUNDS]:
                self._features.pop(stale).cancel()
        return self._features[round_number]

    async def _receive(self, body: bytes) -> bytes:
        features = decode(body, Features)
        slot = self._slot(features.round)
        if not slot.done():
            slot.set_result(features)
        return b""

    async def _verify(self, body: bytes) -> bytes:
        batch = decode(body, VerifyBatch)
        async with asyncio.timeout(FEATURES_TIMEOUT_S):
            features = await self._slot(batch.round)
        self._features.pop(batch.round, None)
        loop = asyncio.get_running_loop()
        verdicts = await loop.run_in_executor(self._executor, self._verifier.verify, features, batch)
        return encode(verdicts)


class ProposerHost:
    """Answers for several proposers on one channel."""

    def __init__(self, proposers: Mapping[str, Proposer], secret: bytes, executor: ThreadPoolExecutor) -> None:
        self._answer = _proposing(proposers, executor)
        self.server = ChannelServer({"propose": self._propose}, secret)
        self._reached = False
        self._alone_since_s = self._read_s = time.monotonic()
        self._busy_s = self._share = 0.0

    def demand(self) -> dict[str, float]:
        """Return how many cells are connected, for how long there was none, and the share of time spent drafting.

        Until the first one connects, the cell it was started for counts as one.
        """
        now_s, num_cells = time.monotonic(), self.server.num_clients
        if num_cells:
            self._reached, self._alone_since_s = True, now_s
        elapsed_s = max(now_s - self._read_s, 1e-3)
        fresh = min(elapsed_s / BUSY_WINDOW_S, 1.0)
        self._share += (self._busy_s / elapsed_s - self._share) * fresh
        self._read_s, self._busy_s = now_s, 0.0
        cells = num_cells if self._reached else 1
        return {"cells": float(cells), "idle_s": now_s - self._alone_since_s, "busy": self._share}

    async def _propose(self, body: bytes) -> bytes:
        started_s = time.monotonic()
        try:
            return await self._answer(body)
        finally:
            self._busy_s += time.monotonic() - started_s


def _proposing(proposers: Mapping[str, Proposer], executor: ThreadPoolExecutor) -> Handler:
    async def propose(body: bytes) -> bytes:
        batch = decode(body, ProposeBatch)
        proposer = proposers[batch.proposer]
        return encode(await asyncio.get_running_loop().run_in_executor(executor, proposer.propose, batch))

    return propose
