"""The target's part of a round: one packed forward, hidden states out."""

from collections.abc import Sequence

import numpy as np
import torch

from .features import FeaturePages
from .messages import Features, ScoreBatch, ScoreRow
from .models import LoadedModel
from .paged_model import PagedModel
from .skipping import Skip


class Target:
    """Owns the trunk and its KV pages. Block tables and positions come with every batch.

    Keeps one thing: what the last batch moved, so that a batch scored again, after its round was lost, moves nothing
    twice. That memory is lost with the KV it speaks of, never alone.

    `features` takes in hidden states for proposers that draft from them.
    """

    def __init__(
        self, model: LoadedModel, num_pages: int, page_tokens: int, features: FeaturePages | None = None
    ) -> None:
        self._paged = PagedModel(model, num_pages, page_tokens)
        self._features = features
        self._moved: set[tuple[str, int]] = set()
        self._last_round: int | None = None
        self.num_rounds = 0

    def has_scored(self, round_number: int) -> bool:
        """Return whether a round of this number, or a later one, was scored here."""
        return self._last_round is not None and round_number <= self._last_round

    def score(self, batch: ScoreBatch) -> Features:
        """Return the hidden states of the batch's sampled positions."""
        self.num_rounds += 1
        asked = {(row.request_id, row.start_position): row for row in batch.rows if row.moved_from}
        self._paged.move([row for key, row in asked.items() if key not in self._moved], self._features)
        self._moved = set(asked)
        self._last_round = batch.round
        return pack_features(batch.round, self._paged.forward(batch.rows, self._features))

    def run_ahead(self, round_number: int, rows: Sequence[ScoreRow], skip: Skip) -> torch.Tensor:
        """Return the hidden states of `rows` without what `skip` names, for a proposer that drafts with this trunk.

        The KV rows this writes are not the target's own, and nobody takes them for such: they stand from the last
        committed token on, whose own row is missing until this round is scored, on pages that no other request reads.
        The score writes true rows to every slot it reads from there on. A row drafted after that score would stay, so
        none is.
        """
        assert not self.has_scored(round_number)
        return self._paged.forward(rows, skip=skip)


def pack_features(round_number: int, hidden: torch.Tensor) -> Features:
    """Return `hidden` as a message, bit for bit."""
    hidden = hidden.cpu()
    if hidden.dtype == torch.bfloat16:
        bits = hidden.contiguous().view(torch.int16).numpy().view(np.uint16)
        return Features(round_number, True, bits)
    return Features(round_number, False, hidden.contiguous().numpy())


def unpack_features(features: Features) -> torch.Tensor:
    """Return the tensor that `pack_features` packed."""
    hidden = features.hidden if features.hidden.flags.writeable else features.hidden.copy()
    if features.bfloat16:
        return torch.from_numpy(hidden.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(hidden)
