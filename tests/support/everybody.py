"""One tiny target with every proposer there is, none of them always right or always wrong, in one process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from specserve.service.engine import Engine, EngineConfig
from specserve.service.inline import DirectProposerPort, InlineProposerPort, InlineRoundPort
from specserve.service.messages import AttachedName, Sampling
from specserve.service.models import embedded_dir, head_of, load_model, load_tokenizer
from specserve.service.plugins import PluginPort
from specserve.service.ports import Decision, Planner, Proposer, ProposerPort, RequestView
from specserve.service.proposers.attached import attach
from specserve.service.proposers.draft_model import DraftModelProposer
from specserve.service.proposers.prediction import PredictionProposer
from specserve.service.proposers.prompt_lookup import PromptLookupProposer
from specserve.service.proposers.self_draft import SelfDraftProposer
from specserve.service.proposers.suffix import SuffixLimits, SuffixProposer
from specserve.service.requests import GenerationRequest
from specserve.service.skipping import Skip, layers_from
from specserve.service.target import Target
from specserve.service.verifier import Verifier

from .cells import FixedPlanner, save_yielding_llama
from .drafters import Replay
from .rounds import answer, started
from .taught import taught_heads
from .trees import TreeProposer

VOCAB_SIZE = 64
LAYERS = 6
NUM_REQUESTS = 8
TEXT_TOKENS = 40
"""Of each request, prompt and answer: as many as the model has positions."""
HEADS: tuple[AttachedName, ...] = ("eagle", "eagle3", "medusa", "mtp")
HEAD_CHAINS: Mapping[str, AttachedName] = {f"{name}_chain": name for name in HEADS}
"""The heads where they draft no trees, which greedy requests get else. No cell has both."""

SKIPS: Mapping[str, Skip] = {
    "layer_skip": Skip(frozenset({1, 2, 4}), frozenset({2, 5})),
    "early_exit": layers_from(4, LAYERS),
}
SUFFIXES = {"suffix_chain": SuffixLimits(min_chance=0.51), "suffix_tree": SuffixLimits(min_chance=0.01)}
"""Above one half no two tokens can follow the same one."""

PROPOSERS = (
    "draft", "prompt_lookup", *SUFFIXES, "prediction", *HEADS, *SKIPS, "plugin_chain", "plugin_tree",
)  # fmt: skip
SAMPLINGS = {"greedy": Sampling(), "coupled": Sampling(greedy=False, temperature=0.3, top_p=0.95, seed=11)}
Texts = Mapping[str, Sequence[int]]


@dataclass
class Parts:
    """A target and some of its proposers by where they live: beside it, in a pool, or in the engine's process."""

    target: Target
    beside: dict[str, Proposer]
    pooled: dict[str, Proposer] = field(default_factory=dict)
    local: dict[str, DirectProposerPort | PluginPort] = field(default_factory=dict)


class Everybody:
    """Owns the models, the heads' files, and what plain decoding answers to every request."""

    def __init__(self, folder: Path) -> None:
        target_dir = save_yielding_llama(folder / "target", LAYERS, VOCAB_SIZE, TEXT_TOKENS)
        self.model = load_model(target_dir, torch.float64)
        self.draft = load_model(
            save_yielding_llama(folder / "draft", LAYERS, VOCAB_SIZE, TEXT_TOKENS, kept=4), torch.float64
        )
        self.tokenizer = load_tokenizer(embedded_dir("target"))
        self.verifier = Verifier(self.model)
        self.head = head_of(self.model)
        self.folders: dict[AttachedName, Path] = {}
        self.texts = {name: self._plain(sampling) for name, sampling in SAMPLINGS.items()}
        said = [text for texts in self.texts.values() for text in texts]
        self.texts["both"] = [self.texts[_sampling("both", index)][index] for index in range(NUM_REQUESTS)]
        self.folders = taught_heads(folder, target_dir, said)

    def _plain(self, sampling: Sampling) -> list[tuple[int, ...]]:
        """Return each request's prompt and answer, decoded alone, without cached prefixes."""

        async def main() -> list[tuple[int, ...]]:
            limits = {"page_tokens": 16, "num_pages": 8, "prefix_caching": False}
            async with inline(self, FixedPlanner(None, 0), (), {}, limits) as engine:
                return [
                    (*prompt, *(await answer(engine, request(index, prompt, sampling))).token_ids)
                    for index, prompt in enumerate(PROMPTS)
                ]

        return asyncio.run(asyncio.wait_for(main(), 60))

    def requests(self, sampling: str, count: int, wave: int = 0) -> list[GenerationRequest]:
        """Return the first `count` requests under names of their own in every `wave`; every seventh token of what they
        predict is wrong. `sampling` may be "both", in turn."""
        made = []
        for index, prompt in enumerate(PROMPTS[:count]):
            one = request(index, prompt, SAMPLINGS[_sampling(sampling, index)], wave)
            said = self.texts[sampling][index][len(prompt) :]
            predicted = tuple(3 if place % 7 == 4 else token for place, token in enumerate(said))
            made.append(replace(one, prediction_token_ids=predicted))
        return made

    def parts(self, names: Collection[str], texts: Texts, num_pages: int, page_tokens: int) -> Parts:
        """Return new parts with the proposers called `names`; some plug-ins know the `texts` of the requests."""
        chains = {name: HEAD_CHAINS[name] for name in names if name in HEAD_CHAINS}
        heads = chains or {name: name for name in HEADS if name in names}
        folders = {head: self.folders[head] for head in heads.values()}
        made, features = attach(folders, self.model, self.head, num_pages, page_tokens, trees=not chains)
        parts = Parts(Target(self.model, num_pages, page_tokens, features), {name: made[heads[name]] for name in heads})
        for name, skip in SKIPS.items():
            parts.beside[name] = SelfDraftProposer(name, parts.target, self.head, skip, page_tokens, TEXT_TOKENS)
        parts.pooled["draft"] = DraftModelProposer(self.draft, VOCAB_SIZE, 512, 4)
        parts.local["prediction"] = DirectProposerPort(PredictionProposer())
        parts.local["prompt_lookup"] = DirectProposerPort(PromptLookupProposer(1, 3))
        for name, limits in SUFFIXES.items():
            parts.local[name] = DirectProposerPort(SuffixProposer(limits))
        parts.local["plugin_chain"] = PluginPort(Replay("scripted", texts, VOCAB_SIZE))
        parts.local["plugin_tree"] = PluginPort(TreeProposer("mixed", texts, VOCAB_SIZE))
        for name, port in parts.local.items():
            port.name = name
        for group in (parts.beside, parts.pooled, parts.local):
            for name in set(group) - set(names):
                del group[name]  # type: ignore[attr-defined]  # each is a dictionary
        return parts

    def config(self, limits: Mapping[str, int]) -> EngineConfig:
        """Return the engine's limits."""
        eos_token_ids = self.model.shape.eos_token_ids
        return EngineConfig(TEXT_TOKENS, VOCAB_SIZE, eos_token_ids, propose_timeout_s=60.0, **limits)  # type: ignore[arg-type]


def prompts() -> list[tuple[int, ...]]:
    """Return prompts of 5 to 26 tokens, some of which begin alike."""
    shared = tuple(range(40, 52))
    begun = [shared[: 4 * (index % 4)] for index in range(NUM_REQUESTS)]
    lengths = [max(5 + 3 * index, len(first) + 1) for index, first in enumerate(begun)]
    return [
        (*first, *((7 * index + 3 * place) % 50 + 10 for place in range(length - len(first))))
        for index, (first, length) in enumerate(zip(begun, lengths, strict=True))
    ]


PROMPTS = prompts()


def _sampling(name: str, index: int) -> str:
    return tuple(SAMPLINGS)[index % 2] if name == "both" else name


def request(index: int, prompt: tuple[int, ...], sampling: Sampling, wave: int = 0) -> GenerationRequest:
    """Return a request whose prompt and answer are `TEXT_TOKENS` long."""
    return GenerationRequest(f"w{wave}r{index}", prompt, sampling, TEXT_TOKENS - len(prompt), ignore_eos=True)


class Rotating(FixedPlanner):
    """Request i gets the i-th of `names`, or, `turning`, the next one in every round; lengths come in turn."""

    def __init__(self, names: Sequence[str], turning: bool = False, lengths: Sequence[int] = (1, 3, 6, 2)) -> None:
        super().__init__(None, 0)
        self.names = names
        self._turning = turning
        self._lengths = lengths
        self._num_rounds = 0

    def plan(self, requests: Sequence[RequestView], available: frozenset[str], now_s: float) -> tuple[Decision, ...]:
        self._num_rounds += 1
        return tuple(self._one(request) for request in requests)

    def _one(self, request: RequestView) -> Decision:
        index = int(request.request_id.rpartition("r")[2])
        name = self.names[(index + self._turning * self._num_rounds) % len(self.names)]
        return Decision(name, self._lengths[(index + self._num_rounds) % len(self._lengths)], "rotating")

    def counts(self, name: str, wave: str = "") -> tuple[int, int]:
        """Return how many tokens deep `name` drafted and how many were accepted, for requests of one `wave` or all."""
        some = [one for one in self.outcomes if one.proposer == name and one.request_id.startswith(wave)]
        return sum(outcome.num_drafted for outcome in some), sum(outcome.num_accepted for outcome in some)


MIXTURES: Mapping[str, Callable[[], Rotating]] = {
    "each its own": lambda: Rotating(PROPOSERS[:NUM_REQUESTS]),
    "each another": lambda: Rotating(PROPOSERS[-NUM_REQUESTS:]),
    "all in turn": lambda: Rotating(PROPOSERS, turning=True),
}


@asynccontextmanager
async def inline(
    everybody: Everybody, planner: Planner, names: Collection[str], texts: Texts, limits: Mapping[str, int]
) -> AsyncIterator[Engine]:
    """Run an engine with everything in this process."""
    config = everybody.config(limits)
    with ThreadPoolExecutor(1) as executor:
        parts = everybody.parts(names, texts, config.num_pages, config.page_tokens)
        ports: dict[str, ProposerPort] = dict(parts.local)
        for name, proposer in (parts.pooled | parts.beside).items():
            port = ports[name] = InlineProposerPort(proposer, executor, needs_pages=name in parts.beside)
            port.name = name
        rounds = InlineRoundPort(parts.target, everybody.verifier, executor)
        async with started(Engine(rounds, ports, planner, everybody.tokenizer, config)) as engine:
            yield engine


Placement = Callable[
    [Everybody, Planner, Collection[str], Texts, Mapping[str, int]], AbstractAsyncContextManager[Engine]
]


@dataclass(frozen=True)
class Situation:
    """What may go wrong beside the drafts. `waves`: the same requests come so often, one after the other."""

    limits: Mapping[str, int]
    waves: int = 1


SITUATIONS = {
    "plain": Situation({"page_tokens": 16, "num_pages": 64}),
    "page boundaries": Situation({"page_tokens": 3, "num_pages": 160, "prefill_tokens": 5}),
    "preemption": Situation({"page_tokens": 4, "num_pages": 25}),
    "cached prefixes": Situation({"page_tokens": 4, "num_pages": 128}, waves=2),
}


def check(
    everybody: Everybody,
    planner: Planner,
    names: Collection[str],
    sampling: str,
    count: int,
    situation: str,
    placement: Placement = inline,
) -> None:
    """Answer the first `count` requests together; every token must be plain decoding's."""
    limits, waves = SITUATIONS[situation].limits, SITUATIONS[situation].waves
    expected = everybody.texts[sampling][:count]
    requests = [everybody.requests(sampling, count, wave) for wave in range(waves)]
    texts = {one.request_id: text for wave in requests for one, text in zip(wave, expected, strict=True)}

    async def main() -> None:
        async with placement(everybody, planner, names, texts, limits) as engine:
            for wave in requests:
                done = await asyncio.gather(*(answer(engine, one) for one in wave))
                found = [(*one.prompt_token_ids, *own.token_ids) for one, own in zip(wave, done, strict=True)]
                assert found == expected
        assert situation != "preemption" or engine.counters.preempted > 0
        prompt_tokens = sum(map(len, PROMPTS[:count]))
        assert waves == 1 or engine.counters.cached_tokens > prompt_tokens // 2
        assert not engine.counters.missed + engine.counters.dropped

    asyncio.run(asyncio.wait_for(main(), 120))
