"""The target's part of a round: one packed forward, hidden states out."""

import numpy as np
import torch

from .features import FeaturePages
from .messages import Features, ScoreBatch
from .models import LoadedModel
from .paged_model import PagedModel


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
        self.num_rounds = 0

    def score(self, batch: ScoreBatch) -> Features:
        """Return the hidden states of the batch's sampled positions."""
        self.num_rounds += 1
        asked = {(row.request_id, row.start_position): row for row in batch.rows if row.moved_from}
        self._paged.move([row for key, row in asked.items() if key not in self._moved], self._features)
        self._moved = set(asked)
        return pack_features(batch.round, self._paged.forward(batch.rows, self._features))


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
