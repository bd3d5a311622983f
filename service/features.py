"""What a target-attached proposer reads: the target's hidden states, kept in pages beside the KV.

They share the KV's pages, so whatever finds the KV of a prompt again (a prefix-cache hit, a replayed round) finds them.
"""

from collections.abc import Sequence

import torch

from .messages import ScoreRow
from .slots import moved_slots, slots_at


class FeaturePages:
    """Owns hidden states of chosen layers, [slots, hidden] each in the model's dtype, on its device."""

    def __init__(
        self, layers: Sequence[int], hidden: int, num_pages: int, page_tokens: int, like: torch.Tensor
    ) -> None:
        self.layers = tuple(sorted(set(layers)))
        self._page_tokens = page_tokens
        shape = (num_pages * page_tokens, hidden)
        self._states = {layer: torch.zeros(shape, dtype=like.dtype, device=like.device) for layer in self.layers}
        self._device = like.device

    def write(self, rows: Sequence[ScoreRow], states: Sequence[torch.Tensor]) -> None:
        """Keep `states`, one [total, hidden] for each of `layers`, of every token of `rows`."""
        places = [range(row.start_position, row.start_position + len(row.token_ids)) for row in rows]
        slots = torch.cat([self._slots(row.block_table, some) for row, some in zip(rows, places, strict=True)])
        for layer, state in zip(self.layers, states, strict=True):
            self._states[layer][slots] = state

    def move(self, rows: Sequence[ScoreRow]) -> None:
        """Move the states that earlier trees left elsewhere (`ScoreRow.moved_from`) to their positions' slots."""
        sources, targets = (torch.from_numpy(slots).to(self._device) for slots in moved_slots(rows, self._page_tokens))
        for states in self._states.values():
            states[targets] = states[sources]

    def read(self, block_table: Sequence[int], places: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
        """Return the states of `layers`, side by side, at these positions: [len(places), len(layers) * hidden]."""
        slots = self._slots(block_table, places)
        found = [self._states[layer][slots] for layer in layers]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def _slots(self, block_table: Sequence[int], places: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(slots_at(block_table, places, self._page_tokens)).to(self._device)
