"""A thousand JSON schemas, temperature 1, speculation on: `python tests/structured_thousand.py` prints what came."""

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, settings
from support.schemas import schemas

from specserve import LLM
from specserve.service.messages import Sampling

COUNT = 1000
MAX_TOKENS = 400


def drawn() -> list[Any]:
    """Return the schemas, the same ones in every run."""
    found: list[Any] = []

    @settings(
        max_examples=COUNT // 4 + 40, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(batch=schemas(4))
    def draw(batch: list[Any]) -> None:
        found.extend(batch)

    draw()
    assert len(found) >= COUNT
    return found[:COUNT]


def main() -> None:
    """Generate, validate and count; an answer cut by `MAX_TOKENS` is counted apart."""
    ends: Counter[str] = Counter()
    drafted = accepted = tokens = 0
    with LLM(policy="fixed:4") as llm, ThreadPoolExecutor(8) as clients:

        def answer(numbered: tuple[int, Any]) -> Any:
            place, schema = numbered
            sampling = Sampling(greedy=False, temperature=1.0, seed=place)
            return llm.generate(
                ["Answer in JSON:\n"], max_tokens=MAX_TOKENS, sampling=sampling, mode="on", schema=schema
            )[0]

        everything = drawn()
        started = time.monotonic()
        for schema, done in zip(everything, clients.map(answer, enumerate(everything)), strict=True):
            end = done.finish_reason
            if end == "stop":
                try:
                    jsonschema.validate(json.loads(done.text), schema)
                    end = "valid"
                except (ValueError, jsonschema.ValidationError) as error:
                    end = "invalid"
                    print(json.dumps(schema), repr(done.text), str(error).splitlines()[0])
            ends[end] += 1
            tokens += done.summary.completion_tokens
            drafted += done.summary.num_draft_tokens
            accepted += done.summary.num_accepted_tokens
        took_s = time.monotonic() - started
    print(f"{dict(ends)} in {took_s:.0f} s: {tokens} tokens, {drafted} drafted, {accepted} accepted")


if __name__ == "__main__":
    main()
