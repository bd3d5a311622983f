"""What an engine's rounds look like to a client: an event a round, every token counted in one of them."""

import json
from itertools import pairwise

import httpx
import pytest
from support.cells import FixedPlanner
from support.rounds import Guessing, TokenRounds, plain, started, token_engine, tokenizer

from specserve.deployments.api.app import build_api
from specserve.deployments.api.backend import AnswerStyle
from specserve.deployments.backend import EngineBackend

PROMPT = [5, 6, 7]
NUM_TOKENS = 90
GAMMA = 4


async def _warm() -> None:
    pass


@pytest.mark.asyncio
@pytest.mark.parametrize("skill", [0.0, 0.7, 1.0])
async def test_a_stream_has_at_most_one_event_a_round_and_each_counts_its_own_tokens(skill: float) -> None:
    engine = token_engine(TokenRounds(64, 4), FixedPlanner("guessing", GAMMA), [Guessing(skill)])
    async with started(engine):
        backend = EngineBackend(engine, "tiny", tokenizer(), _warm, AnswerStyle())
        backend._started = True
        body = {
            "model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        transport = httpx.ASGITransport(build_api(backend))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post("/v1/completions", json=body)
        num_rounds = engine.counters.rounds
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == tokenizer().decode(plain(PROMPT, NUM_TOKENS), skip_special_tokens=True)
    assert len(chunks) - 1 <= num_rounds
    counts = [0, *(chunk["usage"]["completion_tokens"] for chunk in chunks)]
    assert counts[-1] == NUM_TOKENS == counts[-2]
    assert all(before < after for before, after in pairwise(counts[:-1]))
    spec = chunks[-1]["metrics"]["speculative_decoding"]
    assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(spec["acceptance_histogram"]) == spec["num_spec_tokens"] + 1 <= GAMMA + 1
    # Every token but the prompt's own is either an accepted draft or what a round adds of itself.
    assert spec["num_accepted_draft_tokens"] + num_rounds == NUM_TOKENS
    if skill == 1.0:
        assert spec["draft_acceptance_rate"] == 1.0
