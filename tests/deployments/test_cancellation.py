"""Clients that leave at random moments: every page and draft is free again by the next round."""

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.cells import VOCAB_SIZE, Cell, RandomPlanner, save_tiny_llama
from support.leaving import Leaving
from support.rounds import SMALL_VOCAB, Guessing, TokenRounds, started, token_engine, tokenizer

from specserve.deployments.api.app import build_api
from specserve.deployments.api.backend import AnswerStyle
from specserve.deployments.backend import EngineBackend
from specserve.deployments.hosts import ProposerHost, TargetHost, VerifierHost
from specserve.deployments.remote import Address, ProposerLink, RemoteProposerPort, RemoteRoundPort
from specserve.service.engine import Engine, EngineConfig
from specserve.service.inline import DirectProposerPort
from specserve.service.messages import DraftBatch, ProposeBatch, Sampling, ScoreBatch, VerdictBatch, VerifyBatch
from specserve.service.ports import Proposer, ProposerPort
from specserve.service.proposers.draft_model import DraftModelProposer
from specserve.service.proposers.prediction import PredictionProposer
from specserve.service.proposers.prompt_lookup import PromptLookupProposer
from specserve.service.requests import GenerationRequest
from specserve.service.running import RequestStream
from specserve.service.target import Target
from specserve.service.verifier import Verifier

NUM_LEAVING = 200
NUM_STAYING = 40
NUM_CLIENTS = 24
NUM_PAGES = 256
SECRET = b"s" * 32


@dataclass
class Book:
    """Which request was in which rounds, and in which round it was cancelled or closed.

    `cancelled` holds the number of the first round that begins after the cancellation.
    """

    last_scored: dict[str, int] = field(default_factory=dict)
    last_drafted: dict[tuple[str, str], int] = field(default_factory=dict)
    closed: dict[tuple[str, str], int] = field(default_factory=dict)
    cancelled: dict[str, int] = field(default_factory=dict)

    def scored(self, batch: ScoreBatch) -> None:
        self.last_scored.update({row.request_id: batch.round for row in batch.rows})

    def proposed(self, batch: ProposeBatch) -> None:
        self.last_drafted.update({(batch.proposer, row.request_id): batch.round for row in batch.rows})
        for request_id in batch.closed:
            self.closed.setdefault((batch.proposer, request_id), batch.round)

    def check(self) -> None:
        """Assert that no cancelled request was in a later round, and that its proposers heard of it by the next."""
        assert len(self.cancelled) >= NUM_LEAVING * 3 // 4
        for request_id, next_round in self.cancelled.items():
            assert self.last_scored.get(request_id, -1) < next_round
        drafted = [(place, round_) for place, round_ in self.last_drafted.items() if place[1] in self.cancelled]
        assert len(drafted) > NUM_LEAVING // 2
        for place, round_ in drafted:
            next_round = self.cancelled[place[1]]
            assert round_ < next_round
            assert self.closed[place] <= next_round


class Watched:
    """A proposer whose batches are written in the book."""

    def __init__(self, proposer: Proposer, book: Book) -> None:
        self._proposer = proposer
        self._book = book
        self.name = proposer.name

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        self._book.proposed(batch)
        return self._proposer.propose(batch)


class WatchedBackend(EngineBackend):
    """Writes down the round before which each request is cancelled."""

    book: Book

    def submit(self, request: GenerationRequest) -> RequestStream:
        stream = super().submit(request)
        cancel = stream.cancel

        def noted() -> None:
            self.book.cancelled.setdefault(request.request_id, self.engine.counters.rounds)
            cancel()

        stream.cancel = noted  # type: ignore[method-assign]
        return stream


async def _warm() -> None:
    pass


def visits(seed: int) -> list[Leaving]:
    """Return clients that leave before the first byte, after some event, or stay to the end."""
    draw = random.Random(seed)
    clients = []
    for number in range(NUM_LEAVING + NUM_STAYING):
        prompt = [draw.randint(1, SMALL_VOCAB - 1) for _ in range(draw.randint(1, 30))]
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        if draw.random() < 0.5:
            body["prediction"] = {"type": "content", "content": "3?A;7B"}
        if number >= NUM_LEAVING:
            clients.append(Leaving(body, "[DONE]"))
        elif draw.random() < 0.2:
            clients.append(Leaving({**body, "stream": draw.random() < 0.5}, None))
        else:
            clients.append(Leaving(body, "data: ", draw.randint(1, 6)))
    draw.shuffle(clients)
    return clients


@pytest.mark.asyncio
async def test_two_hundred_streams_left_over_http_free_everything_by_the_next_round() -> None:
    book = Book()
    rounds = TokenRounds(NUM_PAGES, 4, before=book.scored)
    proposers: list[Proposer] = [Guessing(0.6), PromptLookupProposer(1, 3), PredictionProposer()]
    engine = token_engine(rounds, RandomPlanner(8), [Watched(one, book) for one in proposers], max_running=12)
    async with started(engine):
        backend = WatchedBackend(engine, "tiny", tokenizer(), _warm, AnswerStyle())
        backend.book = book
        backend._started = True
        app = build_api(backend)
        work = iter(visits(5))

        async def client() -> None:
            for one in work:
                await one.visit(app)

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
        left = engine.counters.rounds
    assert engine.counters.rounds <= left + 1
    assert (engine.num_running, engine.num_waiting, engine.num_free_pages) == (0, 0, NUM_PAGES)
    assert engine.counters.finished + engine.counters.cancelled == NUM_LEAVING + NUM_STAYING
    book.check()


@asynccontextmanager
async def remote_engine(cell: Cell, book: Book, draft: DraftModelProposer) -> AsyncIterator[Engine]:
    """Yield a running engine whose target, verifier and draft model answer over channels."""
    with ThreadPoolExecutor(1) as executor:
        target = TargetHost(Target(cell.model, NUM_PAGES, 4), SECRET, executor, {})
        verifier = VerifierHost(Verifier(cell.model), SECRET, executor)
        pool = ProposerHost({"draft": Watched(draft, book)}, SECRET, executor)
        hosts = (target, verifier, pool)
        where = [await host.server.start() for host in hosts]

        async def locate(index: int) -> Address:
            return where[index]

        round_port = WatchedRounds(lambda: locate(0), lambda: locate(1), SECRET)
        round_port.book = book
        link = ProposerLink(lambda: locate(2), SECRET)
        await round_port.connect()
        link.start()
        await link.wait_connected()
        ports: dict[str, ProposerPort] = {"draft": RemoteProposerPort("draft", link)}
        for local in (PromptLookupProposer(1, 3), PredictionProposer()):
            ports[local.name] = DirectProposerPort(Watched(local, book))
        config = EngineConfig(512, VOCAB_SIZE, (0,), NUM_PAGES, 4, max_running=12, propose_timeout_s=30.0)
        engine = Engine(round_port, ports, RandomPlanner(6), cell.tokenizer, config)
        engine.start()
        try:
            yield engine
        finally:
            await engine.stop()
            await link.close()
            await round_port.close()
            for host in hosts:
                await host.server.stop()


class WatchedRounds(RemoteRoundPort):
    """The remote port, whose batches are written in the book."""

    book: Book

    async def run_round(self, score: ScoreBatch, verify: VerifyBatch) -> VerdictBatch:
        self.book.scored(score)
        return await super().run_round(score, verify)


@pytest.mark.asyncio
async def test_two_hundred_streams_left_with_remote_hosts_free_everything_by_the_next_round(tmp_path: Path) -> None:
    cell = Cell(save_tiny_llama(tmp_path / "target", 1), draft=save_tiny_llama(tmp_path / "draft", 2, layers=1))
    book, draw = Book(), random.Random(3)
    draft = DraftModelProposer(cell.draft, VOCAB_SIZE, 512, 4)
    async with remote_engine(cell, book, draft) as engine:

        async def leave(number: int) -> None:
            prompt = tuple(draw.randint(1, 60) for _ in range(draw.randint(1, 30)))
            predicted = tuple(draw.randint(1, 60) for _ in range(20)) if number % 2 else None
            name = f"r{number}"
            request = GenerationRequest(name, prompt, Sampling(), 60, ignore_eos=True, prediction_token_ids=predicted)
            steps = draw.randint(0, 6)
            stream = engine.submit(request)
            while steps and (await anext(stream)).finish_reason is None:
                steps -= 1
            book.cancelled[name] = engine.counters.rounds
            stream.cancel()

        async def client(numbers: range) -> None:
            for number in numbers:
                await leave(number)

        await asyncio.gather(*(client(range(first, NUM_LEAVING, 12)) for first in range(12)))
        left = engine.counters.rounds
        while engine.num_running or engine.num_waiting or any(engine.num_held_by_proposers.values()):
            await asyncio.sleep(0)
        assert engine.num_free_pages == NUM_PAGES
        assert engine.counters.rounds <= left + 1
        assert engine.counters.cancelled == NUM_LEAVING
        assert set(engine.num_held_by_proposers.values()) == {0}
        assert draft._allocator.num_free == 512
        book.check()
