"""Where a request's tokens lie: the slot of a position, by the request's block table."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .messages import ScoreRow


class PlacedRow(Protocol):
    """Tokens of one request in a packed forward, and where they lie: a `ScoreRow`, or a part of a tree."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def start_position(self) -> int:
        """The position of the first token; of a tree's tokens, that of the first on the way to each."""
        ...

    @property
    def ways(self) -> tuple[tuple[int, ...], ...] | None:
        """For each token of a tree the places that it sees from `start_position` on, its own last; None for a chain.

        A place is the position that a slot of the pages would have in a chain. A token's position is the number of
        those before it on its way, after `start_position`.
        """
        ...

    @property
    def block_table(self) -> tuple[int, ...]: ...


def slots_at(block_table: Sequence[int], places: Sequence[int], page_tokens: int) -> npt.NDArray[np.int64]:
    """Return the slots of these positions of the request that holds the pages of `block_table`."""
    positions = np.asarray(places, np.int64)
    return np.asarray(block_table, np.int64)[positions // page_tokens] * page_tokens + positions % page_tokens


def moved_slots(rows: Sequence[ScoreRow], page_tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the slots that `rows` want moved (`ScoreRow.moved_from`) and where to, in the order to move them in.

    No move of a row writes to a slot that a later one reads: each goes down, and they come in the order of the slots.
    """
    sources: list[int] = []
    targets: list[int] = []
    for row in rows:
        first = row.start_position - len(row.moved_from)
        for target, source in enumerate(row.moved_from, start=first):
            assert target < source
            sources.append(row.block_table[source // page_tokens] * page_tokens + source % page_tokens)
            targets.append(row.block_table[target // page_tokens] * page_tokens + target % page_tokens)
    return np.array(sources, np.int64), np.array(targets, np.int64)
