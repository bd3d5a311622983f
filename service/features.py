"""What a target-attached proposer reads: the target's hidden states, kept in pages beside the KV.

They share the KV's pages, so whatever finds the KV of a prompt again (a prefix-cache hit, a replayed round) finds them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from .messages import ScoreRow
from .slots import moved_slots


class FeaturePages:
    """Owns hidden states of chosen layers, [slots, layers * hidden] in the model's dtype, on its device."""

    def __init__(
        self, layers: Sequence[int], hidden: int, num_pages: int, page_tokens: int, like: torch.Tensor
    ) -> None:
        self.layers = tuple(layers)
        self._page_tokens = page_tokens
        shape = (num_pages * page_tokens, len(self.layers) * hidden)
        self._states = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def write(self, rows: Sequence[ScoreRow], states: Sequence[torch.Tensor]) -> None:
        """Keep `states`, one [total, hidden] a layer, of every token of `rows`."""
        slots = [self.slots(row.block_table, row.start_position, len(row.token_ids)) for row in rows]
        self._states[torch.cat(slots)] = torch.cat(tuple(states), -1)

    def move(self, rows: Sequence[ScoreRow]) -> None:
        """Move the states that earlier trees left elsewhere (`ScoreRow.moved_from`) to their positions' slots."""
        moved = moved_slots(rows, self._page_tokens)
        sources, targets = (torch.from_numpy(slots).to(self._states.device) for slots in moved)
        self._states[targets] = self._states[sources]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the states at `slots`, [len(slots), layers * hidden]."""
        return self._states[slots]

    def slots(self, block_table: Sequence[int], start: int, count: int) -> torch.Tensor:
        """Return the slots of the positions `start` to `start + count` of a request, int64."""
        return self.slots_of(block_table, range(start, start + count))

    def slots_of(self, block_table: Sequence[int], places: Sequence[int]) -> torch.Tensor:
        """Return the slots of these positions of a request, int64."""
        positions = np.asarray(places, np.int64)
        pages = np.asarray(block_table, np.int64)[positions // self._page_tokens]
        return torch.from_numpy(pages * self._page_tokens + positions % self._page_tokens).to(self._states.device)
