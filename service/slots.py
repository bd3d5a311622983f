"""Where a request's tokens lie: the slot of a position, by the request's block table."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .messages import ScoreRow


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
