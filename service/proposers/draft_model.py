"""A separate, smaller model that drafts by running ahead. Source: arXiv 2211.17192, 2302.01318."""

from dataclasses import dataclass, field

import numpy as np
import torch

from ..acceptance import inverse_cdf
from ..coupled import gumbel_max
from ..errors import ModelUnsupportedError
from ..kernels.native import argmax
from ..messages import Draft, DraftBatch, ProposeBatch, ProposeRow, ScoreRow
from ..models import LoadedModel
from ..noise import Role, uniform
from ..packed_linear import Head
from ..paged_model import PagedModel
from ..pages import OutOfPagesError, PageAllocator
from ..sampling import target_scores
from .held import common_prefix, updated_tokens

SUPPORT_TOKENS = 64


@dataclass(slots=True)
class _Held:
    """One request's draft cache: `fed` are the tokens whose KV rows are in the pages, in order."""

    token_ids: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Chain:
    """A draft being grown."""

    row: ProposeRow
    held: _Held
    token_ids: list[int] = field(default_factory=list)
    support_ids: list[torch.Tensor] = field(default_factory=list)
    support_probs: list[torch.Tensor] = field(default_factory=list)


class DraftModelProposer:
    """Drafts chains, all rows of a batch together. KV rows of drafts that turn out accepted are kept: a row is a
    function of the tokens before it, and those are compared before it is reused."""

    name = "draft"

    def __init__(
        self, model: LoadedModel, target_vocab_size: int, num_pages: int = 1024, page_tokens: int = 16
    ) -> None:
        if model.shape.vocab_size > target_vocab_size:
            raise ModelUnsupportedError(
                f"the draft model knows {model.shape.vocab_size} tokens, the target {target_vocab_size}"
            )
        self._paged = PagedModel(model, num_pages, page_tokens)
        self._head = Head(model.head, getattr(model.config, "final_logit_softcapping", None))
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
            active = [chain for chain in active if len(chain.token_ids) < chain.row.gamma]
        return DraftBatch(batch.round, tuple(_draft(chain) for chain in chains), len(self._held))

    def _chain(self, row: ProposeRow) -> _Chain | None:
        held = self._held.setdefault(row.request_id, _Held())
        token_ids = updated_tokens(held.token_ids, row)
        if token_ids is None or row.committed_len + row.gamma > self._max_positions:
            self._forget(row.request_id)
            return None
        held.token_ids = token_ids
        del held.fed[min(common_prefix(held.fed, token_ids), len(token_ids) - 1) :]
        try:
            self._allocator.grow(held.table, row.committed_len + row.gamma)
        except OutOfPagesError:
            self._forget(row.request_id)
            return None
        return _Chain(row, held)

    def _advance(self, chains: list[_Chain]) -> None:
        """Add one token to every chain by one packed forward."""
        rows = []
        for chain in chains:
            held = chain.held
            missing = (held.token_ids + chain.token_ids)[len(held.fed) :]
            rows.append(ScoreRow(chain.row.request_id, len(held.fed), tuple(missing), 1, tuple(held.table)))
            held.fed.extend(missing)
        logits = self._head(self._paged.forward(rows))
        best = argmax(logits)
        sampled = [index for index, chain in enumerate(chains) if not chain.row.sampling.greedy]
        if sampled:
            self._sample(logits, chains, sampled, best)
        for chain, token in zip(chains, best, strict=True):
            chain.token_ids.append(token)

    def _sample(self, logits: torch.Tensor, chains: list[_Chain], sampled: list[int], best: list[int]) -> None:
        """Replace `best` of the sampled rows: coupled rows share the target's noise, the others draw their own."""
        samplings = [chains[index].row.sampling for index in sampled]
        positions = [chains[index].row.committed_len + len(chains[index].token_ids) for index in sampled]
        scores = target_scores(logits[torch.tensor(sampled, device=logits.device)], samplings)
        coupled = gumbel_max(scores, [sampling.seed for sampling in samplings], positions)
        for place, index in enumerate(sampled):
            sampling = samplings[place]
            if sampling.acceptance == "coupled":
                best[index] = coupled[place]
                continue
            probs, ids = scores[place].softmax(-1).topk(min(SUPPORT_TOKENS, logits.shape[-1]))
            probs = (probs / probs.sum()).float()
            chosen = inverse_cdf(probs.double(), uniform(sampling.seed, positions[place], Role.DRAFT))
            best[index] = int(ids[chosen])
            chains[index].support_ids.append(ids)
            chains[index].support_probs.append(probs)

    def _forget(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self._allocator.release(held.table)


def _draft(chain: _Chain) -> Draft:
    row = chain.row
    if not chain.support_ids:
        return Draft(row.request_id, row.committed_len, tuple(chain.token_ids))
    ids = torch.stack(chain.support_ids).cpu().numpy().astype(np.int32)
    return Draft(
        row.request_id, row.committed_len, tuple(chain.token_ids), ids, torch.stack(chain.support_probs).cpu().numpy()
    )
