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
from ..messages import DraftBatch, ProposeBatch, ProposeRow
from .choosing import Chain, extend
from .confidence_tree import ConfidenceTree, TreeLimits
from .head_block import HeadBlock
from .held import common_prefix, updated_tokens
from .paged_block import BlockRow, packed, paged_block

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
    """A draft, and how many of the rows fed last are its own."""

    draft: Chain | ConfidenceTree
    held: _Held
    num_rows: int = 1

    def feed(self) -> tuple[list[int], BlockRow]:
        """Return the rows to feed next, and for each which of the draft's last rows it goes on from."""
        draft, table, last = self.draft, self.held.table, len(self.held.token_ids) - 2
        if isinstance(draft, Chain):
            return [0], BlockRow(last + len(draft.token_ids), (draft.token_ids[-1],), table)
        nodes = draft.feed()
        self.num_rows = len(nodes)
        ways = tuple(tuple(last + place for place in node.way) for node in nodes)
        return [node.goes_on_from for node in nodes], BlockRow(
            last, tuple(node.token_id for node in nodes), table, ways
        )


class RowProposer:
    """Drafts all rows of a batch together: with `trees` trees for greedy requests, else chains.

    A sampled request gets a chain. Its tokens share the target's noise, and so guess what the target will draw; a tree
    of the likeliest tokens would not. Those of a ratio test are drawn, one after the other.
    """

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
        trees: TreeLimits | None = None,
    ) -> None:
        self.name = name
        self._head = head
        self._embed = head.embedding or embed
        self._features = features
        self._page_tokens = page_tokens
        self._max_positions = max_positions
        self._vocab = vocab
        self._trees = trees
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
        rows = [row for row in batch.rows if self._update(row)]
        if not rows:
            return DraftBatch(batch.round, (), len(self._held))
        grown = active = [_Growing(self._seed(row), self._held[row.request_id]) for row in rows]
        out = torch.cat([self._caught_up(row) for row in rows])
        while active:
            logits, hidden = self._head.leave(out)
            self._choose(active, logits)
            active, places, fed = _fed(active)
            if active:
                out = self._forward(_picked(hidden, places), fed)
        return DraftBatch(batch.round, tuple(one.draft.draft() for one in grown), len(self._held))

    def _update(self, row: ProposeRow) -> bool:
        """Take the row's new tokens and pages in; False when it cannot be drafted for."""
        held = self._held.setdefault(row.request_id, _Held())
        token_ids = updated_tokens(held.token_ids, row)
        if token_ids is None or row.committed_len < 2 or row.committed_len + row.gamma > self._max_positions:
            self._held.pop(row.request_id)
            return False
        same = 0 if row.known_len == 0 else common_prefix(held.table, row.block_table)
        held.num_rows = min(held.num_rows, same * self._page_tokens, len(token_ids) - 2)
        held.token_ids = token_ids
        held.table = row.block_table
        return True

    def _seed(self, row: ProposeRow) -> Chain | ConfidenceTree:
        return Chain(row) if self._trees is None or not row.sampling.greedy else ConfidenceTree(row, self._trees)

    def _caught_up(self, row: ProposeRow) -> torch.Tensor:
        """Feed the rows between those held and the last committed token; the output of the last begins the draft."""
        held = self._held[row.request_id]
        end = len(held.token_ids) - 1
        while held.num_rows < end:
            first, last = held.num_rows, min(end, held.num_rows + MAX_FED_ROWS)
            places = (*range(end - len(row.moved_from)), *row.moved_from)[first:last]
            hidden = self._head.fuse(self._features.read(held.table, places, self._head.taps))
            tokens = tuple(held.token_ids[first + 1 : last + 1])
            hidden = self._forward(hidden, [BlockRow(first, tokens, held.table)])
            held.num_rows = last
        return hidden[-1:]

    def _choose(self, growing: Sequence[_Growing], logits: torch.Tensor) -> None:
        """Give every chain its next token and every tree its next nodes, given the logits of the rows fed last."""
        chains: list[Chain] = []
        trees: list[ConfidenceTree] = []
        of_chains: list[int] = []
        of_trees: list[int] = []
        end = 0
        for one in growing:
            first, end = end, end + one.num_rows
            if isinstance(one.draft, Chain):
                chains.append(one.draft)
                of_chains.extend(range(first, end))
            else:
                trees.append(one.draft)
                of_trees.extend(range(first, end))
        if chains:
            extend(chains, self._over_vocabulary(_picked(logits, of_chains)))
        if trees:
            likeliest = zip(*self._likeliest(_picked(logits, of_trees)), strict=True)
            for tree in trees:
                tree.grow(likeliest)

    def _likeliest(self, logits: torch.Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """Return the target's ids and log-probabilities of each row's likeliest tokens, both [rows, width]."""
        assert self._trees is not None
        exact = logits if logits.dtype == torch.float64 else logits.float()
        log_probs, ids = exact.log_softmax(-1).topk(min(self._trees.width, logits.shape[-1]))
        return (ids if self._token_map is None else self._token_map[ids]).tolist(), log_probs.tolist()

    def _forward(self, hidden: torch.Tensor, rows: Sequence[BlockRow]) -> torch.Tensor:
        """Return what the layer makes of packed rows, whose keys and values it writes to the rows' slots.

        Drafted rows are not counted as held: the next rows of the target's own hidden states are written over them.
        """
        token_ids = torch.tensor([token for row in rows for token in row.token_ids], device=hidden.device)
        residual, x = self._head.enter(hidden, self._embed(token_ids))
        return self._block.run(residual, x, rows)

    def _over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, -inf where the head knows no token."""
        if self._token_map is None:
            return logits
        full = logits.new_full((len(logits), self._vocab), -torch.inf)
        full[:, self._token_map] = logits
        return full


def _fed(growing: Sequence[_Growing]) -> tuple[list[_Growing], list[int], list[BlockRow]]:
    """Return the drafts that go on, and their next rows after the place of the last one that each goes on from."""
    active: list[_Growing] = []
    places: list[int] = []
    fed: list[BlockRow] = []
    end = 0
    for one in growing:
        first, end = end, end + one.num_rows
        if not one.draft.complete:
            own, row = one.feed()
            active.append(one)
            places.extend(first + place for place in own)
            fed.append(row)
    return active, places, fed


def _picked(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Return `rows` at these places, themselves where that is all of them in order."""
    same = places == list(range(len(rows)))
    return rows if same else rows[torch.tensor(places, device=rows.device)]
