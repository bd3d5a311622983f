"""A streaming client that times what it sees."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

from .figures import Sample
from .prompts import Prompt

Speculation = dict[str, str | int]


class LoadError(Exception):
    """The server cannot be measured; the message is one sentence."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def speculation(mode: str, proposer: str | None = None) -> Speculation:
    """Return the `speculation` field that asks for `plain`, `fixed:N` or `adaptive`. Raises LoadError otherwise."""
    if mode == "plain":
        return {"mode": "off"}
    if mode == "adaptive":
        chosen: Speculation = {"mode": "auto"}
    elif mode.startswith("fixed:") and mode.removeprefix("fixed:").isdecimal():
        chosen = {"mode": "on", "max_draft_tokens": int(mode.removeprefix("fixed:"))}
    else:
        raise LoadError(f"A mode is plain, fixed:N or adaptive, not {mode!r}.")
    return chosen if proposer is None else {**chosen, "proposer": proposer}


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the JSON object of one server-sent-event line; None for blanks, comments and the end marker."""
    if not line.startswith("data:"):
        return None
    payload = line.removeprefix("data:").strip()
    if payload in ("", "[DONE]"):
        return None
    event: dict[str, Any] = json.loads(payload)
    if "error" in event:
        raise LoadError(f"The server broke off a stream: {event['error'].get('message', event['error'])}")
    return event


def event_text(event: dict[str, Any]) -> str:
    """Return the text that a chunk of either endpoint adds."""
    return "".join(
        (choice.get("delta", {}).get("content") or "") + (choice.get("text") or "") for choice in event["choices"]
    )


def num_accepted(event: dict[str, Any]) -> int | None:
    """Return the accepted draft tokens that a chunk's metrics report; None when it has none."""
    found = (event.get("metrics") or {}).get("speculative_decoding")
    return None if found is None else found["num_accepted_draft_tokens"]


class Client:
    """Streams prompts, greedy, and times them; safe to use from several threads."""

    def __init__(self, url: str, timeout_s: float = 300.0) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout_s)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def model_id(self) -> str:
        """Return the id of the first model served."""
        try:
            answer = self._http.get("/v1/models")
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise LoadError(
                f"No server answers at {self._http.base_url} ({error}); start one with `specserve serve`."
            ) from error
        return str(answer.json()["data"][0]["id"])

    def stream(self, model: str, prompt: Prompt, max_tokens: int, wanted: Speculation) -> Sample:
        """Return the timed answer to one prompt. Raises LoadError when the server refuses or breaks off."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": wanted,
        }
        if prompt.kind == "chat":
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt.text}]
        else:
            path, body["prompt"] = "/v1/completions", prompt.text
        started = time.perf_counter()
        try:
            with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise LoadError(f"The server answered {answer.status_code} to {path}: {answer.text[:300]}")
                return _timed(answer.iter_lines(), started)
        except httpx.HTTPError as error:
            raise LoadError(f"The stream from {path} failed: {error!r}") from error


def _timed(lines: Iterator[str], started: float) -> Sample:
    arrivals: list[float] = []
    num_tokens: int | None = None
    accepted: int | None = None
    for line in lines:
        event = parse_event(line)
        if event is None:
            continue
        if event_text(event):
            arrivals.append(time.perf_counter() - started)
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
        found = num_accepted(event)
        accepted = accepted if found is None else found
    if num_tokens is None:
        raise LoadError("The server sent no usage, so its tokens cannot be counted.")
    return Sample(tuple(arrivals), time.perf_counter() - started, num_tokens, accepted)
