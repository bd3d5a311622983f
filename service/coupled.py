"""Coupled sampling: the token that Gumbel-max with position-keyed noise chooses, wherever and however it is asked."""

from collections.abc import Sequence

import torch

from .acceptance import coupled_tokens
from .kernels.native import DTYPES, library
from .noise import gumbel_keys, gumbel_rows


def gumbel_max(scores: torch.Tensor, seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return each row's token of `scores` [rows, vocab] (log-probabilities up to a constant), lowest id at a tie.

    On a CPU one pass that takes logarithms of the few tokens that can still win; elsewhere the noise is laid out whole.
    """
    native = library()
    if native is None or scores.device.type != "cpu":
        return coupled_tokens(scores, gumbel_rows(seeds, positions, scores.shape[-1]))
    scores = scores.contiguous()
    keys, out = gumbel_keys(seeds, positions), torch.empty(scores.shape[0], dtype=torch.int64)
    native.specserve_gumbel_argmax(
        DTYPES[scores.dtype], scores.data_ptr(), keys.data_ptr(), out.data_ptr(), scores.shape[0], scores.shape[1]
    )
    return [int(token) for token in out.tolist()]
