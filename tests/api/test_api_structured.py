"""`response_format` becomes the request's grammar, or a 400 that says which keyword or limit was in the way."""

from typing import Any

import httpx
import pytest
from support.grammars import byte_tokenizer

from specserve.service.grammar import Grammars

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def grammars(backend: Any) -> Grammars:
    backend.grammars = Grammars(byte_tokenizer(), 256, ())
    return backend.grammars


def body(response_format: object) -> dict[str, Any]:
    return {"model": "org/tiny", "prompt": "x", "max_tokens": 5, "response_format": response_format}


def named(schema: object, **fields: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


def admits(grammars: Grammars, grammar: str, text: str) -> bool:
    matcher = grammars.matcher(grammar)
    return all(matcher.advance(token) for token in byte_tokenizer().encode(text)) and matcher.complete


@pytest.mark.parametrize("strict", [{}, {"strict": True}, {"strict": False}], ids=str)
@pytest.mark.asyncio
async def test_a_schema_is_followed_strict_or_not(
    client: httpx.AsyncClient, backend: Any, grammars: Grammars, strict: dict[str, Any]
) -> None:
    assert (await client.post("/v1/completions", json=body(named(SCHEMA, **strict)))).status_code == 200
    grammar = backend.submitted[0].grammar
    assert admits(grammars, grammar, '{"a": 1}')
    assert not admits(grammars, grammar, '{"b": 1}')


@pytest.mark.asyncio
async def test_json_object_admits_objects_and_text_anything(
    client: httpx.AsyncClient, backend: Any, grammars: Grammars
) -> None:
    for kind in ("json_object", "text"):
        assert (await client.post("/v1/completions", json=body({"type": kind}))).status_code == 200
    held, free = backend.submitted
    assert free.grammar is None
    assert admits(grammars, held.grammar, '{"b": [1, "x"]}')
    assert not admits(grammars, held.grammar, "[]")


@pytest.mark.asyncio
async def test_every_choice_of_a_chat_is_held_to_the_schema(
    client: httpx.AsyncClient, backend: Any, grammars: Grammars
) -> None:
    chat = {"model": "org/tiny", "messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 5}
    answer = await client.post("/v1/chat/completions", json={**chat, "response_format": named(SCHEMA)})
    assert answer.status_code == 200
    assert [admits(grammars, one.grammar, '{"a":2}') for one in backend.submitted] == [True, True]


@pytest.mark.parametrize(
    ("response_format", "said"),
    [
        ("json", "type"),
        ({"type": "grammar"}, "type"),
        ({"type": "json_schema"}, "json_schema.schema"),
        (named([]), "json_schema.schema"),
        (named({"type": "array", "uniqueItems": True}), "'uniqueItems'"),
        (named({"type": "strnig"}), "strnig"),
        (named({"enum": ["x" * 70_000]}), "65536 bytes"),
    ],
)
@pytest.mark.asyncio
async def test_what_cannot_be_followed_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, backend: Any, grammars: Grammars, response_format: object, said: str
) -> None:
    answer = await client.post("/v1/completions", json=body(response_format))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert said in answer.json()["error"]["message"]
    assert not backend.submitted
