"""Reading a recorded answer: JSON objects, and the server-sent events of a stream."""

import json
from collections.abc import Sequence
from typing import Any

from .errors import LoadError
from .figures import Sample
from .wire import Answer, Piece, lines, read_answer


def json_object(answer: Answer, path: str) -> dict[str, Any]:
    """Return the JSON object of a 200. Raises LoadError with what the server said otherwise."""
    if answer.status != 200:
        raise LoadError(f"The server answered {answer.status} to {path}: {answer.body.decode(errors='replace')[:300]}")
    try:
        found = json.loads(answer.body)
    except ValueError as error:
        raise LoadError(f"The server's answer to {path} is not JSON.") from error
    if not isinstance(found, dict):
        raise LoadError(f"The server's answer to {path} is not an object.")
    return found


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of one server-sent-event line; None for blanks, comments and the end marker."""
    payload = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
    if payload in (b"", b"[DONE]"):
        return None
    try:
        event: dict[str, Any] = json.loads(payload)
    except ValueError as error:
        raise LoadError("A stream broke off in the middle of an event.") from error
    if "error" in event:
        raise LoadError(f"The server broke off a stream: {event['error'].get('message', event['error'])}")
    return event


def event_text(event: dict[str, Any]) -> str:
    """Return the text that a chunk of either endpoint adds."""
    return "".join(
        (choice.get("delta", {}).get("content") or "") + (choice.get("text") or "") for choice in event["choices"]
    )


def read_sample(received: Sequence[Piece]) -> Sample:
    """Return what one recorded stream says. Raises LoadError for a refusal or a stream that broke off."""
    answer = read_answer(received)
    if answer.status != 200:
        json_object(answer, "a prompt")
    arrivals: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] | None = None
    drafting: dict[str, Any] = {}
    for at_s, line in lines(answer.pieces):
        event = parse_event(line)
        if event is None:
            continue
        text = event_text(event)
        if text:
            arrivals.append(at_s)
            texts.append(text)
        usage = event.get("usage") or usage
        drafting = (event.get("metrics") or {}).get("speculative_decoding") or drafting
    if usage is None:
        raise LoadError("A stream ended without its usage, so its tokens cannot be counted; did the server die?")
    return Sample(
        arrivals_s=tuple(arrivals),
        end_s=received[-1][0],
        num_tokens=usage["completion_tokens"],
        num_accepted=drafting.get("num_accepted_draft_tokens"),
        num_drafted=drafting.get("num_draft_tokens"),
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        text="".join(texts),
    )
