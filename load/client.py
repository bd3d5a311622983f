"""A client that drives a server's streams and times what it sees."""

import asyncio
import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from .errors import LoadError
from .figures import Pass, Sample
from .prompts import Prompt, as_completion, cut, sessions
from .stream import json_object, read_sample
from .wire import Answer, Origin, Piece, exchange, parse_url, read_answer, request_bytes

Speculation = dict[str, str | int]
PROBE_CHARS = 8000
PROBE_TIMEOUT_S = 120.0
PREDICTION = "prediction"
"""The proposer that needs a request with a prediction."""
OFFERED = re.compile(r'^specserve_proposer_available\{.*proposer="([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself; None is unknown."""

    model: str
    max_model_len: int | None
    version: str | None
    dtype: str | None
    placement: str | None


@dataclass(frozen=True, slots=True)
class Ask:
    """How a prompt is sent; a pass asks the same for each of its prompts. `tier` None leaves the tier to the server."""

    speculation: Speculation
    max_tokens: int
    temperature: float
    tier: str | None = None


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


class Client:
    """Streams prompts to one server and times them."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        self._origin: Origin = parse_url(url)
        self._timeout_s = timeout_s

    def facts(self) -> ServerFacts:
        """Return what the server says of its model and itself. Raises LoadError when no server answers."""
        try:
            card = self._get("/v1/models")["data"][0]
            about = self._get("/version")
            return ServerFacts(
                model=str(card["id"]),
                max_model_len=card.get("max_model_len"),
                version=about.get("version"),
                dtype=about.get("dtype"),
                placement=about.get("placement"),
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise LoadError(f"The server at {self._origin.url} does not describe its model.") from error

    def proposers(self) -> tuple[str, ...]:
        """Return the names of those that may draft, as the server's metrics tell; none where they do not."""
        said = self._fetch("GET", "/metrics").body.decode(errors="replace")
        return tuple(dict.fromkeys(OFFERED.findall(said)))

    def fitted(self, found: Sequence[Prompt], facts: ServerFacts, max_tokens: int) -> tuple[Prompt, ...]:
        """Return the prompts as this model can take them.

        Chat prompts become completions when it has no chat template; those longer than `PROBE_CHARS` are cut to the
        long-prompt length in the model's own tokens, as many as its context leaves beside `max_tokens`.
        """
        if any(prompt.kind == "chat" for prompt in found) and not self._has_chat(facts.model):
            found = [as_completion(prompt) for prompt in found]
        context = facts.max_model_len or 1 << 20
        room = context - max_tokens
        if room < 1:
            raise LoadError(f"The model's context of {context} tokens has no room for {max_tokens} new ones.")
        return tuple(
            cut(prompt, self._tokens_per_char(facts.model, prompt.text[: min(PROBE_CHARS, context - 1)]), room)
            if len(prompt.text) > PROBE_CHARS
            else prompt
            for prompt in found
        )

    def run_pass(self, model: str, found: Sequence[Prompt], concurrency: int, ask: Ask) -> Pass:
        """Return the timed answers to `found`, `concurrency` of them in flight at any time. Raises LoadError.

        Those of a session are never in flight together, and share their scope in the server's caches.
        """
        salt, seeds = secrets.token_hex(8), count()
        requests = [
            [
                request_bytes(self._origin, "POST", *_body(model, prompt, ask, next(seeds), f"{salt}-{place}"))
                for prompt in group
            ]
            for place, group in enumerate(sessions(found))
        ]
        started, cpu_before = time.perf_counter(), time.process_time()
        received = asyncio.run(self._drive(requests, concurrency))
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
        samples = tuple(read_sample(pieces) for pieces in received)
        return Pass(samples, sum(sample.end_s for sample in samples) if concurrency == 1 else wall_s, cpu_s)

    def run_open(
        self, model: str, at_s: Sequence[float], found: Sequence[Prompt], asks: Sequence[Ask]
    ) -> tuple[Sample, ...]:
        """Return the timed answers to prompts sent each at its own time, whatever became of the others.

        A request's times count from when it was due, so that a late sender hides no wait. Raises LoadError.
        """
        salt = secrets.token_hex(8)
        requests = [
            request_bytes(self._origin, "POST", *_body(model, prompt, ask, seed, f"{salt}-{seed}"))
            for seed, (prompt, ask) in enumerate(zip(found, asks, strict=True))
        ]

        async def send(request: bytes, due_s: float, started_s: float) -> Sample:
            await asyncio.sleep(max(0.0, started_s + due_s - time.perf_counter()))
            late_s = time.perf_counter() - started_s - due_s
            sample = read_sample(await exchange(self._origin, request, self._timeout_s))
            arrivals_s = tuple(one + late_s for one in sample.arrivals_s)
            return replace(sample, arrivals_s=arrivals_s, end_s=sample.end_s + late_s)

        async def main() -> list[Sample]:
            started_s = time.perf_counter()
            return await asyncio.gather(*(send(*pair, started_s) for pair in zip(requests, at_s, strict=True)))

        return tuple(asyncio.run(main()))

    async def _drive(self, requests: Sequence[Sequence[bytes]], concurrency: int) -> list[list[Piece]]:
        received: list[list[list[Piece]]] = [[] for _ in requests]
        waiting = iter(enumerate(requests))

        async def work() -> None:
            for place, group in waiting:
                for request in group:
                    received[place].append(await exchange(self._origin, request, self._timeout_s))

        await asyncio.gather(*(work() for _ in range(min(concurrency, len(requests)))))
        return [pieces for group in received for pieces in group]

    def _has_chat(self, model: str) -> bool:
        asked = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        answer = self._fetch("POST", "/v1/chat/completions", asked)
        if answer.status == 400 and b"chat template" in answer.body:
            return False
        json_object(answer, "/v1/chat/completions")
        return True

    def _tokens_per_char(self, model: str, text: str) -> float:
        answer = self._fetch("POST", "/v1/completions", {"model": model, "prompt": text, "max_tokens": 1})
        return float(json_object(answer, "/v1/completions")["usage"]["prompt_tokens"]) / len(text)

    def _get(self, path: str) -> dict[str, Any]:
        return json_object(self._fetch("GET", path), path)

    def _fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        request = request_bytes(self._origin, method, path, b"" if body is None else json.dumps(body).encode())
        return read_answer(asyncio.run(exchange(self._origin, request, PROBE_TIMEOUT_S)))


def _body(model: str, prompt: Prompt, ask: Ask, seed: int, salt: str) -> tuple[str, bytes]:
    """Return the path and the body that ask for exactly `ask.max_tokens` tokens, so that cells compare.

    A new `salt` keeps prompts that an earlier pass left in the server's prefix cache from being found there.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "seed": seed,
        "ignore_eos": True,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": ask.speculation,
    }
    if ask.tier is not None:
        body["service_tier"] = ask.tier
    if prompt.prediction is not None and ask.speculation.get("proposer") == PREDICTION:
        body["prediction"] = {"type": "content", "content": prompt.prediction}
    if prompt.kind == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt.text}]
    else:
        path, body["prompt"] = "/v1/completions", prompt.text
    return path, json.dumps(body).encode()
