"""`/tokenize` and `/detokenize` say what completions and chats are made of."""

from typing import Any

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "hé"}]


@pytest.mark.asyncio
async def test_a_prompt_becomes_the_tokens_that_a_completion_is_made_of(
    client: httpx.AsyncClient, backend: Any
) -> None:
    body = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    await client.post("/v1/completions", json={"model": "org/tiny", "prompt": "hé"})
    assert tuple(body["tokens"]) == backend.submitted[0].prompt_token_ids
    assert (body["count"], body["max_model_len"]) == (3, 64)
    assert len(body["token_strs"]) == 3
    back = await client.post("/detokenize", json={"tokens": body["tokens"], "model": "org/tiny"})
    assert back.json() == {"prompt": "hé"}


@pytest.mark.asyncio
async def test_messages_become_the_tokens_that_a_chat_is_made_of(client: httpx.AsyncClient, backend: Any) -> None:
    body = (await client.post("/tokenize", json={"model": "org/tiny", "messages": MESSAGES})).json()
    await client.post("/v1/chat/completions", json={"model": "org/tiny", "messages": MESSAGES})
    assert tuple(body["tokens"]) == backend.submitted[0].prompt_token_ids
    assert body["token_strs"] is None
    bare = await client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False})
    assert bare.json()["tokens"] == body["tokens"][:-1]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None),
        ("/detokenize", {"tokens": [256]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens.0"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
async def test_what_cannot_be_converted_is_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert param is None or error["param"] == param


@pytest.mark.asyncio
async def test_nothing_is_converted_before_the_model_is_there(client: httpx.AsyncClient, backend: Any) -> None:
    backend.ready = False
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert (await client.post(path, json=body)).status_code == 503
