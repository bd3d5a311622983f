"""What an answer must be, whatever was asked: OpenAI's shapes, whole streams, counters that agree."""

import json
from collections.abc import Iterator
from typing import Any

from .visiting import Heard, Shot

BUSY = (429, 503)
_ERROR_KEYS = {"message", "type", "param", "code"}


def faults(shot: Shot, heard: Heard) -> Iterator[str]:
    """Yield what is wrong with an answer; nothing is expected by a client that has left or speaks no HTTP.

    A proxy may take half a connection for a broken one.
    """
    if heard.timed_out:
        yield "no end of the answer"
        return
    if shot.manner == "leave":
        return
    if heard.status is None:
        if shot.manner != "half_close" and not shot.malformed:
            yield "no answer"
        return
    if not heard.ended and shot.manner != "half_close":
        yield "the answer breaks off"
        return
    if shot.malformed or (shot.manner == "half_close" and (not heard.ended or heard.status != 200)):
        if heard.status >= 500 and "retry-after" not in heard.headers:
            yield f"status {heard.status}"
        return
    yield from _judged(shot, heard)


def _judged(shot: Shot, heard: Heard) -> Iterator[str]:
    status = heard.status
    assert status is not None
    if status >= 400:
        if not shot.is_head:
            yield from error_faults(status, heard)
        if shot.valid and status not in BUSY:
            yield f"a valid request is refused with {status}"
    elif shot.is_head:
        if heard.body:
            yield "a body for HEAD"
    elif heard.headers.get("content-type", "").startswith("text/event-stream"):
        yield from _stream_faults(heard.body)
    elif b'"choices"' in heard.body[:500]:
        yield from answer_faults(json.loads(heard.body))


def error_faults(status: int, heard: Heard) -> Iterator[str]:
    """Yield what is wrong with a refusal."""
    if status == 503 and "retry-after" not in heard.headers:
        yield "503 without Retry-After"
    try:
        found = json.loads(heard.body)
        error = found["error"]
        right = set(found) == {"error"} and set(error) == _ERROR_KEYS and isinstance(error["message"], str)
        right &= bool(error["message"]) and isinstance(error["type"], str)
        right &= all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
    except (ValueError, TypeError, KeyError):
        right, error = False, {"code": None}
    if not right:
        yield f"status {status} with no OpenAI error"
    if status >= 500 and (status, error["code"]) != (503, "overloaded"):
        yield f"status {status}"


def _stream_faults(body: bytes) -> Iterator[str]:
    lines = [line for line in body.decode().split("\n") if line and not line.startswith(":")]
    if not all(line.startswith("data: ") for line in lines):
        yield "a stream has a line that is no event"
        return
    payloads = [line.removeprefix("data: ") for line in lines]
    if payloads.count("[DONE]") != 1 or payloads[-1] != "[DONE]":
        yield "a stream without one [DONE] at its end"
    events: list[dict[str, Any]] = [json.loads(one) for one in payloads if one != "[DONE]"]
    if any("error" in event for event in events):
        yield "a stream with an error"
        return
    ends: dict[int, int] = {}
    for event in events:
        for choice in event["choices"]:
            if ends.get(choice["index"]):
                yield "a choice goes on after its end"
            ends[choice["index"]] = ends.get(choice["index"], 0) + (choice["finish_reason"] is not None)
    if any(count != 1 for count in ends.values()):
        yield "a choice without one end"
    for event in events:
        if event.get("metrics"):
            yield from metrics_faults(event["metrics"], event.get("usage"))
    if sum(bool(event.get("metrics")) for event in events) != 1:
        yield "a stream without one object of metrics"


def answer_faults(answer: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a whole answer."""
    choices = answer["choices"]
    if [choice["index"] for choice in choices] != list(range(len(choices))):
        yield "choices are not numbered"
    if not all(choice["finish_reason"] in ("stop", "length") for choice in choices):
        yield "a choice without an end"
    scored = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    counts = [len(one["content"] if "content" in one else one["tokens"]) for one in scored]
    if scored and sum(counts) != answer["usage"]["completion_tokens"]:
        yield "logprobs are not one for each token"
    yield from metrics_faults(answer["metrics"], answer["usage"])


def metrics_faults(metrics: dict[str, Any], usage: dict[str, Any] | None) -> Iterator[str]:
    """Yield which of AIPerf's identities do not hold."""
    if usage is not None:
        if usage["prompt_tokens"] + usage["completion_tokens"] != usage["total_tokens"]:
            yield "usage does not add up"
        if not 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]:
            yield "more prompt tokens are cached than can be"
    found = metrics["speculative_decoding"]
    if found is None:
        return
    histogram, rounds = found["acceptance_histogram"], found["num_spec_steps"]
    accepted, drafted = found["num_accepted_draft_tokens"], found["num_draft_tokens"]
    if sum(histogram) != rounds and (rounds or histogram != [0]):
        yield "the histogram does not add up to the rounds"
    if sum(place * count for place, count in enumerate(histogram)) != accepted or accepted > drafted:
        yield "the histogram does not add up to the accepted tokens"
    if len(histogram) != found["num_spec_tokens"] + 1:
        yield "the histogram has other places than draft lengths"
    if rounds and found["mean_acceptance_length"] != 1 + accepted / rounds:
        yield "the mean acceptance length is not 1 + accepted / rounds"
    if usage is not None and accepted > usage["completion_tokens"] + found["num_spec_tokens"]:
        yield "more was accepted than written"
