"""Shapes of whole answers, what reaches the backend, and the metrics."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.deployments.api.backend import AnswerStyle
from specserve.deployments.api.logprobs import Scored, chat_logprobs
from specserve.deployments.api.metrics import metrics
from specserve.service.messages import Sampling, TokenLogprob
from specserve.service.requests import GenerationRequest, StepOutput
from specserve.service.running import RequestStream, Running

CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "org/tiny", "prompt": "hi"}


@pytest.mark.asyncio
async def test_a_completion_has_openai_shape_usage_and_metrics(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine"})
    body = response.json()
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "mine"
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "org/tiny"
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert body["service_tier"] == "default"
    assert body["metrics"]["speculation"] == {
        "mode": "auto", "reason": "policy", "proposer": "ngram", "tier": "default", "policy_version": 7,
    }  # fmt: skip
    assert body["metrics"]["mean_itl_ms"] == 7.5
    assert body["metrics"]["tokens_per_second"] == 125.0


@pytest.mark.asyncio
async def test_a_chat_message_has_role_content_and_refusal(client: httpx.AsyncClient, backend: Any) -> None:
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = (await client.post("/v1/chat/completions", json={"model": "org/tiny", "messages": messages})).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert backend.tokenizer.decode(backend.submitted[0].prompt_token_ids) == "s:beu:a\nb>"
    assert backend.submitted[0].max_tokens == 64 - len("s:beu:a\nb>")


@pytest.mark.asyncio
@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "block"])
async def test_every_acceptance_rule_reaches_the_backend(
    client: httpx.AsyncClient, backend: Any, acceptance: str
) -> None:
    fields = {"temperature": 0.7, "speculation": {"acceptance": acceptance}}
    assert (await client.post("/v1/completions", json=TEXT | fields)).status_code == 200
    assert backend.submitted[0].sampling.acceptance == acceptance


@pytest.mark.asyncio
async def test_every_field_reaches_the_backend(client: httpx.AsyncClient, backend: Any) -> None:
    fields = {
        "max_tokens": 9, "max_completion_tokens": 8, "min_tokens": 2, "temperature": 0, "top_p": 0.5, "top_k": 3,
        "min_p": 0.25, "seed": -1, "stop": "x", "stop_token_ids": [7], "ignore_eos": True, "logprobs": 2,
        "service_tier": "fast", "prompt": [1, 2, 3], "priority": -3, "cache_salt": "tenant",
        "repetition_penalty": 1.25, "presence_penalty": -0.5, "frequency_penalty": 2, "logit_bias": {"9": -100, "2": 1},
        "speculation": {"mode": "on", "max_draft_tokens": 4, "proposer": "ngram", "acceptance": "rejection"},
    }  # fmt: skip
    assert (await client.post("/v1/completions", json=TEXT | fields)).status_code == 200
    (request,) = backend.submitted
    sampling = request.sampling
    assert (request.max_tokens, request.min_tokens, request.prompt_token_ids) == (8, 2, (1, 2, 3))
    assert (request.stop, request.stop_token_ids, request.ignore_eos, request.num_logprobs) == (("x",), (7,), True, 2)
    assert (request.tier, request.mode, request.max_draft_tokens, request.proposer) == ("priority", "on", 4, "ngram")
    assert (request.priority, request.cache_salt) == (-3, "tenant")
    assert sampling.greedy
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (3, 0.5, 0.25)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.25, -0.5, 2.0)
    assert sampling.logit_bias == ((2, 1.0), (9, -100.0))
    assert sampling.seed == 2**63 - 1
    assert sampling.acceptance == "rejection"


@pytest.mark.asyncio
async def test_defaults_are_openais_and_the_seed_is_fresh(client: httpx.AsyncClient, backend: Any) -> None:
    for _ in range(2):
        await client.post("/v1/completions", json=TEXT | {"temperature": None, "speculation": None})
    first, second = backend.submitted
    assert first.max_tokens == 16
    assert first.tier == "default"
    assert (first.priority, first.cache_salt) == (0, "")
    assert first.mode == "auto"
    assert not first.sampling.greedy
    assert first.sampling.temperature == 1.0
    assert first.sampling.acceptance == "coupled"
    assert first.sampling.seed != second.sampling.seed
    assert 0 <= first.sampling.seed < 2**63


@pytest.mark.asyncio
async def test_n_and_several_prompts_make_choices_in_order(client: httpx.AsyncClient, backend: Any) -> None:
    many = TEXT | {"prompt": ["a", "bc"], "n": 2, "seed": 5}
    body = (await client.post("/v1/completions", json=many)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [len(request.prompt_token_ids) for request in backend.submitted] == [1, 1, 2, 2]
    seeds = [request.sampling.seed for request in backend.submitted]
    assert seeds[0] == 5
    assert seeds[:2] == seeds[2:]
    assert seeds[1] != 5
    assert len({request.request_id for request in backend.submitted}) == 4
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 20
    assert body["metrics"]["speculative_decoding"] is None


@pytest.mark.asyncio
async def test_without_a_seed_no_two_choices_share_their_noise(client: httpx.AsyncClient, backend: Any) -> None:
    await client.post("/v1/completions", json=TEXT | {"prompt": ["a", "a"], "n": 2})
    assert len({request.sampling.seed for request in backend.submitted}) == 4


@pytest.mark.asyncio
async def test_a_temperature_too_small_for_float32_is_greedy(client: httpx.AsyncClient, backend: Any) -> None:
    for temperature in (1e-6, 1e-4):
        await client.post("/v1/completions", json=TEXT | {"temperature": temperature})
    assert [(r.sampling.greedy, r.sampling.temperature) for r in backend.submitted] == [(True, 1.0), (False, 1e-4)]


@pytest.mark.asyncio
@pytest.mark.parametrize("prompt", ["hi", list(b"ij"), ["a", "bc"]])
async def test_echo_puts_the_prompt_before_every_choice(
    client: httpx.AsyncClient, backend: Any, prompt: str | list[int] | list[str]
) -> None:
    fields = TEXT | {"prompt": prompt, "echo": True, "n": 2}
    body = (await client.post("/v1/completions", json=fields)).json()
    prompts = [backend.tokenizer.decode(request.prompt_token_ids) for request in backend.submitted]
    assert [choice["text"] for choice in body["choices"]] == [text + "Hello" for text in prompts]
    assert prompts[::2] == prompts[1::2]
    assert body["usage"]["completion_tokens"] == 5 * len(prompts)
    shown = [""] * len(prompts)
    async with client.stream("POST", "/v1/completions", json=fields | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    shown[choice["index"]] += choice["text"]
    assert shown == [text + "Hello" for text in prompts]


@pytest.mark.asyncio
async def test_logprobs_have_both_shapes(client: httpx.AsyncClient) -> None:
    text = (await client.post("/v1/completions", json=TEXT | {"logprobs": 2})).json()["choices"][0]["logprobs"]
    assert text["tokens"] == list("Hello")
    assert text["text_offset"] == [0, 1, 2, 3, 4]
    assert text["token_logprobs"] == [-0.5] * 5
    assert text["top_logprobs"][0] == {"H": -0.5, '"': -9999.0}
    chat = (await client.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 2})).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("Hello")
    assert content[0]["bytes"] == [72]
    assert content[0]["top_logprobs"][0] == {"token": "H", "logprob": -0.5, "bytes": [72]}


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [0, 1, 20])
async def test_as_many_others_as_asked_for_come_with_each_token(
    client: httpx.AsyncClient, backend: Any, script: SimpleNamespace, count: int
) -> None:
    others = tuple((40 + place, -float(place)) for place in range(count))
    scored = StepOutput("Hi", tuple(b"Hi"), (TokenLogprob(-0.5, others),) * 2)
    backend.script = lambda request: [scored, script.end(request, 2)]
    text = (await client.post("/v1/completions", json=TEXT | {"logprobs": count})).json()["choices"][0]["logprobs"]
    asked = CHAT | {"logprobs": True, "top_logprobs": count}
    chat = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]["logprobs"]["content"]
    assert [request.num_logprobs for request in backend.submitted] == [count, count]
    assert [len(entry["top_logprobs"]) for entry in chat] == [count, count]
    assert [len(top) for top in text["top_logprobs"]] == [count + 1, count + 1]  # the token itself is always there


def test_a_part_of_a_character_keeps_its_bytes(script: SimpleNamespace) -> None:
    ids = tuple(script.tokenizer.encode("é"))
    shape = chat_logprobs(Scored(ids, (TokenLogprob(-1.0, ()),) * 2), script.tokenizer)
    assert [entry["bytes"] for entry in shape["content"]] == [[0xC3], [0xA9]]


ROUNDS = st.lists(st.integers(0, 8).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))))


@given(ROUNDS)
def test_the_metrics_of_whatever_rounds_pass_aiperfs_checks(rounds: list[tuple[int, int]]) -> None:
    request = GenerationRequest("r", (1,), Sampling(), 1000)
    running = Running(request, RequestStream("r"), 0.0, [1])
    for drafted, accepted in rounds:
        running.observe("adaptive", "draft" if drafted else None, drafted, accepted)
    spec = metrics(running.summary(1.0, 1), 1)["speculative_decoding"]
    counts = spec["acceptance_histogram"]
    speculating = [one for one in rounds if one[0]]
    assert len(counts) == spec["num_spec_tokens"] + 1
    assert spec["num_spec_tokens"] == max([drafted for drafted, _ in rounds], default=0)
    assert sum(counts) == spec["num_spec_steps"] == len(speculating)
    assert sum(k * count for k, count in enumerate(counts)) == spec["num_accepted_draft_tokens"]
    assert spec["num_accepted_draft_tokens"] <= spec["num_draft_tokens"] == sum(drafted for drafted, _ in rounds)
    if speculating:
        assert spec["mean_acceptance_length"] == 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
        assert spec["draft_acceptance_rate"] == spec["num_accepted_draft_tokens"] / spec["num_draft_tokens"]
    else:
        assert spec["mean_acceptance_length"] is None
        assert spec["draft_acceptance_rate"] is None


PREDICTION = {"type": "content", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "p me"}]}


@pytest.mark.asyncio
async def test_usage_tells_what_became_of_the_prediction_and_only_where_there_was_one(
    client: httpx.AsyncClient, backend: Any
) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        usage = (await client.post(path, json=body | {"prediction": PREDICTION, "n": 2})).json()["usage"]
        assert backend.tokenizer.decode(backend.submitted[-1].prediction_token_ids) == "Help me"
        assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 8}
        assert usage["completion_tokens"] == 10
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert "completion_tokens_details" not in (await client.post(path, json=body)).json()["usage"]


@pytest.mark.asyncio
async def test_rejected_prediction_tokens_count_as_openai_bills_them_where_the_operator_says_so(
    client: httpx.AsyncClient, backend: Any
) -> None:
    backend.style = AnswerStyle(count_rejected_predictions=True)
    usage = (await client.post("/v1/completions", json=TEXT | {"prediction": PREDICTION})).json()["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (5 + 4, 2 + 5 + 4)
    assert (await client.post("/v1/completions", json=TEXT)).json()["usage"]["completion_tokens"] == 5


@pytest.mark.asyncio
async def test_models_health_ready_and_version(client: httpx.AsyncClient, backend: Any) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["id"] == "org/tiny"
    assert card["max_model_len"] == 64
    assert (await client.get("/v1/models/org/tiny")).json() == card
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 200
    about = (await client.get("/version")).json()
    assert about["version"]
    assert {"model", "dtype", "placement"} <= set(about)
    backend.ready = False
    assert (await client.get("/health")).status_code == 200
    for response in (await client.get("/ready"), await client.post("/v1/completions", json=TEXT)):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "not_ready"
    assert not backend.submitted


@pytest.mark.asyncio
async def test_an_unknown_field_is_ignored_with_one_warning(
    client: httpx.AsyncClient, backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (await client.post("/v1/completions", json=TEXT | {"novel": 1, "user": "u"})).status_code == 200
    assert [record.getMessage() for record in caplog.records] == ["ignoring the unknown request field 'novel'"]
