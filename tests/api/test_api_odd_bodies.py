"""Bodies that a fuzzer found the surface to stumble over."""

import asyncio
import json
from threading import Event
from typing import Any

import pytest

from specserve.deployments.api import reading

CALL: Any = {"model": "org/tiny", "prompt": "hi", "max_tokens": 4}


@pytest.mark.asyncio
async def test_a_top_k_beyond_the_vocabulary_is_the_whole_vocabulary(client: Any, backend: Any) -> None:
    for top_k in (2**64, 10**30):
        assert (await client.post("/v1/completions", json=CALL | {"top_k": top_k})).status_code == 200
    assert [request.sampling.top_k for request in backend.submitted] == [backend.vocab_size] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("field", ["\ud800", "speculation", "messages"])
async def test_a_name_that_is_no_text_can_be_said_in_the_refusal(client: Any, field: str) -> None:
    body = CALL | {field: {"\ud800": "\ud800"}}
    response = await client.post("/v1/completions", content=json.dumps(body))
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.asyncio
async def test_too_many_prompts_are_refused_before_any_is_tokenized(
    client: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(backend.tokenizer), "encode", None)
    response = await client.post("/v1/completions", json=CALL | {"prompt": ["x"] * 129})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.asyncio
async def test_a_prediction_longer_than_any_output_is_refused_before_it_is_tokenized(
    client: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(backend.tokenizer), "encode", None)
    content = "x" * (backend.max_model_len * 128 + 1)
    prediction = {"type": "content", "content": content}
    for body in (CALL, CALL | {"prompt": [1]}):
        response = await client.post("/v1/completions", json=body | {"prediction": prediction})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prediction")


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_while_a_long_prompt_is_tokenized_others_are_answered(
    client: Any, backend: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun, go_on = Event(), Event()
    encode = backend.tokenizer.encode

    def stuck(text: str, **options: Any) -> Any:
        if len(text) >= reading.LONG_CHARS:
            begun.set()
            assert go_on.wait(20)
        return encode(text, **options)

    monkeypatch.setattr(backend.tokenizer, "encode", stuck)
    text = "x" * reading.LONG_CHARS
    body = {"model": "org/tiny", "prompt": text}
    if path == "/v1/chat/completions":
        body = {"model": "org/tiny", "messages": [{"role": "user", "content": text}]}
    long = asyncio.create_task(client.post(path, json=body))
    assert await asyncio.to_thread(begun.wait, 20)
    assert (await client.post("/v1/completions", json=CALL)).status_code == 200
    assert not long.done()
    go_on.set()
    assert (await long).status_code == (200 if path == "/tokenize" else 400)
