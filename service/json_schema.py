"""From a JSON schema to a grammar: what is understood, what is refused, and how large it may be."""

import json
from collections.abc import Iterator
from typing import Any

from .errors import BadRequestError

MAX_SCHEMA_BYTES = 64 * 1024
MAX_NESTING = 32
WHITESPACE = r"( |\n {0,32})"
"""One space, or a line break and its indentation, wherever JSON admits white space: a model cannot fill its output
with it."""

_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties"}
_VALUES = {
    "type", "enum", "const", "required", "$ref", "minItems", "maxItems", "minProperties", "maxProperties",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf",
}  # fmt: skip
_ANNOTATIONS = {
    "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
}  # fmt: skip


def json_grammar(schema: Any, param: str) -> str:
    """Return the grammar of the JSON texts that `schema` admits, in the order of its properties.

    Raises: BadRequestError naming `param` for a schema that is too large or too deep, or has keywords not understood.
    What else can be wrong with it shows when the grammar is compiled.
    """
    return grammar_text(f"start: {json_rule(schema, param)}")


def grammar_text(rules: str) -> str:
    """Return the grammar of Lark `rules`, in which every token that spells an allowed text is allowed.

    Left to itself the library admits only the tokenizer's own spelling where the text is known: another distribution
    than the target's, restricted to what may come.
    """
    return f'%llguidance {{"no_forcing": true}}\n{rules}\n'


def json_rule(schema: Any, param: str) -> str:
    """Return what stands in a grammar's rule for the texts of `schema`. Raises: BadRequestError as `json_grammar`."""
    if not isinstance(schema, dict):
        raise BadRequestError(f"{param}: a schema must be an object", param)
    if _nesting(schema) > MAX_NESTING:
        raise BadRequestError(f"{param}: a schema may be nested at most {MAX_NESTING} deep", param)
    if len(json.dumps(schema, ensure_ascii=False).encode()) > MAX_SCHEMA_BYTES:
        raise BadRequestError(f"{param}: a schema may have at most {MAX_SCHEMA_BYTES} bytes", param)
    for keyword in _keywords(schema):
        if keyword not in _VALUES | _ANNOTATIONS | _MAPS | _LISTS | _SCHEMAS:
            raise BadRequestError(f"{param}: the schema keyword {keyword!r} is not supported", param)
    return "%json " + json.dumps(schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}})


def _keywords(schema: Any) -> Iterator[str]:
    """Yield every keyword of a schema and of the schemas inside it; what is no schema is left to the compiler."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        yield keyword
        inner: list[Any] = []
        if keyword in _MAPS and isinstance(value, dict):
            inner = list(value.values())
        elif keyword in _LISTS and isinstance(value, list):
            inner = value
        elif keyword in _SCHEMAS:
            inner = [value]
        for one in inner:
            yield from _keywords(one)


def _nesting(value: Any) -> int:
    """Return how deep objects and arrays lie in one another; 1 for an object without any. Needs no deep stack."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > MAX_NESTING:
            break
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth
