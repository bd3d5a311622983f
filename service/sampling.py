"""From logits to the distribution a request samples from, in this order: bias, penalties (repetition, frequency,
presence), tokens barred by min_tokens; then temperature, top-k, top-p, min-p.

The first group is vLLM's order and holds for greedy requests, too; the second is transformers', for sampled ones.
"""

from collections.abc import Sequence

import numpy as np
import torch

from .messages import History, Sampling, VerifyRow


def widened(logits: torch.Tensor) -> torch.Tensor:
    """Return a copy of `logits` to process: float64 stays, everything else becomes float32."""
    return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)


def adjust(scores: torch.Tensor, row: VerifyRow) -> None:
    """Apply the bias, penalties and bars of `row` to its raw logits [gamma + 1, vocab], in place.

    Position j is processed on the committed tokens and the first j of the draft, of a tree on the way to node j.
    Cost: a pass over the tokens named, not over the vocabulary; another pass where tokens are barred.
    """
    if row.sampling.logit_bias:
        token_ids, values = zip(*row.sampling.logit_bias, strict=True)
        scores[:, torch.tensor(token_ids, device=scores.device)] += _column(values, scores)[:, 0]
    if row.history is not None:
        _penalise(scores, row, row.history)
    if row.num_barred > 0 and row.barred_token_ids:
        end = row.committed_len + row.num_barred
        barred = [node for node, position in enumerate(row.positions) if position < end]
        scores[barred] = _bar(scores[barred], torch.tensor(row.barred_token_ids, device=scores.device))


def _penalise(scores: torch.Tensor, row: VerifyRow, history: History) -> None:
    """Lower the tokens of `history` and of the draft before each position. Source of the formulae: CTRL
    (arXiv 1909.05858, section 4.1) for repetition, OpenAI's API reference for frequency and presence.
    """
    sampling, draft = row.sampling, np.array(row.draft_token_ids, dtype=np.int64)
    drafted = np.setdiff1d(draft, history.token_ids)
    token_ids = np.concatenate([history.token_ids.astype(np.int64), drafted])
    counts = np.zeros((len(draft) + 1, len(token_ids)), dtype=np.int64)
    if row.parents is None:
        np.cumsum(draft[:, None] == token_ids, axis=0, out=counts[1:])
    else:
        for node, parent in enumerate(row.parents, start=1):
            counts[node] = counts[parent] + (draft[node - 1] == token_ids)
    counts[:, : len(history.counts)] += history.counts
    seen = counts > 0
    seen[:, : len(history.counts)] = True
    columns = torch.from_numpy(token_ids).to(scores.device)
    some = scores[:, columns]
    if sampling.repetition_penalty != 1.0:
        lowered = torch.where(some > 0, some / sampling.repetition_penalty, some * sampling.repetition_penalty)
        some = torch.where(torch.from_numpy(seen).to(some.device), lowered, some)
    times = torch.from_numpy(counts).to(some)
    some -= sampling.frequency_penalty * times
    some -= sampling.presence_penalty * (times > 0).to(some)
    scores[:, columns] = some


def _bar(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Remove `token_ids`, except at positions where nothing else is left."""
    before = scores[:, token_ids]
    scores[:, token_ids] = -torch.inf
    stuck = torch.isneginf(scores.amax(-1)).nonzero()
    if len(stuck):
        scores[stuck, token_ids] = before[stuck[:, 0]]
    return scores


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
    """Remove the least likely tokens as long as their total stays within 1 - mass; the likeliest token always stays.

    Only tokens above (1 - mass) / vocab are put in order: the others have at most 1 - mass together, so all of them go
    (half of that bound leaves room for rounding). Candidates come by row and id, so that a stable sort settles ties.
    """
    probs = scores.softmax(-1)
    rows, token_ids = (probs > (1.0 - mass) / (2 * scores.shape[-1])).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=scores.shape[0])
    places = torch.arange(len(rows), device=scores.device) - (counts.cumsum(0) - counts)[rows]
    table = scores.new_full((scores.shape[0], int(counts.max())), -torch.inf)
    table[rows, places] = scores[rows, token_ids]
    shares = torch.zeros_like(table)
    shares[rows, places] = probs[rows, token_ids]
    order = table.sort(dim=-1, stable=True, descending=True).indices
    shares = shares.gather(-1, order).cumsum(-1, dtype=torch.float64).roll(1, -1)
    shares[:, 0] = 0.0
    stays = torch.zeros_like(table, dtype=torch.bool).scatter(-1, order, shares < mass)[rows, places]
    rows, token_ids = rows[stays], token_ids[stays]
    kept = torch.full_like(scores, -torch.inf)
    kept[rows, token_ids] = scores[rows, token_ids]
    return kept


def _replaced(scores: torch.Tensor, rows: Sequence[int], some: torch.Tensor) -> torch.Tensor:
    if len(rows) == scores.shape[0]:
        return some
    scores = scores.clone()
    scores[list(rows)] = some
    return scores


def _column(values: Sequence[float], scores: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=scores.dtype, device=scores.device)[:, None]
