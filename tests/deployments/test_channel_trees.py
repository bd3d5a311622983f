"""Trees over the channels: target, verifier and proposers behind sockets give the tokens of plain decoding."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from support.cells import VOCAB_SIZE, Cell, FixedPlanner, RandomPlanner, save_tiny_llama
from support.rounds import answer
from support.trees import SHAPES, TreeProposer

from specserve.deployments.hosts import Address, ProposerHost, TargetHost, VerifierHost
from specserve.deployments.remote import Locate, ProposerLink, RemoteProposerPort, RemoteRoundPort
from specserve.service.engine import Engine, EngineConfig
from specserve.service.messages import Sampling
from specserve.service.ports import Planner, Proposer
from specserve.service.requests import GenerationRequest
from specserve.service.target import Target
from specserve.service.verifier import Verifier

SECRET = b"a secret of at least some bytes"


def at(address: Address) -> Locate:
    async def locate() -> Address:
        return address

    return locate


async def answers(
    cell: Cell, planner: Planner, requests: Sequence[GenerationRequest], proposers: Sequence[Proposer]
) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(1) as executor:
        hosts = (
            TargetHost(Target(cell.model, 256, 4), SECRET, executor, {}),
            VerifierHost(Verifier(cell.model), SECRET, executor),
            ProposerHost({proposer.name: proposer for proposer in proposers}, SECRET, executor),
        )
        target, verifier, pool = [at(await host.server.start("127.0.0.1", 0)) for host in hosts]
        rounds, link = RemoteRoundPort(target, verifier, SECRET), ProposerLink(pool, SECRET)
        await rounds.connect()
        link.start()
        await link.wait_connected()
        try:
            ports = {proposer.name: RemoteProposerPort(proposer.name, link) for proposer in proposers}
            config = EngineConfig(512, VOCAB_SIZE, cell.model.shape.eos_token_ids, num_pages=256, page_tokens=4)
            engine = Engine(rounds, ports, planner, cell.tokenizer, config)
            engine.start()
            done = await asyncio.gather(*(answer(engine, request) for request in requests))
            await engine.stop()
            assert engine.num_free_pages == 256
        finally:
            await rounds.close()
            await link.close()
            for host in hosts:
                await host.server.stop()
    return [found.token_ids for found in done]


def test_trees_over_sockets_change_no_token(tmp_path: Path) -> None:
    cell = Cell(save_tiny_llama(tmp_path, 1))
    seeded = Sampling(greedy=False, temperature=0.8, seed=4)
    requests = [
        GenerationRequest(f"r{i}", tuple(range(10 + i, 22 + 3 * i)), sampling, 16, ignore_eos=True)
        for i, sampling in enumerate([Sampling(), seeded, replace(seeded, seed=5), Sampling()])
    ]
    alone = asyncio.run(asyncio.wait_for(answers(cell, FixedPlanner(None, 0), requests, ()), 60))
    texts = {r.request_id: (*r.prompt_token_ids, *tokens) for r, tokens in zip(requests, alone, strict=True)}
    planner = RandomPlanner(3)
    proposers = [TreeProposer(shape, texts, VOCAB_SIZE) for shape in SHAPES]
    assert asyncio.run(asyncio.wait_for(answers(cell, planner, requests, proposers), 60)) == alone
    assert sum(outcome.num_accepted for outcome in planner.outcomes) > 20
