"""The order in which contestants measured beside each other come."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(contestants: Sequence[T], repeats: int) -> Iterator[T]:
    """Yield every contestant once a repeat, each repeat beginning with the next one.

    A slow minute of the machine so falls on all alike, and none is always the one that comes first.
    """
    for repeat in range(repeats):
        first = repeat % len(contestants)
        yield from (*contestants[first:], *contestants[:first])
