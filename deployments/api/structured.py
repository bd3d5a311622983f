"""What outputs are held to: `response_format`, and tools that must be called, as grammars."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from specserve.service.errors import BadRequestError
from specserve.service.json_schema import json_grammar
from specserve.service.requests import GenerationRequest

from .backend import Backend

PARAM = "response_format"


async def held_to(
    write: Callable[[], str], param: str, backend: Backend, requests: Sequence[GenerationRequest]
) -> list[GenerationRequest]:
    """Return `requests`, held to the grammar that `write` returns; it is written and compiled off the event loop.

    Raises: BadRequestError naming `param` when there can be no such grammar.
    """
    grammars = backend.grammars
    if grammars is None:
        raise BadRequestError(f"{param} is not supported here", param)

    def compiled() -> str:
        grammar = write()
        grammars.matcher(grammar, param)
        return grammar

    grammar = await asyncio.to_thread(compiled)
    return [replace(request, grammar=grammar) for request in requests]


def response_schema(response_format: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a `response_format`; None for text. Raises: BadRequestError naming the field.

    A schema is followed whether it is `strict` or not.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise BadRequestError(f"{PARAM}.type must be text, json_object or json_schema", PARAM)
    named = response_format.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise BadRequestError(f"{PARAM}.json_schema.schema must be an object", PARAM)
    schema: dict[str, Any] = named["schema"]
    return schema


def schema_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar of a response's schema. Raises: BadRequestError naming the field."""
    return json_grammar(schema, PARAM)
