"""Tiny cells for tests: a random Llama with the embedded tokenizer's vocabulary, and proposers that misbehave."""

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specserve.service.engine import Engine, EngineConfig
from specserve.service.grammar import Grammars
from specserve.service.inline import DirectProposerPort, InlineProposerPort, InlineRoundPort
from specserve.service.messages import Draft, DraftBatch, ProposeBatch
from specserve.service.models import LoadedModel, embedded_dir, load_model, load_tokenizer
from specserve.service.ports import Decision, Outcome, Planner, Proposer, ProposerPort, RequestView, RoundCost
from specserve.service.proposers.draft_model import DraftModelProposer
from specserve.service.proposers.prompt_lookup import PromptLookupProposer
from specserve.service.proposers.suffix import SuffixProposer
from specserve.service.requests import GenerationRequest, StepOutput
from specserve.service.target import Target
from specserve.service.verifier import Verifier

VOCAB_SIZE = 4096


def save_tiny_llama(folder: Path, seed: int, layers: int = 2, positions: int = 512) -> Path:
    """Write a random Llama of two small layers to `folder` and return it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=positions,
        initializer_range=0.6,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_yielding_llama(
    folder: Path, layers: int, vocab_size: int = VOCAB_SIZE, positions: int = 512, kept: int | None = None
) -> Path:
    """Write a random Llama whose layers change little, so that a draft without some of them is neither always right nor
    always wrong; or only the first `kept` of them."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=positions, initializer_range=0.6, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.01
        layer.mlp.down_proj.weight.data *= 0.01
    if kept is not None:
        model.model.layers = model.model.layers[:kept]
        config.num_hidden_layers = kept
    model.save_pretrained(folder)
    return folder


class FixedPlanner:
    """Every request uses one proposer at one gamma; remembers what it was told."""

    policy_version = 7

    def __init__(self, proposer: str | None, gamma: int) -> None:
        self.proposer = proposer
        self.gamma = gamma
        self.outcomes: list[Outcome] = []

    def plan(self, requests: Sequence[RequestView], available: frozenset[str], now_s: float) -> tuple[Decision, ...]:
        decisions = []
        for request in requests:
            gamma = min(self.gamma, request.remaining_tokens - 1)
            usable = self.proposer in available and gamma > 0
            decisions.append(Decision(self.proposer if usable else None, gamma if usable else 0, "fixed"))
        return tuple(decisions)

    def learn(self, outcomes: Sequence[Outcome], cost: RoundCost) -> None:
        self.outcomes.extend(outcomes)

    def arrived(self, now_s: float) -> None:
        pass

    def ended(self, request_id: str, failed: bool, tpot_ms: float | None) -> None:
        pass

    def tpot_slo_ms(self, tier: str) -> float | None:
        return None

    def version_of(self, request_id: str) -> int:
        return self.policy_version


class Reckless(FixedPlanner):
    """Asks for the same gamma to the very end, whatever room is left."""

    def plan(self, requests: Sequence[RequestView], available: frozenset[str], now_s: float) -> tuple[Decision, ...]:
        return tuple(Decision(self.proposer, self.gamma, "reckless") for _ in requests)


class RandomPlanner(FixedPlanner):
    """Another proposer and gamma for every request and round."""

    def __init__(self, seed: int) -> None:
        super().__init__(None, 0)
        self._random = random.Random(seed)

    def plan(self, requests: Sequence[RequestView], available: frozenset[str], now_s: float) -> tuple[Decision, ...]:
        decisions = []
        for request in requests:
            gamma = max(0, min(self._random.randint(0, 8), request.remaining_tokens - 1))
            name = self._random.choice(sorted(available))
            decisions.append(Decision(name if gamma else None, gamma, "random"))
        return tuple(decisions)


class ScriptedProposer:
    """Drafts by a rule instead of a model: `right` (needs the answer), `wrong`, `random`, `constant`, `eos`, `broken`,
    `stale` or `outside` (token ids that do not exist)."""

    def __init__(self, name: str, answers: dict[int, int] | None = None) -> None:
        self.name = name
        self._answers = answers or {}
        self._random = random.Random(5)

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        if self.name == "broken" and batch.rows:
            raise RuntimeError("this proposer always fails")
        drafts = []
        for row in batch.rows:
            places = range(row.committed_len, row.committed_len + row.gamma)
            tokens = tuple(self._token(place) for place in places)
            committed_len = row.committed_len - 1 if self.name == "stale" else row.committed_len
            drafts.append(Draft(row.request_id, committed_len, tokens))
        return DraftBatch(batch.round, tuple(drafts), 0)

    def _token(self, place: int) -> int:
        if self.name == "right":
            return self._answers.get(place, 1)
        if self.name == "wrong":
            return (self._answers.get(place, 1) + 1) % VOCAB_SIZE
        if self.name == "random":
            return self._random.randrange(VOCAB_SIZE)
        return {"constant": 17, "eos": 0, "outside": VOCAB_SIZE + 3}.get(self.name, 9)


@dataclass
class Finished:
    """One request's whole output."""

    token_ids: tuple[int, ...]
    text: str
    steps: list[StepOutput]


class Cell:
    """An inline cell over a tiny model; `run` answers a list of requests in one batch."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64, draft: Path | None = None) -> None:
        self.model: LoadedModel = load_model(folder, dtype)
        self.draft = load_model(draft if draft is not None else folder, dtype)
        self.tokenizer = load_tokenizer(embedded_dir("target"))
        self.grammars = Grammars(self.tokenizer, VOCAB_SIZE, self.model.shape.eos_token_ids)
        self.verifier: Callable[[], Verifier] = lambda: Verifier(self.model, self.grammars)

    def engine(
        self, planner: Planner, extra: Sequence[Proposer], executor: ThreadPoolExecutor, **limits: int
    ) -> Engine:
        num_pages, page_tokens = limits.pop("num_pages", 256), limits.pop("page_tokens", 4)
        config = EngineConfig(
            512, VOCAB_SIZE, self.model.shape.eos_token_ids, num_pages=num_pages, page_tokens=page_tokens, **limits
        )
        ports: dict[str, ProposerPort] = {
            "prompt_lookup": DirectProposerPort(PromptLookupProposer(1, 3)),
            "suffix": DirectProposerPort(SuffixProposer()),
            "draft": InlineProposerPort(DraftModelProposer(self.draft, VOCAB_SIZE, 512, 4), executor),
        }
        ports.update({proposer.name: DirectProposerPort(proposer) for proposer in extra})
        target = self.target(num_pages, page_tokens, ports, executor)
        rounds = InlineRoundPort(target, self.verifier(), executor)
        return Engine(rounds, ports, planner, self.tokenizer, config, self.grammars)

    def target(
        self, num_pages: int, page_tokens: int, ports: dict[str, ProposerPort], executor: ThreadPoolExecutor
    ) -> Target:
        """Return the target; a cell whose proposers live beside it adds their ports."""
        return Target(self.model, num_pages, page_tokens)

    def run(
        self,
        planner: Planner,
        requests: Sequence[GenerationRequest],
        extra: Sequence[Proposer] = (),
        **limits: int,
    ) -> list[Finished]:
        """Return every request's output; asserts that no page is left behind and no proposer still holds a request."""

        async def collect(engine: Engine, request: GenerationRequest) -> Finished:
            steps = [step async for step in engine.submit(request)]
            tokens = tuple(token for step in steps for token in step.token_ids)
            return Finished(tokens, "".join(step.text for step in steps), steps)

        async def main() -> list[Finished]:
            with ThreadPoolExecutor(1) as executor:
                engine = self.engine(planner, extra, executor, **limits)
                engine.start()
                try:
                    done = await asyncio.gather(*(collect(engine, request) for request in requests))
                    while engine.num_running or any(engine.num_held_by_proposers.values()):
                        await asyncio.sleep(0)
                    assert engine.num_free_pages == engine.config.num_pages
                finally:
                    await engine.stop()
                return list(done)

        return asyncio.run(asyncio.wait_for(main(), 120))
