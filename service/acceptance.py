"""The acceptance rules: which drafted tokens stay, and which token follows them. Pure: all noise is an argument.

Two rules keep the target's law. *Sample and walk* lets the target choose its own token everywhere (by argmax, or by
Gumbel-max with noise keyed by position) and keeps the draft as long as it agrees: the output is plain decoding's, token
for token. *Modified rejection sampling* keeps a token drawn from q with probability min(1, p/q).
Source: arXiv 2211.17192 algorithm 1, arXiv 2302.01318 algorithm 2.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def walk_chain(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return (num_accepted, emitted) of a chain, given the target's own token at each of its gamma + 1 positions."""
    assert len(target_token_ids) == len(draft_token_ids) + 1
    num_accepted = 0
    while num_accepted < len(draft_token_ids) and draft_token_ids[num_accepted] == target_token_ids[num_accepted]:
        num_accepted += 1
    return num_accepted, tuple(target_token_ids[: num_accepted + 1])


def coupled_tokens(log_probs: torch.Tensor, gumbel: torch.Tensor) -> list[int]:
    """Return the Gumbel-max token of every row of `log_probs` and `gumbel`, [rows, vocab]; ties go to the lowest id."""
    return [int(token) for token in (log_probs + gumbel.to(log_probs.device)).argmax(-1).tolist()]


def ratio_test(
    draft_token_ids: Sequence[int],
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    accept_uniforms: Sequence[float],
    residual_uniforms: Sequence[float],
) -> tuple[int, tuple[int, ...]]:
    """Return (num_accepted, emitted) of modified rejection sampling.

    `draft_probs` must be the very distributions that the tokens were sampled from, and the uniform numbers independent
    of those that sampled them. Only the residual number of the position where the walk ends is read.
    Shapes: `target_probs` [gamma + 1, vocab], `draft_probs` [gamma, vocab], uniforms [gamma] and [gamma + 1].
    """
    for index, token in enumerate(draft_token_ids):
        # Strict, and no division: u = 0 must not let a token of probability zero pass.
        if accept_uniforms[index] * float(draft_probs[index, token]) < float(target_probs[index, token]):
            continue
        correction = inverse_cdf(residual(target_probs[index], draft_probs[index]), residual_uniforms[index])
        return index, (*draft_token_ids[:index], correction)
    gamma = len(draft_token_ids)
    return gamma, (*draft_token_ids, inverse_cdf(target_probs[gamma], residual_uniforms[gamma]))


def residual(target_probs_row: torch.Tensor, draft_probs_row: torch.Tensor) -> torch.Tensor:
    """Return normalize(max(0, p - q)) [vocab] float64; p itself where nothing is left of it (p = q up to rounding)."""
    target = target_probs_row.double()
    excess = (target - draft_probs_row.double()).clamp_(min=0.0)
    total = excess.sum()
    return excess / total if float(total) > 0.0 else target


def inverse_cdf(probs: torch.Tensor, u: float) -> int:
    """Return the token at quantile `u` in [0, 1) of `probs` [vocab], normalised here; never one of probability zero.

    It is the first token whose cumulative sum *exceeds* the quantile: the sum grew there, so its probability is
    positive.
    """
    cumulative = probs.double().cumsum(-1)
    quantile = u * cumulative[-1]
    token = int(torch.searchsorted(cumulative, quantile, right=True))
    last = int(torch.searchsorted(cumulative, cumulative[-1]))
    return min(token, last)


def expand_support(
    support_ids: npt.NDArray[np.int32] | torch.Tensor,
    support_probs: npt.NDArray[np.float32] | torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Return dense draft probabilities [gamma, vocab_size] of the sparse ones [gamma, support], in their dtype.

    An id listed twice (padding of probability zero, say) counts with the sum of its probabilities.
    """
    ids = torch.as_tensor(np.array(support_ids)).long()
    probs = torch.as_tensor(np.array(support_probs))
    return torch.zeros(*probs.shape[:-1], vocab_size, dtype=probs.dtype).scatter_add(-1, ids, probs)
