"""Where a request's output ends: the one function that commits tokens, shared by plain and speculating rounds."""

from dataclasses import dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from .alignment import Alignment
from .grammar import Matcher
from .messages import FinishReason, TokenLogprob
from .requests import GenerationRequest


@dataclass(slots=True)
class Output:
    """What one request has produced so far. `held_text` is not shown yet: it may turn out to begin a stop string.

    `alignment` is the output's place in the prediction, if the caller sent one.
    `matcher` is the output's place in its grammar, if it has one.
    """

    token_ids: list[int] = field(default_factory=list)
    held_text: str = ""
    finish_reason: FinishReason | None = None
    decoder: Any = field(default_factory=lambda: DecodeStream(skip_special_tokens=True))
    alignment: Alignment | None = None
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """The part of a round's tokens that became output, and the text it lets the client see."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    text: str


def commit(
    output: Output,
    request: GenerationRequest,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprob, ...],
    tokenizer: PreTrainedTokenizerFast,
    eos_token_ids: tuple[int, ...],
) -> Committed:
    """Commit `token_ids` one by one until one of them ends the request; what comes after it is dropped.

    Until `min_tokens` are there, the verifier lets no ending token appear, and stop strings are looked for from then
    on. A grammar that is complete ends the request, too; one that has no way on ends it as a full output would.
    """
    shown = ""
    ending = ending_token_ids(request, eos_token_ids)
    taken = 0
    for token_id in token_ids:
        if output.matcher is not None and not output.matcher.advance(token_id):
            output.finish_reason = "length"
            break
        output.token_ids.append(token_id)
        taken += 1
        count = len(output.token_ids)
        if token_id in ending:
            output.finish_reason = "stop"
            break
        output.held_text += output.decoder.step(tokenizer.backend_tokenizer, token_id) or ""
        stop = _first_stop(output.held_text, request.stop) if count >= request.min_tokens else None
        if stop is not None:
            output.held_text = output.held_text[:stop]
            output.finish_reason = "stop"
            break
        if output.matcher is not None and output.matcher.complete:
            output.finish_reason = "stop"
            break
        if count >= request.max_tokens:
            output.finish_reason = "length"
            break
        free = len(output.held_text) - _possible_stop(output.held_text, request.stop)
        shown += output.held_text[:free]
        output.held_text = output.held_text[free:]
    if output.finish_reason is not None:
        shown += output.held_text
        output.held_text = ""
    if output.alignment is not None:
        output.alignment.extend(token_ids[:taken])
    return Committed(token_ids[:taken], logprobs[:taken], shown)


def ending_token_ids(request: GenerationRequest, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that end `request`."""
    return request.stop_token_ids if request.ignore_eos else (*request.stop_token_ids, *eos_token_ids)


def _first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Return where the earliest stop string in `text` begins."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(found) if found else None


def _possible_stop(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that begins a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
