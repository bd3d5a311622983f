"""The acceptance rules: which drafted tokens stay, and which token follows them. Pure: all noise is an argument.

Two kinds of rule keep the target's law. *Sample and walk* lets the target choose its own token everywhere (by argmax,
or by Gumbel-max with noise keyed by position) and keeps the draft, chain or tree, as long as it agrees: the output is
plain decoding's, token for token. A *ratio test* needs the distribution q that a token was drawn from: modified
rejection sampling keeps it with probability min(1, p/q), block verification decides on whole prefixes of the chain and
never keeps fewer, recursive rejection tries siblings that were drawn without replacement one after the other.
Source: arXiv 2211.17192 algorithm 1, 2302.01318 algorithm 2; 2403.10444 algorithm 2 (block); 2402.14160 (siblings).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .trees import children


def walk_chain(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return (num_accepted, emitted) of a chain, given the target's own token at each of its gamma + 1 positions."""
    assert len(target_token_ids) == len(draft_token_ids) + 1
    num_accepted = 0
    while num_accepted < len(draft_token_ids) and draft_token_ids[num_accepted] == target_token_ids[num_accepted]:
        num_accepted += 1
    return num_accepted, tuple(target_token_ids[: num_accepted + 1])


def walk_tree(
    parents: Sequence[int], draft_token_ids: Sequence[int], target_token_ids: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (accepted nodes from the root down, emitted) of a tree, given the target's own token at each node."""
    assert len(target_token_ids) == len(parents) + 1
    child_of = {(parent, draft_token_ids[place]): place + 1 for place, parent in enumerate(parents)}
    path: list[int] = []
    emitted: list[int] = []
    node: int | None = 0
    while node is not None:
        emitted.append(target_token_ids[node])
        node = child_of.get((node, emitted[-1]))
        if node is not None:
            path.append(node)
    return tuple(path), tuple(emitted)


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


def block_test(
    draft_token_ids: Sequence[int],
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    accept_uniforms: Sequence[float],
    residual_uniforms: Sequence[float],
) -> tuple[int, tuple[int, ...]]:
    """Return (num_accepted, emitted) of block verification; arguments as for `ratio_test`.

    A prefix that was more likely under the draft can be made up for by what follows it: the longest prefix that passes
    its own test stays, whatever became of the shorter ones.
    """
    joint = [1.0]
    for index, token in enumerate(draft_token_ids):
        drawn = float(draft_probs[index, token])
        joint.append(min(1.0, joint[-1] * float(target_probs[index, token]) / drawn) if drawn > 0.0 else 0.0)
    # Nothing was drafted after the last token: a row of zeros there makes the bonus token a correction like any other.
    draft_probs = torch.cat((draft_probs, torch.zeros_like(target_probs[:1], dtype=draft_probs.dtype)))
    length = len(draft_token_ids)
    while length:
        left = float(_excess(target_probs[length], draft_probs[length], joint[length]).sum())
        missing = left + 1.0 - joint[length]
        # Strict: u = 0 must not let a prefix of probability zero pass.
        if accept_uniforms[length - 1] < (left / missing if missing > 0.0 else 1.0):
            break
        length -= 1
    correction = residual(target_probs[length], draft_probs[length], joint[length])
    return length, (*draft_token_ids[:length], inverse_cdf(correction, residual_uniforms[length]))


def recursive_rejection(
    parents: Sequence[int],
    draft_token_ids: Sequence[int],
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    accept_uniforms: Sequence[float],
    residual_uniforms: Sequence[float],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (accepted nodes from the root down, emitted) of a tree whose siblings were drawn without replacement.

    `draft_probs[i]` is the distribution from which token i and its siblings were drawn, in their order; the number
    `accept_uniforms[i]` belongs to token i, `residual_uniforms[node]` to the node where the walk ends. A chain is
    decided as by `ratio_test`. Shapes: `target_probs` [tokens + 1, vocab], `draft_probs` [tokens, vocab].
    """
    below = children(parents)
    path: list[int] = []
    emitted: list[int] = []
    while True:
        node = path[-1] if path else 0
        left = target_probs[node].double()
        drawn = draft_probs[below[node][0] - 1].double() if below[node] else left
        for child in below[node]:
            token = draft_token_ids[child - 1]
            if accept_uniforms[child - 1] * float(drawn[token]) < float(left[token]):
                path.append(child)
                emitted.append(token)
                break
            left, drawn = residual(left, drawn), _without(drawn, token)
        else:
            return tuple(path), (*emitted, inverse_cdf(left, residual_uniforms[node]))


def _without(probs: torch.Tensor, token: int) -> torch.Tensor:
    """Return `probs` [vocab] with `token` removed, normalised; zeros when nothing else was possible."""
    rest = probs.clone()
    rest[token] = 0.0
    total = float(rest.sum())
    return rest / total if total > 0.0 else rest


def residual(target_probs_row: torch.Tensor, draft_probs_row: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    """Return normalize(max(0, share * p - q)) [vocab] float64; p itself where nothing is left of it."""
    excess = _excess(target_probs_row, draft_probs_row, share)
    total = excess.sum()
    return excess / total if float(total) > 0.0 else target_probs_row.double()


def _excess(target_probs_row: torch.Tensor, draft_probs_row: torch.Tensor, share: float) -> torch.Tensor:
    return (target_probs_row.double() * share - draft_probs_row.double()).clamp_(min=0.0)


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
