"""The target drafts for itself by leaving some of its layers out. Sources: arXiv 2309.08168, 2404.16710.

`layer_skip` leaves out chosen parts of layers, `early_exit` all layers from one on. Neither has weights of its own, nor
anything to remember: the context is the target's own KV, and rows of a draft are overwritten when it is scored.
"""

from collections.abc import Sequence

import torch

from ..errors import ModelUnsupportedError
from ..messages import DraftBatch, ProposeBatch, ProposeRow, ScoreRow
from ..models import LoadedModel
from ..packed_linear import Head
from ..skipping import Skip
from ..target import Target
from .choosing import Chain, extend


class SelfDraftProposer:
    """Drafts chains with the target's trunk and head, all rows of a batch together."""

    def __init__(self, name: str, target: Target, head: Head, skip: Skip, page_tokens: int, max_positions: int) -> None:
        self.name = name
        self._target = target
        self._head = head
        self._skip = skip
        self._page_tokens = page_tokens
        self._max_positions = max_positions

    @torch.inference_mode()
    def propose(self, batch: ProposeBatch) -> DraftBatch:
        """Return a draft for every row that has room for it; none when the batch comes after its round was scored."""
        if self._target.has_scored(batch.round):
            return DraftBatch(batch.round, (), 0)
        chains = [Chain(row) for row in batch.rows if self._has_room(row)]
        active = chains
        while active:
            hidden = self._target.run_ahead(batch.round, [_next_row(chain) for chain in active], self._skip)
            extend(active, self._head(hidden))
            active = [chain for chain in active if not chain.complete]
        return DraftBatch(batch.round, tuple(chain.draft() for chain in chains), 0)

    def _has_room(self, row: ProposeRow) -> bool:
        """Return whether the last committed token is told, and the draft fits into pages and positions.

        Not where a tree of the last round left rows that the coming score moves: the draft could overwrite them.
        """
        if row.moved_from:
            return False
        end = row.committed_len + row.gamma
        slots = len(row.block_table) * self._page_tokens
        return row.gamma > 0 and bool(row.new_token_ids) and end <= min(slots, self._max_positions)


def _next_row(chain: Chain) -> ScoreRow:
    """Return the one token that the chain goes on from, at its own position."""
    row, drafted = chain.row, chain.token_ids
    last = drafted[-1] if drafted else row.new_token_ids[-1]
    return ScoreRow(row.request_id, row.committed_len - 1 + len(drafted), (last,), 1, row.block_table)


def check_layers(model: LoadedModel) -> None:
    """Return when parts of the model's layers can be left out.

    Raises: ModelUnsupportedError, naming the family.
    """
    layers: Sequence[object] = getattr(model.trunk, "layers", ())
    if not layers or not all(hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in layers):
        raise ModelUnsupportedError(
            f"layers of {model.config.model_type} models cannot be skipped: they have no separate attention and MLP"
        )
