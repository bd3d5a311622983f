"""The EAGLE-3 proposer: drafts from the target's own hidden states. Source: arXiv 2503.01840.

It lives where the target lives, and keeps the keys and values of its one layer in the slots of the target's pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ..attention import PackedLayout, paged_attention
from ..attention import Sequence as Packed
from ..features import FeaturePages
from ..messages import DraftBatch, ProposeBatch, ProposeRow
from ..models import LoadedModel
from .choosing import Chain, extend
from .eagle3_head import Eagle3Head, load_eagle3
from .held import updated_tokens

MAX_FED_ROWS = 512
"""Rows of one forward; a long prompt is fed in pieces of this size."""


@dataclass(slots=True)
class _Held:
    """One request: its committed tokens, and how many rows of the head's layer stand in `table`'s pages.

    Row i is made of the target's states at position i and the token at i + 1; only such rows are kept.
    """

    token_ids: list[int] = field(default_factory=list)
    num_rows: int = 0
    table: tuple[int, ...] = ()


@dataclass(slots=True)
class _Growing:
    """A chain with the hidden state that its next row goes on from."""

    chain: Chain
    held: _Held
    hidden: torch.Tensor


class Eagle3Proposer:
    """Drafts chains, all rows of a batch together."""

    name = "eagle3"

    def __init__(
        self,
        head: Eagle3Head,
        embed: nn.Module,
        features: FeaturePages,
        num_pages: int,
        page_tokens: int,
        max_positions: int,
    ) -> None:
        config = head.config
        weight = head.fc.weight
        shape = (num_pages * page_tokens, config.kv_heads, config.head_dim)
        self._head = head
        self._embed = head.embed_tokens if config.own_embedding else embed
        self._features = features
        self._max_positions = max_positions
        self._keys = [torch.zeros(shape, dtype=weight.dtype, device=weight.device)]
        self._values = [torch.zeros(shape, dtype=weight.dtype, device=weight.device)]
        self._target_ids = head.target_ids(torch.arange(config.draft_vocab, device=weight.device))
        self._only_layer = nn.Module()
        self._only_layer.layer_idx = 0  # type: ignore[assignment]  # what `paged_attention` asks a layer for
        self._held: dict[str, _Held] = {}

    @torch.inference_mode()
    def propose(self, batch: ProposeBatch) -> DraftBatch:
        """Return a draft for every row whose tokens are known here and whose context has room for it."""
        for request_id in batch.closed:
            self._held.pop(request_id, None)
        rows = [row for row in batch.rows if self._update(row)]
        grown: list[_Growing] = []
        for row in rows:
            grown.append(self._caught_up(row))
        active = grown
        while active:
            extend([one.chain for one in active], self._logits(active))
            active = [one for one in active if not one.chain.complete]
            if active:
                self._advance(active)
        return DraftBatch(batch.round, tuple(one.chain.draft() for one in grown), len(self._held))

    def _update(self, row: ProposeRow) -> bool:
        """Take the row's new tokens and pages in; False when it cannot be drafted for."""
        held = self._held.setdefault(row.request_id, _Held())
        token_ids = updated_tokens(held.token_ids, row)
        if token_ids is None or row.committed_len < 2 or row.committed_len + row.gamma > self._max_positions:
            self._held.pop(row.request_id)
            return False
        shared = min(len(held.table), len(row.block_table))
        if row.known_len == 0 or held.table[:shared] != row.block_table[:shared]:
            held.num_rows = 0  # the pages are others than before, and their rows with them
        held.token_ids = token_ids
        held.table = row.block_table
        held.num_rows = min(held.num_rows, len(token_ids) - 2)
        return True

    def _caught_up(self, row: ProposeRow) -> _Growing:
        """Feed the rows between those held and the last committed token; the last one begins the draft."""
        held = self._held[row.request_id]
        end = len(held.token_ids) - 1
        while held.num_rows < end:
            first, last = held.num_rows, min(end, held.num_rows + MAX_FED_ROWS)
            slots = self._features.slots(held.table, 0, last)
            embedded = self._embed(torch.tensor(held.token_ids[first + 1 : last + 1], device=slots.device))
            places = (*range(end - len(row.moved_from)), *row.moved_from)[first:last]
            hidden = self._head.fuse(self._features.read(self._features.slots_of(held.table, places)))
            hidden = self._forward(hidden, embedded, range(first, last), [Packed(0, last - first, slots)])
            held.num_rows = last
        return _Growing(Chain(row), held, hidden[-1:])

    def _advance(self, growing: Sequence[_Growing]) -> None:
        """Feed every chain's last token, at the position after its last row's; nothing of this is kept."""
        positions = [len(one.held.token_ids) - 2 + len(one.chain.token_ids) for one in growing]
        packed = [
            Packed(place, place + 1, self._features.slots(one.held.table, 0, position + 1))
            for place, (one, position) in enumerate(zip(growing, positions, strict=True))
        ]
        device = growing[0].hidden.device
        embedded = self._embed(torch.tensor([one.chain.token_ids[-1] for one in growing], device=device))
        hidden = self._forward(torch.cat([one.hidden for one in growing]), embedded, positions, packed)
        for place, one in enumerate(growing):
            one.hidden = hidden[place : place + 1]

    def _forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, positions: Sequence[int], packed: Sequence[Packed]
    ) -> torch.Tensor:
        """Return what the layer makes of packed rows, whose keys and values it writes to the rows' slots."""
        slots = torch.cat([one.slots[one.start - one.end :] for one in packed])
        layout = PackedLayout(self._keys, self._values, slots, tuple(packed), padded=slots.device.type != "cpu")

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
            return paged_attention(self._only_layer, q, k, v, None, layout=layout)[0][0]

        place = torch.tensor(list(positions), device=hidden.device)
        out: torch.Tensor = self._head.midlayer(hidden, embedded, place, attend)
        return out

    def _logits(self, growing: Sequence[_Growing]) -> torch.Tensor:
        """Return logits over the target's vocabulary, -inf where the head knows no token; hidden states move on."""
        hidden = torch.cat([one.hidden for one in growing])
        normed = self._head.norm(hidden)
        if self._head.config.recycle_normed:
            for place, one in enumerate(growing):
                one.hidden = normed[place : place + 1]
        logits: torch.Tensor = self._head.lm_head(normed)
        if self._head.config.draft_vocab == self._head.config.vocab:
            return logits
        full = logits.new_full((len(growing), self._head.config.vocab), -torch.inf)
        full[:, self._target_ids] = logits
        return full


def attach_eagle3(
    folder: Path, model: LoadedModel, num_pages: int, page_tokens: int
) -> tuple[Eagle3Proposer, FeaturePages]:
    """Return the proposer of the head in `folder`, and the pages that `model`'s target is to fill for it.

    Raises: ModelUnsupportedError when the head was made for another target.
    """
    config = model.config
    head = load_eagle3(folder, model.shape.vocab_size, config.hidden_size, config.num_hidden_layers, model.dtype)
    weight = model.head.weight
    assert isinstance(weight, torch.Tensor)
    features = FeaturePages(head.config.taps, config.hidden_size, num_pages, page_tokens, weight)
    embed: nn.Module = model.trunk.get_input_embeddings()  # type: ignore[operator]  # a transformers model
    head = head.to(weight.device)
    return Eagle3Proposer(head, embed, features, num_pages, page_tokens, model.shape.max_positions), features
