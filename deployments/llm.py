"""The offline interface: a whole cell in this process, driven by plain calls."""

import asyncio
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from specserve.service.json_schema import json_grammar
from specserve.service.messages import Sampling
from specserve.service.requests import GenerationRequest, RequestSummary, SpeculationMode, StepOutput

from .cell import inline_backend
from .settings import ServiceSettings


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    summary: RequestSummary


class LLM:
    """Generates completions with target, verifier and proposers in this process.

    Example: `LLM(policy="adaptive").generate(["def add(a, b):"], max_tokens=32)[0].text`
    """

    def __init__(self, model: str | None = None, *, settings: ServiceSettings | None = None, **changes: object) -> None:
        base = settings if settings is not None else ServiceSettings(placement="inline")
        self.settings = ServiceSettings.model_validate({**base.model_dump(), "placement": "inline", **changes})
        if model is not None:
            self.settings = self.settings.model_copy(update={"model": model})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        self.backend = inline_backend(self.settings)
        asyncio.run_coroutine_threadsafe(self.backend.start(), self._loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and its thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self.backend.engine.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int = 64,
        sampling: Sampling | None = None,
        mode: SpeculationMode = "auto",
        max_draft_tokens: int | None = None,
        proposer: str | None = None,
        stop: tuple[str, ...] = (),
        ignore_eos: bool = False,
        prediction: str | None = None,
        schema: dict[str, Any] | None = None,
    ) -> list[Completion]:
        """Return one completion per prompt, in order; all of them decode together.

        `prediction` is the text that the completions are expected to be, `schema` the JSON schema they must follow.
        """
        chosen = sampling if sampling is not None else Sampling()
        predicted = None
        if prediction is not None:
            predicted = tuple(self.backend.tokenizer.encode(prediction, add_special_tokens=False))
        grammar = None if schema is None else json_grammar(schema, "schema")
        requests = [
            GenerationRequest(
                request_id=f"llm-{uuid.uuid4().hex}",
                prompt_token_ids=tuple(self.backend.tokenizer(prompt)["input_ids"]),
                sampling=chosen,
                max_tokens=max_tokens,
                mode=mode,
                max_draft_tokens=max_draft_tokens,
                proposer=proposer,
                stop=stop,
                ignore_eos=ignore_eos,
                prediction_token_ids=predicted,
                grammar=grammar,
            )
            for prompt in prompts
        ]
        outputs = asyncio.run_coroutine_threadsafe(self._generate(requests), self._loop).result()
        return [_completion(prompt, steps) for prompt, steps in zip(prompts, outputs, strict=True)]

    async def _generate(self, requests: list[GenerationRequest]) -> list[list[StepOutput]]:
        streams = [self.backend.submit(request) for request in requests]

        async def collect(index: int) -> list[StepOutput]:
            return [step async for step in streams[index]]

        return list(await asyncio.gather(*(collect(index) for index in range(len(streams)))))


def _completion(prompt: str, steps: list[StepOutput]) -> Completion:
    last = steps[-1]
    assert last.summary is not None
    assert last.finish_reason is not None
    text = "".join(step.text for step in steps)
    token_ids = tuple(token_id for step in steps for token_id in step.token_ids)
    return Completion(prompt, text, token_ids, last.finish_reason, last.summary)
