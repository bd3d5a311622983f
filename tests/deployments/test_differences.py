"""Differences lead from one document to the other, and are empty only between equals."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specserve.deployments.differences import differences

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("a/~", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/~", max_size=2), inner, max_size=3),
    max_leaves=8,
)


def applied(document: Any, steps: list[dict[str, Any]]) -> Any:
    """Apply the operations as RFC 6902 says."""
    whole = {"": document}
    for step in steps:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")]
        place: Any = whole
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        if step["op"] == "remove":
            del place[last]
        elif isinstance(place, list):
            place[int(last)] = step["value"]
        else:
            assert (step["op"] == "add") == (last not in place)
            place[last] = step["value"]
    return whole[""]


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


@given(VALUES, VALUES)
def test_the_differences_of_two_documents_turn_one_into_the_other(old: Any, new: Any) -> None:
    result = applied(copied(old), differences(old, new))
    assert result == new
    assert differences(old, old) == []
    if old != new:
        assert differences(old, new)
