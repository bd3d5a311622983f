"""From logits to the distribution a request samples from: temperature, top-k, top-p, min-p, in transformers' order."""

from collections.abc import Sequence

import torch

from .messages import Sampling


def target_log_probs(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return `target_scores` normalised to log-probabilities; greedy rows are plain log-probabilities."""
    return target_scores(logits, samplings).log_softmax(-1)


def target_scores(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return log-probabilities up to a constant a row, -inf for removed tokens; row i is processed by `samplings[i]`.

    At a tie on the top-p border the lower token ids stay.
    Shapes: `logits` and result [rows, vocab]; the result is float64 for float64 logits, else float32.
    """
    assert logits.shape[0] == len(samplings)
    scores = logits if logits.dtype == torch.float64 else logits.float()
    temperatures = [1.0 if sampling.greedy else sampling.temperature for sampling in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        scores = scores / _column(temperatures, scores)
    vocab_size = scores.shape[-1]
    num_kept = [vocab_size if s.greedy or not s.top_k else min(s.top_k, vocab_size) for s in samplings]
    if any(count < vocab_size for count in num_kept):
        scores = _top_k(scores, num_kept)
    top_p = [1.0 if sampling.greedy else sampling.top_p for sampling in samplings]
    rows = [index for index, mass in enumerate(top_p) if mass < 1.0]
    if rows:
        scores = _replaced(scores, rows, _top_p(scores[rows], _column([top_p[row] for row in rows], scores)))
    min_p = [0.0 if sampling.greedy else sampling.min_p for sampling in samplings]
    if any(share > 0.0 for share in min_p):
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < _column(min_p, scores) * probs.amax(-1, keepdim=True), -torch.inf)
    return scores


def _top_k(scores: torch.Tensor, num_kept: Sequence[int]) -> torch.Tensor:
    """Remove what is below the k-th largest score; scores equal to it all stay, as in transformers."""
    rows = [index for index, count in enumerate(num_kept) if count < scores.shape[-1]]
    some = scores[rows]
    counts = torch.tensor([num_kept[row] for row in rows], device=scores.device)
    values = some.topk(int(counts.max())).values
    return _replaced(scores, rows, some.masked_fill(some < values.gather(-1, counts[:, None] - 1), -torch.inf))


def _top_p(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Remove the least likely tokens as long as their total stays within 1 - mass; the likeliest token always stays."""
    ordered, order = torch.sort(scores, stable=True, dim=-1, descending=True)
    ordered, order = ordered.flip(-1), order.flip(-1)
    removed = ordered.softmax(-1).cumsum(-1) <= 1.0 - mass
    removed[:, -1] = False
    return scores.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -torch.inf)


def _replaced(scores: torch.Tensor, rows: Sequence[int], some: torch.Tensor) -> torch.Tensor:
    if len(rows) == scores.shape[0]:
        return some
    scores = scores.clone()
    scores[list(rows)] = some
    return scores


def _column(values: Sequence[float], scores: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=scores.dtype, device=scores.device)[:, None]
