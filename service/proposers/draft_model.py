"""A separate, smaller model that drafts by running ahead. Source: arXiv 2211.17192, 2302.01318."""

from dataclasses import dataclass, field

import torch

from ..messages import DraftBatch, ProposeBatch, ProposeRow, ScoreRow
from ..models import LoadedModel, head_of
from ..packed_linear import LinearKind, PackedLinear
from ..paged_model import PagedModel
from ..pages import OutOfPagesError, PageAllocator
from ..vocabularies import SharedVocabulary
from .choosing import Chain, extend
from .held import common_prefix, updated_tokens


@dataclass(slots=True)
class _Held:
    """One request's draft cache. `token_ids` are the target's, `context` the same text in the draft model's tokens;
    `fed` are those whose KV rows are in the pages, in order."""

    token_ids: list[int] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)


class DraftModelProposer:
    """Drafts chains, all rows of a batch together. KV rows of drafts that turn out accepted are kept: a row is a
    function of the tokens before it, and those are compared before it is reused.

    `vocabulary` is for a model whose token ids are not the target's. Ids that only one of two padded vocabularies has
    are never drafted, and where one is committed there is no draft. `linear` is how the model's weights are kept.
    """

    name = "draft"

    def __init__(
        self,
        model: LoadedModel,
        target_vocab_size: int,
        num_pages: int = 1024,
        page_tokens: int = 16,
        vocabulary: SharedVocabulary | None = None,
        linear: LinearKind = PackedLinear,
    ) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = model.shape.vocab_size
        self._target_vocab_size = target_vocab_size
        self._paged = PagedModel(model, num_pages, page_tokens, linear=linear)
        self._head = head_of(model, linear)
        self._max_positions = model.shape.max_positions
        self._allocator = PageAllocator(num_pages, page_tokens)
        self._held: dict[str, _Held] = {}

    @torch.inference_mode()
    def propose(self, batch: ProposeBatch) -> DraftBatch:
        """Return a draft for every row whose context and pages suffice; the others get none."""
        for request_id in batch.closed:
            self._forget(request_id)
        chains = [chain for row in batch.rows if (chain := self._chain(row)) is not None]
        active = chains
        while active:
            self._advance(active)
            active = [chain for chain in active if not chain.complete]
        return DraftBatch(batch.round, tuple(chain.draft() for chain in chains), len(self._held))

    def _chain(self, row: ProposeRow) -> Chain | None:
        held = self._held.setdefault(row.request_id, _Held())
        if not self._update(held, row):
            self._forget(row.request_id)
            return None
        del held.fed[min(common_prefix(held.fed, held.context), len(held.context) - 1) :]
        try:
            self._allocator.grow(held.table, len(held.context) + row.gamma)
        except OutOfPagesError:
            self._forget(row.request_id)
            return None
        return Chain(row)

    def _update(self, held: _Held, row: ProposeRow) -> bool:
        """Take the row's new tokens in; False when the draft model cannot go on from them."""
        token_ids = updated_tokens(held.token_ids, row)
        if token_ids is None:
            return False
        if self._vocabulary is None:
            if max(row.new_token_ids, default=0) >= self._vocab_size:
                return False  # padding of the target's vocabulary, or tokens that only it was given
            held.context = token_ids
        elif held.token_ids and token_ids[: len(held.token_ids)] == held.token_ids:
            held.context.extend(self._vocabulary.following(token_ids[len(held.token_ids) :]))
        else:
            held.context = self._vocabulary.beginning(token_ids)
        held.token_ids = token_ids
        return 0 < len(held.context) <= self._max_positions - row.gamma

    def _advance(self, chains: list[Chain]) -> None:
        """Add one token to every chain by one packed forward."""
        rows = []
        for chain in chains:
            held = self._held[chain.row.request_id]
            drafted = chain.token_ids if self._vocabulary is None else self._vocabulary.drafted(chain.token_ids)
            missing = (held.context + drafted)[len(held.fed) :]
            rows.append(ScoreRow(chain.row.request_id, len(held.fed), tuple(missing), 1, tuple(held.table)))
            held.fed.extend(missing)
        logits = self._head(self._paged.forward(rows))
        if self._vocabulary is not None:
            logits = self._vocabulary.logits(logits)
        extend(chains, logits[:, : self._target_vocab_size])

    def _forget(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self._allocator.release(held.table)
