"""What the OpenAI surface needs from whoever runs the model; Ray, threads and processes stay behind it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerFast

from specserve.service.grammar import Grammars
from specserve.service.requests import GenerationRequest, StepOutput
from specserve.service.stats import EngineStats

from ..recorder import ShadowTally
from .stats import HttpStats
from .watching import RequestObserver


@dataclass(frozen=True, slots=True)
class CellSnapshot:
    """One cell as it is now: what its engine has counted, and its gauges. `proposers` says which can be asked."""

    engine: str
    model_id: str
    stats: EngineStats
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    proposers: Mapping[str, bool]
    policy_version: int
    http: HttpStats
    shadow: ShadowTally | None = None


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """What an operator decides about answers.

    A stream that was silent for `keep_alive_s` gets a comment line. `count_rejected_predictions`: `completion_tokens`
    holds the rejected prediction tokens too, as OpenAI bills them; otherwise it is the number of tokens of the text,
    which is what clients that count tokens compare it with.
    """

    keep_alive_s: float = 15.0
    count_rejected_predictions: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests are unfinished, and how many take part in a round at most."""

    unfinished: int
    places: int

    @property
    def num_waiting(self) -> int:
        """Requests that have no place, or will have none when the next round begins."""
        return max(0, self.unfinished - self.places)


class RequestStream(Protocol):
    """The rounds' output of one submitted request, ended by an output with a finish reason or by an exception."""

    def __aiter__(self) -> AsyncIterator[StepOutput]: ...

    async def __anext__(self) -> StepOutput: ...

    def cancel(self) -> None:
        """Give the request up; cancelling a finished or cancelled request does nothing."""
        ...


class Backend(Protocol):
    """One served model. `max_model_len` is the largest prompt plus output that is ever admitted."""

    @property
    def model_id(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def created(self) -> int:
        """Unix time at which the model became known, in seconds."""
        ...

    @property
    def ready(self) -> bool:
        """True when a request submitted now would be served."""
        ...

    @property
    def style(self) -> AnswerStyle: ...

    @property
    def load(self) -> Load: ...

    @property
    def grammars(self) -> Grammars | None:
        """What outputs may be held to; None where that is not offered."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast: ...

    @property
    def observers(self) -> Sequence[RequestObserver]:
        """Who is told of every request that was answered."""
        ...

    @property
    def http(self) -> HttpStats:
        """What this surface itself counts."""
        ...

    async def cells(self) -> Sequence[CellSnapshot]:
        """Return what `/metrics` shows: this cell, and what the service last heard of the others."""
        ...

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue `request`. Raises BadRequestError when it is refused, before anything is allocated for it."""
        ...
