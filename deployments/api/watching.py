"""What is remembered of a generation request while it is answered, for those who count and trace. Never its text."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

from specserve.service.requests import GenerationRequest, RequestSummary, StepOutput

from .reply import Reply

Operation = Literal["chat", "text_completion"]
MAX_ROUNDS = 128
TRACE_HEADERS = ("traceparent", "tracestate")
CANCELLED = "cancelled"


class OutputStream(Protocol):
    """What is watched; see `backend.RequestStream`."""

    async def __anext__(self) -> StepOutput: ...

    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """One round's part in one choice, at `at_ns` Unix time."""

    at_ns: int
    choice: int
    num_tokens: int
    num_drafted: int
    num_accepted: int


@dataclass(slots=True)
class Watch:
    """One request. It ends when every choice has finished, when one fails, or when the client leaves.

    `rounds` are the first MAX_ROUNDS; `num_rounds` counts all.
    """

    operation: Operation
    response_id: str
    model: str
    requests: Sequence[GenerationRequest]
    observers: Sequence["RequestObserver"]
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    started_ns: int = field(default_factory=time.time_ns)
    started_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    ended_s: float | None = None
    rounds: list[RoundSeen] = field(default_factory=list)
    num_rounds: int = 0
    num_tokens: int = 0
    finish_reasons: dict[int, str] = field(default_factory=dict)
    summaries: dict[int, RequestSummary] = field(default_factory=dict)
    error_type: str | None = None

    @property
    def tier(self) -> str:
        """The tier that served: what the engine said, else what was asked for."""
        return next((summary.tier for summary in self.summaries.values()), self.requests[0].tier)

    @property
    def duration_s(self) -> float:
        """Seconds from the request's arrival to its end."""
        assert self.ended_s is not None
        return self.ended_s - self.started_s

    @property
    def first_token_after_s(self) -> float | None:
        """Seconds from arrival to the first token of any choice; None when there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def per_token_s(self) -> float | None:
        """Seconds after the first token for each later token of a choice; None when no choice had a second one."""
        num_later = self.num_tokens - len(self.requests)
        if self.first_token_after_s is None or num_later < 1:
            return None
        return (self.duration_s - self.first_token_after_s) * len(self.requests) / num_later

    def saw(self, choice: int, output: StepOutput) -> None:
        """Take in one round's output."""
        if self.first_token_s is None and output.token_ids:
            self.first_token_s = time.monotonic()
        self.num_rounds += 1
        num_tokens = len(output.token_ids)
        self.num_tokens += num_tokens
        if len(self.rounds) < MAX_ROUNDS:
            seen = RoundSeen(time.time_ns(), choice, num_tokens, output.num_drafted, output.num_accepted)
            self.rounds.append(seen)
        if output.finish_reason is not None:
            self.finish_reasons[choice] = output.finish_reason
        if output.summary is not None:
            self.summaries[choice] = output.summary
        if len(self.finish_reasons) == len(self.requests):
            self.end(None)

    def end(self, error_type: str | None) -> None:
        """Tell the observers, once."""
        if self.ended_s is None:
            self.ended_s = time.monotonic()
            self.error_type = error_type
            for observer in self.observers:
                observer.answered(self)


class RequestObserver(Protocol):
    """Is told of every request once it is over."""

    def answered(self, watch: Watch) -> None:
        """Take in a request that is over."""
        ...


class WatchedStream:
    """A choice's stream, seen by its watch."""

    def __init__(self, stream: OutputStream, watch: Watch, choice: int) -> None:
        self._stream = stream
        self._watch = watch
        self._choice = choice

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        try:
            output = await self._stream.__anext__()
        except StopAsyncIteration:
            raise
        except Exception as error:
            self._watch.end(type(error).__name__)
            raise
        self._watch.saw(self._choice, output)
        return output

    def cancel(self) -> None:
        """Give the request up."""
        self._stream.cancel()
        self._watch.end(CANCELLED)


def begin_watch(
    headers: Mapping[str, str],
    reply: Reply,
    requests: Sequence[GenerationRequest],
    observers: Sequence[RequestObserver],
) -> Watch:
    """Return the watch of a request that is about to be submitted."""
    return Watch(
        operation="chat" if reply.chat else "text_completion",
        response_id=reply.response_id,
        model=reply.model,
        requests=requests,
        observers=observers,
        trace_headers={name: headers[name] for name in TRACE_HEADERS if name in headers},
    )


def watched(streams: Sequence[OutputStream], watch: Watch) -> list[WatchedStream]:
    """Return the streams of a request's choices with `watch` listening."""
    return [WatchedStream(stream, watch, choice) for choice, stream in enumerate(streams)]
