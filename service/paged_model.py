"""A trunk with its KV pages: packed forwards of many requests, prefill and decode alike."""

import logging
from collections.abc import Sequence

import torch

from .errors import ModelUnsupportedError
from .features import FeaturePages
from .fused_trunk import FusedTrunk, fused_trunk
from .messages import ScoreRow
from .models import LoadedModel
from .module_trunk import ModuleTrunk
from .packed_linear import LinearKind, PackedLinear
from .skipping import NOTHING, Skip

LOG = logging.getLogger(__name__)
AGREEMENT = {torch.bfloat16: 0.1, torch.float32: 1e-3, torch.float64: 1e-4}
"""How far, relative to their size, fused and module hidden states may lie apart (the modules' norms are float32)."""
ROUNDED_AGREEMENT = 0.2
"""The same, of weights that are rounded to int8."""
CHECKED_TOKENS = 24


class PagedModel:
    """Runs a model's trunk over packed rows. Owns KV pages; who holds which page is the caller's business.

    `fused` False keeps to transformers' modules. The fused form holds its own weights, in the form of `linear`: drop
    `model` to free theirs. Raises: ModelUnsupportedError where `linear` rounds weights and there is no such fused form.
    """

    def __init__(
        self, model: LoadedModel, num_pages: int, page_tokens: int, fused: bool = True,
        linear: LinearKind = PackedLinear,
    ) -> None:  # fmt: skip
        self.num_layers = int(model.config.num_hidden_layers)
        self._trunk: FusedTrunk | ModuleTrunk | None = None
        if fused:
            self._trunk = _checked(model, num_pages, page_tokens, linear)
        if self._trunk is None:
            self._trunk = ModuleTrunk(model, num_pages, page_tokens)

    @property
    def is_fused(self) -> bool:
        """True when the layers run as few products and kernels, False when as transformers' modules."""
        return isinstance(self._trunk, FusedTrunk)

    @torch.inference_mode()
    def move(self, rows: Sequence[ScoreRow], keep: FeaturePages | None = None) -> None:
        """Move the KV rows that `rows` say lie elsewhere (`ScoreRow.moved_from`) to their positions, and `keep`'s."""
        if rows:
            assert self._trunk is not None
            self._trunk.move(rows)
            if keep is not None:
                keep.move(rows)

    @torch.inference_mode()
    def forward(self, rows: Sequence[ScoreRow], keep: FeaturePages | None = None, skip: Skip = NOTHING) -> torch.Tensor:
        """Return the final hidden states of each row's last `num_sampled` positions, packed: [sampled, hidden].

        `keep` takes in the hidden states of its layers, of every token: layer i is what enters decoder layer i (0: the
        embeddings), as in transformers' `hidden_states`; `num_layers` is what leaves the final norm. What `skip` names
        is left out, and writes no KV rows.
        """
        assert self._trunk is not None
        hidden, states = self._trunk.forward(rows, () if keep is None else keep.layers, skip)
        if keep is not None:
            keep.write(rows, states)
        if all(row.num_sampled == len(row.token_ids) for row in rows):
            return hidden
        sampled: list[int] = []
        end = 0
        for row in rows:
            end += len(row.token_ids)
            sampled.extend(range(end - row.num_sampled, end))
        return hidden[torch.tensor(sampled, dtype=torch.int64, device=hidden.device)]


def _checked(model: LoadedModel, num_pages: int, page_tokens: int, linear: LinearKind) -> FusedTrunk | None:
    """Return the fused trunk if there is one and it agrees with the modules on a few tokens."""
    positions = int(model.shape.max_positions)
    made = fused_trunk(model.trunk, model.config, model.dtype, positions, num_pages, page_tokens, linear)
    if made is None:
        return None
    pages = -(-CHECKED_TOKENS // page_tokens)
    if pages > num_pages:
        return made
    tokens = [(7919 * place + 11) % model.shape.vocab_size for place in range(CHECKED_TOKENS)]
    rows = [ScoreRow("check", 0, tuple(tokens[:-2]), 1, tuple(range(pages)))]
    rows_after = [ScoreRow("check", CHECKED_TOKENS - 2, tuple(tokens[-2:]), 2, tuple(range(pages)))]
    modules = ModuleTrunk(model, pages, page_tokens)
    with torch.inference_mode():
        pairs = [(made.forward(some)[0].double(), modules.forward(some)[0].double()) for some in (rows, rows_after)]
    apart = max(float((mine - theirs).norm() / theirs.norm()) for mine, theirs in pairs)
    if not apart <= (AGREEMENT[model.dtype] if linear is PackedLinear else ROUNDED_AGREEMENT):
        if linear is not PackedLinear:
            raise ModelUnsupportedError(f"in int8 a {model.config.model_type} is {apart:.2g} apart from what it was")
        LOG.warning("fused layers of %s are %.3g apart from the modules: not used", model.config.model_type, apart)
        return None
    return made
