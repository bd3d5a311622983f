"""How a drafted row's token is chosen, whatever made its logits: greedily, with the target's noise, or by a draw."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..acceptance import inverse_cdf
from ..coupled import gumbel_max
from ..kernels.native import argmax
from ..messages import Draft, ProposeRow
from ..noise import Role, uniform
from ..sampling import target_scores

SUPPORT_TOKENS = 64


@dataclass(slots=True)
class Chain:
    """A draft being grown; `support_*` [support] a token, where tokens are drawn."""

    row: ProposeRow
    token_ids: list[int] = field(default_factory=list)
    support_ids: list[torch.Tensor] = field(default_factory=list)
    support_probs: list[torch.Tensor] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True when as many tokens as were asked for are drafted."""
        return len(self.token_ids) >= self.row.gamma

    def draft(self) -> Draft:
        """Return the finished message."""
        row = self.row
        if not self.support_ids:
            return Draft(row.request_id, row.committed_len, tuple(self.token_ids))
        ids = torch.stack(self.support_ids).cpu().numpy().astype(np.int32)
        probs = torch.stack(self.support_probs).cpu().numpy()
        return Draft(row.request_id, row.committed_len, tuple(self.token_ids), ids, probs)


def extend(chains: Sequence[Chain], logits: torch.Tensor, drawn: bool = True) -> None:
    """Add one token to every chain, chosen from its row of `logits` [chains, vocab]; removed tokens are -inf there.

    Without `drawn` the ratio test's rows share the target's noise too: they carry no probabilities, so that the target
    chooses its own tokens and keeps those that agree.
    """
    best = argmax(logits)
    sampled = [index for index, chain in enumerate(chains) if not chain.row.sampling.greedy]
    if sampled:
        _sample(logits, chains, sampled, best, drawn)
    for chain, token in zip(chains, best, strict=True):
        chain.token_ids.append(token)


def _sample(logits: torch.Tensor, chains: Sequence[Chain], sampled: list[int], best: list[int], drawn: bool) -> None:
    """Replace `best` of the sampled rows: coupled rows share the target's noise, the others draw their own."""
    samplings = [chains[index].row.sampling for index in sampled]
    positions = [chains[index].row.committed_len + len(chains[index].token_ids) for index in sampled]
    scores = target_scores(logits[torch.tensor(sampled, device=logits.device)], samplings)
    coupled = gumbel_max(scores, [sampling.seed for sampling in samplings], positions)
    for place, index in enumerate(sampled):
        sampling = samplings[place]
        if sampling.acceptance == "coupled" or not drawn:
            best[index] = coupled[place]
            continue
        probs, ids = scores[place].softmax(-1).topk(min(SUPPORT_TOKENS, logits.shape[-1]))
        probs = (probs / probs.sum()).float()
        chosen = inverse_cdf(probs.double(), uniform(sampling.seed, positions[place], Role.DRAFT))
        best[index] = int(ids[chosen])
        chains[index].support_ids.append(ids)
        chains[index].support_probs.append(probs)
