"""The proposer of heads that run on from the target's hidden states, one row a token: EAGLE-1, EAGLE-3, MTP.

It lives where the target lives, and keeps the keys and values of the head's one layer in the slots of the target's
pages. Source: arXiv 2401.15077, 2503.01840; 2412.19437 section 2.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from ..features import FeaturePages
from ..messages import DraftBatch, ProposeBatch, ProposeRow, ScoreRow
from .choosing import Chain, extend
from .head_block import HeadBlock
from .held import updated_tokens
from .paged_block import packed, paged_block

MAX_FED_ROWS = 512
"""Rows of one forward; a long prompt is fed in pieces of this size."""


class RowHead(Protocol):
    """Row i pairs the target's hidden states at position i with the token at i + 1, and predicts the token at i + 2."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's hidden states that it reads, counted as transformers does."""
        ...

    @property
    def block(self) -> HeadBlock:
        """The layer, whose keys and values are kept."""
        ...

    @property
    def embedding(self) -> nn.Module | None:
        """Its own embedding of tokens; None when the target's is used."""
        ...

    @property
    def token_map(self) -> torch.Tensor | None:
        """The target's id of every id that it predicts; None when they are the same."""
        ...

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Return the hidden states a first row starts from, given the target's, side by side."""
        ...

    def enter(self, hidden: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's residual and its attention's input."""
        ...

    def leave(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and the hidden states that a next row goes on from, given the layer's output."""
        ...


@dataclass(slots=True)
class _Held:
    """One request: its committed tokens, and how many rows of the head's layer stand in `table`'s pages.

    Only rows made of the target's own hidden states are kept.
    """

    token_ids: list[int] = field(default_factory=list)
    num_rows: int = 0
    table: tuple[int, ...] = ()


@dataclass(slots=True)
class _Growing:
    """A chain with the layer's output, or the hidden state made of it, that its next row goes on from."""

    chain: Chain
    held: _Held
    hidden: torch.Tensor


class RowProposer:
    """Drafts chains, all rows of a batch together."""

    def __init__(
        self,
        name: str,
        head: RowHead,
        embed: nn.Module,
        features: FeaturePages,
        num_pages: int,
        page_tokens: int,
        max_positions: int,
        vocab: int,
    ) -> None:
        self.name = name
        self._head = head
        self._embed = head.embedding or embed
        self._features = features
        self._max_positions = max_positions
        self._vocab = vocab
        self._token_map = head.token_map
        self._block = paged_block(head.block, num_pages, page_tokens, max_positions)
        assert isinstance(head, nn.Module)
        packed(head)
        self._held: dict[str, _Held] = {}

    @torch.inference_mode()
    def propose(self, batch: ProposeBatch) -> DraftBatch:
        """Return a draft for every row whose tokens are known here and whose context has room for it."""
        for request_id in batch.closed:
            self._held.pop(request_id, None)
        grown = [self._caught_up(row) for row in batch.rows if self._update(row)]
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
            places = (*range(end - len(row.moved_from)), *row.moved_from)[first:last]
            hidden = self._head.fuse(self._features.read(held.table, places, self._head.taps))
            tokens = tuple(held.token_ids[first + 1 : last + 1])
            hidden = self._forward(hidden, [ScoreRow(row.request_id, first, tokens, 0, held.table)])
            held.num_rows = last
        return _Growing(Chain(row), held, hidden[-1:])

    def _advance(self, growing: Sequence[_Growing]) -> None:
        """Feed every chain's last token, at the position after its last row's; nothing of this is kept."""
        rows = [
            ScoreRow("", len(one.held.token_ids) - 2 + len(ids), (ids[-1],), 0, one.held.table)
            for one in growing
            if (ids := one.chain.token_ids)
        ]
        out = self._forward(_joined(growing), rows)
        for place, one in enumerate(growing):
            one.hidden = out[place : place + 1]

    def _forward(self, hidden: torch.Tensor, rows: Sequence[ScoreRow]) -> torch.Tensor:
        """Return what the layer makes of packed rows, whose keys and values it writes to the rows' slots."""
        token_ids = torch.tensor([token for row in rows for token in row.token_ids], device=hidden.device)
        residual, x = self._head.enter(hidden, self._embed(token_ids))
        return self._block.run(residual, x, rows)

    def _logits(self, growing: Sequence[_Growing]) -> torch.Tensor:
        """Return logits over the target's vocabulary, -inf where the head knows no token; hidden states move on."""
        logits, hidden = self._head.leave(_joined(growing))
        for place, one in enumerate(growing):
            one.hidden = hidden[place : place + 1]
        if self._token_map is None:
            return logits
        full = logits.new_full((len(growing), self._vocab), -torch.inf)
        full[:, self._token_map] = logits
        return full


def _joined(growing: Sequence[_Growing]) -> torch.Tensor:
    return growing[0].hidden if len(growing) == 1 else torch.cat([one.hidden for one in growing])
