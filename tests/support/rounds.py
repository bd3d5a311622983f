"""Engines to schedule against: a round port that keeps token ids where a model keeps keys and values, so that a wrong
page is a wrong token at once, and the real tiny model with limits a test chooses."""

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

from transformers import PreTrainedTokenizerFast

from specserve.service.acceptance import walk_tree
from specserve.service.engine import Engine, EngineConfig
from specserve.service.errors import RoundLostError
from specserve.service.inline import DirectProposerPort, InlineProposerPort, InlineRoundPort
from specserve.service.messages import Draft, DraftBatch, ProposeBatch, ScoreBatch, Verdict, VerdictBatch, VerifyBatch
from specserve.service.models import embedded_dir, load_tokenizer
from specserve.service.ports import Planner, Proposer, ProposerPort
from specserve.service.proposers.draft_model import DraftModelProposer
from specserve.service.proposers.held import updated_tokens
from specserve.service.proposers.prompt_lookup import PromptLookupProposer
from specserve.service.proposers.suffix import SuffixProposer
from specserve.service.requests import GenerationRequest, StepOutput
from specserve.service.slots import moved_slots
from specserve.service.target import Target
from specserve.service.trees import paths
from specserve.service.verifier import Verifier

from .cells import VOCAB_SIZE, Cell, Finished

SMALL_VOCAB = 40
BLANK = -1


def next_token(context: Sequence[int]) -> int:
    """Return the token that follows `context`: some function of every token in it."""
    assert BLANK not in context
    return 1 + blake2b(array("q", context).tobytes(), digest_size=4).digest()[0] % (SMALL_VOCAB - 1)


def plain(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Return what plain decoding answers."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


@dataclass
class TokenRounds:
    """A round port whose pages hold tokens. A round whose number is in `lose` fails, and takes the pages with it when
    `lose` says True; if `scored_when_lost`, after the target did its part. `before` is called with every batch."""

    num_pages: int
    page_tokens: int
    lose: Mapping[int, bool] = field(default_factory=dict)
    before: Callable[[ScoreBatch], None] = lambda batch: None
    scored_when_lost: bool = False
    lost: bool = False
    moved: frozenset[tuple[str, int]] = frozenset()

    def __post_init__(self) -> None:
        self.slots = [BLANK] * (self.num_pages * self.page_tokens)

    async def run_round(self, score: ScoreBatch, verify: VerifyBatch) -> VerdictBatch:
        await asyncio.sleep(0)
        self.before(score)
        if score.round in self.lose and not self.scored_when_lost:
            self._lose(score.round)
        self._move(score)
        asked = {row.request_id: row for row in verify.rows}
        assert len(asked) == sum(row.num_sampled > 0 for row in score.rows)
        verdicts = []
        for row in score.rows:
            places = [page * self.page_tokens + slot for page in row.block_table for slot in range(self.page_tokens)]
            end = row.start_position + len(row.token_ids)
            for place, token in zip(places[row.start_position : end], row.token_ids, strict=True):
                self.slots[place] = token
            context = [self.slots[place] for place in places[:end]]
            if row.num_sampled:
                draft = asked[row.request_id].draft_token_ids
                assert row.num_sampled == len(draft) + 1
                assert asked[row.request_id].committed_len + len(draft) == end
                assert asked[row.request_id].parents == row.parents
                first = end - row.num_sampled
                parents = row.parents if row.parents is not None else range(len(draft))
                own = [
                    next_token([*context[:first], *(context[first + node] for node in path)]) for path in paths(parents)
                ]
                path, emitted = walk_tree(parents, draft, own)
                verdicts.append(Verdict(row.request_id, end - len(draft), len(path), emitted, ()))
        if score.round in self.lose:
            self._lose(score.round)
        return VerdictBatch(score.round, tuple(verdicts), 0.0)

    def _lose(self, round_number: int) -> None:
        self.lost = self.lose[round_number]
        raise RoundLostError("lost on purpose")

    def _move(self, score: ScoreBatch) -> None:
        """Move what trees left elsewhere, once: a batch that comes again finds it done."""
        asked = {(row.request_id, row.start_position): row for row in score.rows if row.moved_from}
        for key, row in asked.items():
            if key not in self.moved:
                for source, target in zip(*moved_slots([row], self.page_tokens), strict=True):
                    self.slots[target] = self.slots[source]
        self.moved = frozenset(asked)

    async def recover(self) -> bool:
        await asyncio.sleep(0)
        if self.lost:
            self.slots = [BLANK] * len(self.slots)
            self.moved = frozenset()
        lost, self.lost = self.lost, False
        return lost


class Guessing:
    """Knows the rule of `TokenRounds` and draws each of its tokens right with chance `skill`."""

    name = "guessing"

    def __init__(self, skill: float, seed: int = 3) -> None:
        self._skill = skill
        self._random = random.Random(seed)
        self._held: dict[str, list[int]] = {}

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        for request_id in batch.closed:
            self._held.pop(request_id, None)
        drafts = []
        for row in batch.rows:
            tokens = updated_tokens(self._held.get(row.request_id, []), row)
            assert tokens is not None
            self._held[row.request_id] = tokens
            guess: list[int] = []
            for _ in range(row.gamma):
                right = next_token([*tokens, *guess])
                guess.append(right if self._random.random() < self._skill else self._random.randrange(SMALL_VOCAB))
            drafts.append(Draft(row.request_id, row.committed_len, tuple(guess)))
        return DraftBatch(batch.round, tuple(drafts), len(self._held))


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(embedded_dir("target"))


def token_engine(rounds: TokenRounds, planner: Planner, proposers: Sequence[Proposer] = (), **limits: int) -> Engine:
    """Return an engine over `rounds`; `limits` are fields of EngineConfig."""
    sizes = {"max_model_len": 512, "num_pages": rounds.num_pages, "page_tokens": rounds.page_tokens}
    config = EngineConfig(vocab_size=SMALL_VOCAB, eos_token_ids=(0,), **{**sizes, **limits})
    ports = {proposer.name: DirectProposerPort(proposer) for proposer in proposers}
    return Engine(rounds, ports, planner, tokenizer(), config)


def model_engine(
    cell: Cell, planner: Planner, executor: ThreadPoolExecutor, extra: Sequence[Proposer] = (), **limits: int
) -> Engine:
    """Return an engine over the cell's model with every proposer; `limits` are fields of EngineConfig."""
    sizes = {"max_model_len": 512, "num_pages": 256, "page_tokens": 4, **limits}
    config = EngineConfig(vocab_size=VOCAB_SIZE, eos_token_ids=cell.model.shape.eos_token_ids, **sizes)
    ports: dict[str, ProposerPort] = {
        "prompt_lookup": DirectProposerPort(PromptLookupProposer(1, 3)),
        "suffix": DirectProposerPort(SuffixProposer()),
        "draft": InlineProposerPort(DraftModelProposer(cell.draft, VOCAB_SIZE, 512, 4), executor),
    }
    ports.update({proposer.name: DirectProposerPort(proposer) for proposer in extra})
    target = Target(cell.model, config.num_pages, config.page_tokens)
    return Engine(InlineRoundPort(target, Verifier(cell.model), executor), ports, planner, cell.tokenizer, config)


@asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[Engine]:
    """Run `engine`; at the end every request is over, and no page, draft or task may be left."""
    others = asyncio.all_tasks()
    engine.start()
    try:
        yield engine
        while engine.num_running or engine.num_waiting or any(engine.num_held_by_proposers.values()):
            assert not engine.failed
            await asyncio.sleep(0)
        assert engine.num_free_pages == engine.config.num_pages
    finally:
        await engine.stop()
    while asyncio.all_tasks() - others:  # servers in this process may still be answering; what stays is a leak
        await asyncio.sleep(0)


async def answer(engine: Engine, request: GenerationRequest, cancel_after: int | None = None) -> Finished:
    """Return the request's output; after `cancel_after` steps it is cancelled and what came so far is returned."""
    stream = engine.submit(request)
    steps: list[StepOutput] = []
    if cancel_after == 0:
        stream.cancel()
        return Finished((), "", [])
    async for step in stream:
        steps.append(step)
        if len(steps) == cancel_after:
            stream.cancel()
            break
    tokens = tuple(token for step in steps for token in step.token_ids)
    return Finished(tokens, "".join(step.text for step in steps), steps)
