"""Bugs that other engines had with what a round leaves behind: pages, draft caches, context limits, counters.

Each is compared with plain decoding under three drafters, in float32 where a model runs. The threads: vllm 57941, 5342,
40756, 17498, 46283, 50425, 45963; sglang 3574, 28815, 35898; lorax 793; TRT-LLM 16448, 14724; tokenspeed 1443.
"""

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.cells import VOCAB_SIZE, Cell, FixedPlanner, RandomPlanner, Reckless, save_tiny_llama
from support.drafters import DRAFTERS, GAMMA, Known, Replay, assert_same, drafted, known, plain, seen
from support.rounds import TokenRounds, answer, model_engine, next_token, started, token_engine
from support.rounds import plain as token_answer

from specserve.service.engine import Engine, EngineConfig
from specserve.service.errors import ProposerUnavailableError
from specserve.service.inline import InlineRoundPort
from specserve.service.messages import Draft, DraftBatch, ProposeBatch, Sampling, VerifyRow
from specserve.service.ports import Decision, RequestView
from specserve.service.proposers.draft_model import DraftModelProposer
from specserve.service.requests import GenerationRequest
from specserve.service.target import Target
from specserve.service.verifier import Verifier, decide

SAMPLINGS = (Sampling(), Sampling(greedy=False, temperature=0.9, top_p=0.95, seed=5, frequency_penalty=0.5))
EVERY_DRAFTER = pytest.mark.parametrize("drafter", DRAFTERS)
PAGE = 4


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    return Cell(save_tiny_llama(tmp_path_factory.mktemp("models") / "target", 1), torch.float32)


def prompt(length: int) -> tuple[int, ...]:
    return tuple((7 * place + length) % 60 + 1 for place in range(length))


def asked(name: object, length: int, max_tokens: int, sampling: Sampling) -> GenerationRequest:
    return GenerationRequest(str(name), prompt(length), sampling, max_tokens, ignore_eos=True, num_logprobs=2)


def test_two_verifiers_give_the_same_verdicts_also_at_ties_and_in_another_order() -> None:
    """Logits of few distinct values, so that most maxima and borders are ties."""
    draw, generator = random.Random(4), torch.Generator().manual_seed(4)
    rows, logits = [], []
    settings = [Sampling(), Sampling(greedy=False, seed=3, top_k=4), Sampling(greedy=False, seed=4, top_p=0.6)]
    for number in range(60):
        sampling, gamma = draw.choice(settings), draw.randint(0, 5)
        draft = tuple(draw.randrange(30) for _ in range(gamma))
        rows.append(VerifyRow(str(number), 5 + number, sampling, draft, None, None, 2))
        logits.append(torch.randint(0, 4, (gamma + 1, 30), generator=generator).float())
    verdicts = {verdict.request_id: verdict for verdict in decide(torch.cat(logits), tuple(rows))}
    order = draw.sample(range(60), 60)
    again = decide(torch.cat([logits[place] for place in order]), tuple(rows[place] for place in order))
    assert [verdicts[verdict.request_id] for verdict in again] == list(again)
    for row, own in zip(rows, logits, strict=True):
        assert decide(own, (row,)) == (verdicts[row.request_id],)
        if row.sampling.greedy:
            best = [min(range(30), key=lambda token: (-line[token], token)) for line in own.tolist()]
            assert verdicts[row.request_id].token_ids == tuple(best[: verdicts[row.request_id].num_accepted + 1])


class Counting(RandomPlanner):
    """Another proposer and gamma for every request and call; counts its calls."""

    calls = 0

    def plan(self, requests: Sequence[RequestView], available: frozenset[str], now_s: float) -> tuple[Decision, ...]:
        self.calls += 1
        return super().plan(requests, available, now_s)


def test_a_round_is_planned_once_whatever_the_requests_are_told(cell: Cell) -> None:
    planner = Counting(8)
    requests = [asked(n, 3 + n, 12, SAMPLINGS[n % 2]) for n in range(8)]
    expected = plain(cell, requests)

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            engine = model_engine(cell, planner, executor, prefill_tokens=512)
            async with started(engine):
                done = await asyncio.gather(*(answer(engine, request) for request in requests))
            assert planner.calls == engine.counters.rounds - 1  # the first is all prompts
            assert_same([seen(one) for one in done], expected)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_draft_model_with_a_shorter_context_than_the_target_stops_drafting_there(cell: Cell, tmp_path: Path) -> None:
    short = Cell(save_tiny_llama(tmp_path / "target", 1), torch.float32, save_tiny_llama(tmp_path / "d", 2, 1, 48))
    requests = [asked(n, 30 + n, 40, sampling) for n, sampling in enumerate(SAMPLINGS)]
    planner = Reckless("draft", GAMMA)
    done = short.run(planner, requests)
    assert_same([seen(one) for one in done], plain(cell, requests))
    lengths = [outcome.num_drafted for outcome in planner.outcomes]
    assert GAMMA in lengths[:4]
    assert not any(lengths[-10:])


@EVERY_DRAFTER
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_the_last_tokens_of_the_context_are_drafted_no_further(cell: Cell, drafter: str, sampling: Sampling) -> None:
    limits = {"num_pages": 10, "prefix_caching": False}  # 40 tokens: what a request may ever have
    room = [GenerationRequest(str(k), prompt(40 - k), sampling, k, ignore_eos=True) for k in range(1, GAMMA + 3)]
    expected = plain(cell, room)
    assert [len(one.token_ids) for one in expected] == [*range(1, GAMMA + 3)]
    assert_same(drafted(cell, room, drafter, known(cell, room), **limits), expected)


@EVERY_DRAFTER
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_a_rejection_at_every_offset_of_a_page_leaves_nothing_stale(
    cell: Cell, drafter: str, sampling: Sampling
) -> None:
    requests = [asked(length, length, 3 * PAGE + 2, sampling) for length in range(1, 3 * PAGE)]
    expected = plain(cell, requests, prefix_caching=False)
    told = known(cell, requests)
    for gamma in (1, 3, PAGE + 1):
        assert_same(drafted(cell, requests, drafter, told, gamma, page_tokens=PAGE), expected)


@EVERY_DRAFTER
def test_two_hundred_cancelled_requests_leave_no_page_and_no_draft_cache(cell: Cell, drafter: str) -> None:
    requests = [asked(n, 2 + n % 7, 60, SAMPLINGS[n % 2]) for n in range(200)]
    says: Known = {r.request_id: r.prompt_token_ids for r in requests}
    drafter_port = DraftModelProposer(cell.draft, VOCAB_SIZE, 512, 4)

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            name = "draft" if drafter == "self" else drafter
            extra = [drafter_port] if drafter == "self" else [Replay(drafter, says)]
            engine = model_engine(cell, Reckless(name, GAMMA), executor, extra)
            async with started(engine):
                steps = [n % 5 for n in range(200)]
                await asyncio.gather(*(answer(engine, r, after) for r, after in zip(requests, steps, strict=True)))
            assert engine.counters.cancelled == 200
            assert engine.num_free_pages == engine.config.num_pages
        assert drafter_port._allocator.num_free == 512
        assert not drafter_port._held

    asyncio.run(asyncio.wait_for(main(), 120))


class Mortal:
    """A port to a draft model that dies in some rounds and comes back knowing nothing."""

    name = "draft"
    available = True
    needs_pages = False

    def __init__(self, cell: Cell, deaths: Sequence[int]) -> None:
        self._cell = cell
        self._deaths = deaths
        self.generation = 0
        self._born()

    def _born(self) -> None:
        self._proposer = DraftModelProposer(self._cell.draft, VOCAB_SIZE, 512, 4)
        self.generation += 1

    async def propose(self, batch: ProposeBatch, timeout_s: float) -> DraftBatch:
        if batch.round in self._deaths:
            self._born()
            raise ProposerUnavailableError("killed on purpose")
        return self._proposer.propose(batch)


@pytest.mark.parametrize("deaths", [(2,), (3, 4), (2, 4, 6), (7, 9)], ids=str)
def test_a_drafter_killed_between_rounds_changes_no_token_and_comes_back(cell: Cell, deaths: tuple[int, ...]) -> None:
    requests = [asked(n, 3 + 4 * n, 30, SAMPLINGS[n % 2]) for n in range(4)]
    planner = Reckless("draft", 2)
    expected = plain(cell, requests)

    async def main() -> None:
        config = EngineConfig(512, VOCAB_SIZE, (0,), num_pages=256, page_tokens=PAGE)
        with ThreadPoolExecutor(1) as executor:
            rounds = InlineRoundPort(Target(cell.model, 256, PAGE), Verifier(cell.model), executor)
            engine = Engine(rounds, {"draft": Mortal(cell, deaths)}, planner, cell.tokenizer, config)
            async with started(engine):
                done = await asyncio.gather(*(answer(engine, request) for request in requests))
        assert_same([seen(one) for one in done], expected)
        assert engine.counters.proposals_missed == len(deaths)
        assert planner.outcomes[-1].num_drafted > 0

    asyncio.run(asyncio.wait_for(main(), 60))


class Scheduled(FixedPlanner):
    """One gamma a call, from a list; then none."""

    def __init__(self, gammas: Sequence[int]) -> None:
        super().__init__("told", 0)
        self._gammas = list(gammas)

    def plan(self, requests: Sequence[RequestView], available: frozenset[str], now_s: float) -> tuple[Decision, ...]:
        gamma = self._gammas.pop(0) if self._gammas else 0
        return tuple(Decision("told" if gamma else None, gamma, "told") for _ in requests)


class Told:
    """Drafts for `TokenRounds`, right for as many tokens as the next number says."""

    name = "told"

    def __init__(self, accepted: Sequence[int]) -> None:
        self._accepted = list(accepted)
        self._tokens: list[int] = []

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        drafts = []
        for row in batch.rows:
            self._tokens = [*self._tokens[: row.known_len], *row.new_token_ids]
            num_right, guess = self._accepted.pop(0), list[int]()
            for place in range(row.gamma):
                right = next_token([*self._tokens, *guess])
                guess.append(right if place < num_right else right % 39 + 1)
            drafts.append(Draft(row.request_id, row.committed_len, tuple(guess)))
        return DraftBatch(batch.round, tuple(drafts), 0)


def test_counters_are_those_added_up_by_hand() -> None:
    """Ten rounds of known gamma and acceptance, three of them without a draft; the last 5 is cut to the 3 that fit."""
    gammas, accepted = [4, 0, 3, 5, 1, 0, 2, 4, 0, 5], [4, 0, 5, 1, 0, 2, 3]
    num_tokens = 1 + len(gammas) + sum(accepted)
    request = GenerationRequest("r", prompt(3), Sampling(), num_tokens, ignore_eos=True)
    planner = Scheduled(gammas)

    async def main() -> None:
        engine = token_engine(TokenRounds(64, PAGE), planner, [Told(accepted)])
        async with started(engine):
            done = await answer(engine, request)
        assert done.token_ids == token_answer(request.prompt_token_ids, num_tokens)
        summary = done.steps[-1].summary
        assert summary is not None
        assert (summary.num_rounds, summary.num_spec_rounds) == (10, 7)
        assert (summary.num_draft_tokens, summary.num_accepted_tokens) == (22, 15)
        assert summary.acceptance_histogram == (2, 1, 1, 1, 1, 1)
        assert (summary.prompt_tokens, summary.completion_tokens) == (3, num_tokens)
        assert [len(step.token_ids) for step in done.steps] == [1, 5, 1, 1, 6, 2, 1, 1, 3, 1, 4]
        counters = engine.counters
        assert (counters.draft_tokens, counters.accepted_tokens, counters.output_tokens) == (22, 15, num_tokens)

    asyncio.run(asyncio.wait_for(main(), 60))
