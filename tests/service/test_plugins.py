"""Plug-in proposers: whatever they do or claim, requests get plain decoding's output, and lies are counted."""

import asyncio
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.cells import Cell, FixedPlanner, save_tiny_llama
from support.rounds import SMALL_VOCAB, TokenRounds, answer, plain, started, tokenizer
from support.trees import TreeProposer

from specserve.service import plugins
from specserve.service.engine import Engine, EngineConfig
from specserve.service.errors import BadRequestError, ProposerUnavailableError
from specserve.service.inline import InlineRoundPort
from specserve.service.messages import Draft, DraftBatch, ProposeBatch, ProposeRow, Sampling
from specserve.service.plugins import PluginPort, load_plugin
from specserve.service.requests import GenerationRequest
from specserve.service.target import Target
from specserve.service.verifier import Verifier

PROMPT = (1, 2, 3, 4)
BATCH = ProposeBatch(3, "lying", (ProposeRow("r", 4, 0, PROMPT, 2, Sampling()),))


def nan_probs(row: ProposeRow) -> Draft:
    return Draft(row.request_id, row.committed_len, (7,), np.array([[7]], np.int32), np.array([[np.nan]], np.float32))


LIES: dict[str, Any] = {
    "raises": lambda batch: 1 / 0,
    "exits": lambda batch: exit(),
    "answers nothing": lambda batch: None,
    "answers a string": lambda batch: "drafts",
    "drafts no draft": lambda batch: DraftBatch(batch.round, (None,), 0),  # type: ignore[arg-type]
    "tokens are no numbers": lambda batch: drafts(batch, ("a", None)),
    "tokens are too many": lambda batch: drafts(batch, (7,) * 2_000_000),
    "tokens below zero": lambda batch: drafts(batch, (-1,)),
    "tokens beyond the vocabulary": lambda batch: drafts(batch, (10**12,)),
    "another round": lambda batch: replace(drafts(batch, (7,)), round=batch.round - 1),
    "another length": lambda batch: DraftBatch(
        batch.round, tuple(Draft(r.request_id, r.committed_len + 1, (7,)) for r in batch.rows), 0
    ),
    "another request": lambda batch: DraftBatch(batch.round, (Draft("nobody", 4, (7,)),), 0),
    "probabilities are no numbers": lambda batch: DraftBatch(batch.round, tuple(map(nan_probs, batch.rows)), 0),
    "parents are no numbers": lambda batch: grown(batch, ("a", "b")),
    "a child before its parent": lambda batch: grown(batch, (0, 7)),
    "a parent below zero": lambda batch: grown(batch, (-1, 0)),
    "the same twice": lambda batch: DraftBatch(batch.round, drafts(batch, (7,)).drafts * 2, 0),
}


def drafts(batch: ProposeBatch, token_ids: tuple[Any, ...]) -> DraftBatch:
    return DraftBatch(batch.round, tuple(Draft(r.request_id, r.committed_len, token_ids) for r in batch.rows), 0)


def grown(batch: ProposeBatch, parents: tuple[Any, ...]) -> DraftBatch:
    chains = drafts(batch, (7, 8))
    return replace(chains, drafts=tuple(replace(draft, parents=parents) for draft in chains.drafts))


class Lying:
    """Answers by a rule."""

    name = "lying"

    def __init__(self, rule: Any) -> None:
        self.propose = rule


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("trusted", [False, True])
def test_whatever_a_plug_in_answers_the_output_is_plain_decodings(lie: str, trusted: bool) -> None:
    async def main() -> Engine:
        rounds = TokenRounds(16, 4)
        config = EngineConfig(512, SMALL_VOCAB, (0,), num_pages=16, page_tokens=4)
        ports = {"lying": PluginPort(Lying(LIES[lie]), trusted)}
        engine = Engine(rounds, ports, FixedPlanner("lying", 2), tokenizer(), config)
        async with started(engine):
            done = await answer(engine, GenerationRequest("r", PROMPT, Sampling(), 8, ignore_eos=True))
        assert done.token_ids == plain(PROMPT, 8)
        return engine

    counters = asyncio.run(asyncio.wait_for(main(), 60)).counters
    harmless = lie in ("the same twice", "tokens are too many", "probabilities are no numbers")
    assert harmless or counters.missed["lying"] + counters.dropped["lying"] > 0


def test_a_plug_in_may_draft_trees() -> None:
    texts = {"r": (*PROMPT, *plain(PROMPT, 20))}
    planner = FixedPlanner("tree_right_last", 7)

    async def main() -> None:
        config = EngineConfig(512, SMALL_VOCAB, (0,), num_pages=16, page_tokens=4)
        ports = {planner.proposer or "": PluginPort(TreeProposer("right_last", texts, SMALL_VOCAB))}
        async with started(Engine(TokenRounds(16, 4), ports, planner, tokenizer(), config)) as engine:
            done = await answer(engine, GenerationRequest("r", PROMPT, Sampling(), 20, ignore_eos=True))
        assert done.token_ids == plain(PROMPT, 20)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert sum(outcome.num_accepted for outcome in planner.outcomes) > 5


def test_a_stalled_plug_in_is_left_alone_until_it_answers_and_what_it_says_late_is_lost() -> None:
    go, entered = threading.Event(), threading.Event()

    def stall(batch: ProposeBatch) -> DraftBatch:
        entered.set()
        go.wait(60)
        return drafts(batch, (7,))

    async def main() -> None:
        port = PluginPort(Lying(stall))
        with pytest.raises(ProposerUnavailableError, match="late"):
            await port.propose(BATCH, 0.01)
        assert entered.is_set()
        assert not port.available
        with pytest.raises(ProposerUnavailableError, match="busy"):
            await port.propose(BATCH, 0.01)
        assert port.generation == 1
        go.set()
        while not port.available:
            await asyncio.sleep(0)
        assert (await port.propose(BATCH, 10.0)).drafts[0].token_ids == (7,)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    return Cell(save_tiny_llama(tmp_path_factory.mktemp("models") / "target", 1))


def overconfident(batch: ProposeBatch) -> DraftBatch:
    """Always the same token, claimed to be one of many equally likely ones: a ratio test would accept it too often."""
    support = np.arange(100, 164, dtype=np.int32)
    found = []
    for row in batch.rows:
        ids = np.tile(support, (row.gamma, 1))
        probs = np.full(ids.shape, 1.0 / 64, np.float32)
        found.append(Draft(row.request_id, row.committed_len, (100,) * row.gamma, ids, probs))
    return DraftBatch(batch.round, tuple(found), 0)


def test_probabilities_nobody_sampled_from_are_believed_of_trusted_plug_ins_only(cell: Cell) -> None:
    sampling = Sampling(greedy=False, temperature=3.0, seed=5, acceptance="rejection")

    async def tokens(gamma: int, trusted: bool) -> tuple[int, ...]:
        with ThreadPoolExecutor(1) as executor:
            port = InlineRoundPort(Target(cell.model, 64, 4), Verifier(cell.model), executor)
            config = EngineConfig(512, 4096, cell.model.shape.eos_token_ids, num_pages=64, page_tokens=4)
            ports = {"lying": PluginPort(Lying(overconfident), trusted)}
            engine = Engine(port, ports, FixedPlanner("lying", gamma), cell.tokenizer, config)
            async with started(engine):
                done = await answer(engine, GenerationRequest("r", PROMPT, sampling, 60, ignore_eos=True))
            return done.token_ids

    plain_tokens = asyncio.run(tokens(0, False))
    assert asyncio.run(tokens(2, False)) == plain_tokens
    assert asyncio.run(tokens(2, True)) != plain_tokens


def test_the_worked_example_is_a_proposer() -> None:
    assert plugins.__doc__ is not None
    code = textwrap.dedent("\n".join(line for line in plugins.__doc__.splitlines() if line.startswith("    ")))
    space: dict[str, Any] = {}
    exec(code, space)

    async def main() -> DraftBatch:
        return await PluginPort(space["Echo"]()).propose(BATCH, 10.0)

    answered = asyncio.run(main())
    assert answered.drafts[0].token_ids == (4, 4)
    assert answered.num_held_requests == 1


@pytest.mark.parametrize("path", ["nowhere:Class", "json:nothing", "json:JSONDecoder"])
def test_a_path_that_leads_to_no_proposer_is_refused_by_name(path: str) -> None:
    with pytest.raises(BadRequestError, match=path):
        load_plugin(path)
