"""The answer to one HTTP request as it grows: rounds' outputs go in, OpenAI's objects come out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedTokenizerFast

from specserve.service.messages import FinishReason
from specserve.service.requests import GenerationRequest, RequestSummary, StepOutput

from .logprobs import Scored, chat_logprobs, completion_logprobs
from .metrics import PredictionUse, metrics, usage
from .tools import CallReader

VERSION = version("specserve")


@dataclass(slots=True)
class Choice:
    """One choice so far. `unsent` are scored tokens whose text has not gone out yet; it goes with theirs.

    `echo` is the prompt's text until it has gone out before the first output's.
    """

    request: GenerationRequest
    echo: str = ""
    text: str = ""
    num_tokens: int = 0
    unsent: Scored = field(default_factory=Scored)
    text_offset: int = 0
    role_sent: bool = False
    finish_reason: FinishReason | None = None
    calls: CallReader | None = None
    summary: RequestSummary | None = None

    def add(self, output: StepOutput) -> str:
        """Take one round's output in and return the text it adds."""
        text, self.echo = self.echo + output.text, ""
        self.text += text
        self.num_tokens += len(output.token_ids)
        if self.request.num_logprobs is not None:
            self.unsent += Scored(output.token_ids, output.logprobs)
        self.finish_reason = output.finish_reason
        self.summary = output.summary or self.summary
        return text

    @property
    def shown_reason(self) -> str | None:
        """The finish reason as the client sees it: `tool_calls` when the answer ended by itself and has calls."""
        called = self.calls is not None and bool(self.calls.calls)
        return "tool_calls" if called and self.finish_reason == "stop" else self.finish_reason


@dataclass(slots=True)
class Reply:
    """One response: `num_choices` (OpenAI's `n`) choices for each prompt, those of a prompt together."""

    chat: bool
    response_id: str
    created: int
    model: str
    tokenizer: PreTrainedTokenizerFast
    num_choices: int
    include_usage: bool
    continuous_usage: bool
    count_rejected_predictions: bool = False
    reads_calls: bool = False
    choices: list[Choice] = field(default_factory=list)

    def expect(self, requests: Sequence[GenerationRequest], echoes: Sequence[str] = ()) -> None:
        """Make one choice for each request, which begins with its echo where there are any."""
        begun = echoes or [""] * len(requests)
        self.choices = [Choice(request, echo) for request, echo in zip(requests, begun, strict=True)]
        for choice in self.choices:
            choice.calls = CallReader() if self.reads_calls else None

    @property
    def finished(self) -> bool:
        """True when every choice has its finish reason."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts and of the output so far."""
        return int(self._usage()["total_tokens"])

    def add(self, index: int, output: StepOutput) -> None:
        """Take one round's output of one choice in, for an answer sent as a whole."""
        self.choices[index].add(output)

    def chunk(self, index: int, output: StepOutput) -> dict[str, Any] | None:
        """Take one round's output in and return its chunk; None when there is nothing to show yet."""
        choice = self.choices[index]
        calls: list[dict[str, Any]] = []
        text = choice.add(output)
        if choice.calls is not None:
            text, calls = choice.calls.read(text, output.finish_reason is not None)
        if not text and not calls and output.finish_reason is None:
            return None
        part: dict[str, Any] = {"index": index}
        if self.chat:
            delta: dict[str, Any] = {} if choice.role_sent else {"role": "assistant", "content": ""}
            delta |= {"content": text} if text else {}
            part["delta"] = delta | ({"tool_calls": calls} if calls else {})
            choice.role_sent = True
        else:
            part["text"] = text
        part |= {"logprobs": self._logprobs(choice), "finish_reason": choice.shown_reason}
        chunk = self._head(stream=True) | {"choices": [part]}
        if output.finish_reason is not None:
            chunk["service_tier"] = self._tier()
        if self.continuous_usage:
            chunk["usage"] = self._usage()
        elif self.include_usage:
            chunk["usage"] = None
        if self.finished and not self.include_usage:
            chunk["metrics"] = self._metrics()
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk after the last choice: no choices, the usage and the metrics."""
        tail: dict[str, Any] = {
            "choices": [],
            "service_tier": self._tier(),
            "usage": self._usage(),
            "metrics": self._metrics(),
        }
        return self._head(stream=True) | tail

    def whole(self) -> dict[str, Any]:
        """Return the response of a request that did not ask for a stream."""
        parts = []
        for index, choice in enumerate(self.choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.calls is not None:
                choice.calls.read(choice.text, True)
                called = [{key: value for key, value in call.items() if key != "index"} for call in choice.calls.calls]
                message["content"] = choice.calls.content or (None if called else "")
                message |= {"tool_calls": called} if called else {}
            content = {"message": message} if self.chat else {"text": choice.text}
            end = {"logprobs": self._logprobs(choice), "finish_reason": choice.shown_reason}
            parts.append({"index": index, **content, **end})
        return self._head(stream=False) | {"choices": parts} | self._tail()

    def _tail(self) -> dict[str, Any]:
        return {"service_tier": self._tier(), "usage": self._usage(), "metrics": self._metrics()}

    def _head(self, stream: bool) -> dict[str, Any]:
        chat_kind = "chat.completion.chunk" if stream else "chat.completion"
        return {
            "id": self.response_id,
            "object": chat_kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"specserve-{VERSION}",
        }

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if choice.request.num_logprobs is None:
            return None
        scored, choice.unsent = choice.unsent, Scored()
        if self.chat:
            return chat_logprobs(scored, self.tokenizer)
        shape, choice.text_offset = completion_logprobs(scored, self.tokenizer, choice.text_offset)
        return shape

    def _usage(self) -> dict[str, Any]:
        """A prompt counts once however many choices it has; every choice's output counts."""
        prompts = self.choices[:: self.num_choices]
        prediction = self._prediction_use()
        rejected = prediction.rejected if prediction is not None and self.count_rejected_predictions else 0
        return usage(
            sum(len(choice.request.prompt_token_ids) for choice in prompts),
            sum(choice.num_tokens for choice in self.choices) + rejected,
            sum(choice.summary.cached_tokens for choice in prompts if choice.summary is not None),
            prediction,
        )

    def _prediction_use(self) -> PredictionUse | None:
        """Return what became of the prediction's tokens; None before the end, and when there was none."""
        accepted = rejected = 0
        for choice in self.choices:
            predicted = choice.request.prediction_token_ids
            if predicted is None or choice.summary is None:
                return None
            appeared = choice.summary.accepted_prediction_tokens
            assert appeared is not None
            accepted += appeared
            rejected += len(predicted) - appeared
        return PredictionUse(accepted, rejected)

    def _metrics(self) -> dict[str, Any] | None:
        summary = self.choices[0].summary
        return None if summary is None else metrics(summary, len(self.choices))

    def _tier(self) -> str:
        """Return the tier that served: what the engine says once it is known, else what was asked for."""
        first = self.choices[0]
        return first.request.tier if first.summary is None else first.summary.tier
