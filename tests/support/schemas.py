"""Hypothesis strategies for JSON schemas that a random model can finish: strings, numbers and arrays are bounded."""

from typing import Any

from hypothesis import strategies as st

_NAMES = st.text("abcdefgh_", min_size=1, max_size=8)
_SCALARS = st.one_of(
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 12)),
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span}, st.integers(-99, 99),
              st.integers(0, 9999)),
    st.builds(lambda low: {"type": "number", "minimum": low, "maximum": low + 1, "multipleOf": 0.25},
              st.integers(-9, 9)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]},
                     {"type": "string", "format": "date"}, {"type": "string", "pattern": "^[a-c]{1,4}-[0-9]{2}$"}]),
    st.builds(lambda values: {"enum": values},
              st.lists(st.one_of(st.integers(-5, 5), st.text(max_size=5), st.none()), min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, st.one_of(st.text(max_size=6), st.lists(st.integers(0, 9), max_size=3))),
)  # fmt: skip


def _array(items: Any, low: int, more: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + more}


def _object(properties: dict[str, Any], optional: int) -> dict[str, Any]:
    required = [name for place, name in enumerate(properties) if not optional >> place & 1]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(_array, inner, st.integers(0, 1), st.integers(0, 2)),
        st.builds(_object, st.dictionaries(_NAMES, inner, max_size=3), st.integers(0, 7)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
    )


def schemas(count: int) -> st.SearchStrategy[list[Any]]:
    """Return `count` schemas at a time, nested a few deep."""
    return st.lists(st.recursive(_SCALARS, _larger, max_leaves=6), min_size=count, max_size=count)
