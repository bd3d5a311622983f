"""Differences between two documents, as RFC 6902 operations."""

from collections.abc import Mapping
from typing import Any

Operation = dict[str, Any]


def differences(old: object, new: object, path: str = "") -> list[Operation]:
    """Return the add, remove and replace operations that turn `old` into `new`; lists of other length as a whole."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: list[Operation] = []
        for key in [*old, *(key for key in new if key not in old)]:
            below = f"{path}/{_escaped(str(key))}"
            if key not in new:
                found.append({"op": "remove", "path": below})
            elif key not in old:
                found.append({"op": "add", "path": below, "value": new[key]})
            else:
                found += differences(old[key], new[key], below)
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = zip(old, new, strict=True)
        return [step for i, (a, b) in enumerate(pairs) for step in differences(a, b, f"{path}/{i}")]
    return [] if old == new and type(old) is type(new) else [{"op": "replace", "path": path, "value": new}]


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
