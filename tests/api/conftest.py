"""A backend of scripted streams, and clients that reach its app without a socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specserve.deployments.api.app import build_api
from specserve.deployments.api.backend import AnswerStyle, CellSnapshot, Load
from specserve.deployments.api.stats import HttpStats
from specserve.deployments.api.watching import RequestObserver
from specserve.deployments.recorder import ShadowTally
from specserve.service.errors import SpecserveError
from specserve.service.grammar import Grammars
from specserve.service.messages import FinishReason, TokenLogprob
from specserve.service.requests import GenerationRequest, RequestSummary, StepOutput
from specserve.service.stats import EngineStats

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}{% endfor %}{{ '>' if add_generation_prompt }}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class ScriptedStream:
    def __init__(self, script: list[StepOutput | SpecserveError]) -> None:
        self._script = iter(script)
        self.cancelled = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[StepOutput]:
        return self

    async def __anext__(self) -> StepOutput:
        await asyncio.sleep(0)
        step = next(self._script, None)
        if step is None:
            await asyncio.Event().wait()
            raise AssertionError
        if isinstance(step, SpecserveError):
            raise step
        return step

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class FakeBackend:
    script: Callable[[GenerationRequest], list[StepOutput | SpecserveError]]
    tokenizer: PreTrainedTokenizerFast = field(default_factory=byte_tokenizer)
    model_id: str = "org/tiny"
    max_model_len: int = 64
    vocab_size: int = 256
    created: int = 1_700_000_000
    ready: bool = True
    style: AnswerStyle = field(default_factory=AnswerStyle)
    load: Load = field(default_factory=lambda: Load(0, 32))
    grammars: Grammars | None = None
    refuse_after: int | None = None
    refusal: SpecserveError | None = None
    submitted: list[GenerationRequest] = field(default_factory=list)
    streams: list[ScriptedStream] = field(default_factory=list)
    http: HttpStats = field(default_factory=HttpStats)

    @property
    def observers(self) -> list[RequestObserver]:
        return [self.http]

    async def cells(self) -> list[CellSnapshot]:
        shadow = ShadowTally(9, 20, 5, 30, 40)
        gauges = (2, 3, 10, 4, {"ngram": True}, 7)
        return [CellSnapshot("cell-1", self.model_id, EngineStats(), *gauges, self.http, shadow)]

    def submit(self, request: GenerationRequest) -> ScriptedStream:
        if self.refusal is not None and len(self.submitted) == self.refuse_after:
            raise self.refusal
        self.submitted.append(request)
        self.streams.append(ScriptedStream(self.script(request)))
        return self.streams[-1]


def summary(request: GenerationRequest, tokens: int, histogram: tuple[int, ...] = (1, 0, 2)) -> RequestSummary:
    accepted = sum(k * count for k, count in enumerate(histogram))
    rounds = sum(histogram) if len(histogram) > 1 else 0
    drafted = rounds * (len(histogram) - 1)
    return RequestSummary(
        prompt_tokens=len(request.prompt_token_ids), completion_tokens=tokens, cached_tokens=2, num_rounds=4,
        num_spec_rounds=rounds, num_draft_tokens=drafted, num_accepted_tokens=accepted, acceptance_histogram=histogram,
        mode=request.mode, reason="policy", proposer="ngram", tier="default", policy_version=7, queue_ms=1.0,
        time_to_first_token_ms=11.0, generation_ms=30.0,
        accepted_prediction_tokens=None if request.prediction_token_ids is None else 3,
    )  # fmt: skip


def step(request: GenerationRequest, text: str, token_text: str | None = None) -> StepOutput:
    """Text and its byte tokens; `token_text` when the tokens are ahead of the text shown."""
    ids = tuple(byte_tokenizer().encode(text if token_text is None else token_text))
    scored = request.num_logprobs is not None
    logprobs = tuple(TokenLogprob(-0.5, ((token_id, -0.5), (1, float("-inf")))) for token_id in ids) if scored else ()
    return StepOutput(text, ids, logprobs)


def end(request: GenerationRequest, tokens: int, text: str = "", reason: FinishReason = "length") -> StepOutput:
    return StepOutput(text, (), (), reason, summary(request, tokens))


def hello(request: GenerationRequest) -> list[StepOutput | SpecserveError]:
    """Three tokens, one shown late, then two more: 5 tokens in 2 visible steps and an end."""
    return [step(request, "Hel"), step(request, "", "l"), step(request, "lo", "o"), end(request, 5)]


@pytest.fixture
def script() -> SimpleNamespace:
    """The helpers above, for test files, which cannot import a conftest."""
    return SimpleNamespace(step=step, end=end, summary=summary, hello=hello, tokenizer=byte_tokenizer())


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(hello)


@pytest.fixture
def client(backend: FakeBackend) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_api(backend)), base_url="http://test")
