"""The verifier's part of a round: head, processors, acceptance, logprobs. Keeps no truth: a round can be replayed."""

import time

import torch

from .acceptance import block_test, expand_support, ratio_test, walk_chain
from .coupled import gumbel_max
from .kernels.native import argmax
from .messages import Features, Sampling, TokenLogprob, Verdict, VerdictBatch, VerifyBatch, VerifyRow
from .models import LoadedModel
from .noise import Role, uniform
from .packed_linear import Head
from .sampling import adjust, target_log_probs, target_scores, widened
from .target import unpack_features


class Verifier:
    """Owns the LM head. Everything else it needs comes with the batch."""

    def __init__(self, model: LoadedModel) -> None:
        self._head = Head(model.head, getattr(model.config, "final_logit_softcapping", None))
        self.num_rounds = 0

    @torch.inference_mode()
    def verify(self, features: Features, batch: VerifyBatch) -> VerdictBatch:
        """Return one verdict per row, in order."""
        started = time.perf_counter()
        self.num_rounds += 1
        logits = self._head(unpack_features(features).to(self._head.device))
        verdicts = decide(logits, batch.rows)
        return VerdictBatch(batch.round, verdicts, (time.perf_counter() - started) * 1e3)


def decide(logits: torch.Tensor, rows: tuple[VerifyRow, ...]) -> tuple[Verdict, ...]:
    """Return the verdicts of packed `logits` [sum(gamma + 1), vocab]; each position is processed on its own prefix.

    Greedy positions are decided in the logits' own dtype; only what is adjusted, sampled or logged becomes float32.
    Log-probabilities are those of the raw logits, before every processor.
    """
    spans: list[tuple[int, int]] = []
    start = 0
    for row in rows:
        spans.append((start, start + len(row.draft_token_ids) + 1))
        start = spans[-1][1]
    tokens = _target_tokens(logits, rows, spans)
    verdicts = []
    for row, (start, end) in zip(rows, spans, strict=True):
        if tokens[start] is None:
            num_accepted, emitted = _ratio(logits[start:end], row)
        else:
            own = [token for token in tokens[start:end] if token is not None]
            num_accepted, emitted = walk_chain(row.draft_token_ids, own)
        logprobs = _logprobs(logits[start:end], emitted, row.num_logprobs)
        verdicts.append(Verdict(row.request_id, row.committed_len, num_accepted, tuple(emitted), logprobs))
    return tuple(verdicts)


def _target_tokens(logits: torch.Tensor, rows: tuple[VerifyRow, ...], spans: list[tuple[int, int]]) -> list[int | None]:
    """Return the target's own token at every position; None at those that the ratio test decides."""
    greedy = any(row.sampling.greedy and not row.adjusted for row in rows)
    tokens: list[int | None] = list(argmax(logits)) if greedy else [0] * logits.shape[0]
    drawn: list[tuple[VerifyRow, int, int]] = []
    for row, (start, end) in zip(rows, spans, strict=True):
        if row.sampling.greedy:
            if row.adjusted:
                tokens[start:end] = argmax(_adjusted(logits[start:end], row))
        elif row.support_ids is not None:
            tokens[start:end] = [None] * (end - start)
        else:
            drawn.append((row, start, end))
    if drawn:
        places = [place for _, start, end in drawn for place in range(start, end)]
        for place, token in zip(places, _coupled_tokens(logits, places, drawn), strict=True):
            tokens[place] = token
    return tokens


def _coupled_tokens(logits: torch.Tensor, places: list[int], drawn: list[tuple[VerifyRow, int, int]]) -> list[int]:
    """Return the Gumbel-max tokens at `places`, the positions of the rows `drawn` (with start and end) in order."""
    chosen = logits if len(places) == logits.shape[0] else logits[torch.tensor(places, device=logits.device)]
    if any(row.adjusted for row, _, _ in drawn):
        chosen = widened(chosen)
    samplings: list[Sampling] = []
    positions: list[int] = []
    for row, start, end in drawn:
        if row.adjusted:
            adjust(chosen[len(samplings) : len(samplings) + end - start], row)
        samplings.extend([row.sampling] * (end - start))
        positions.extend(range(row.committed_len, row.committed_len + end - start))
    return gumbel_max(target_scores(chosen, samplings), [sampling.seed for sampling in samplings], positions)


def _adjusted(logits: torch.Tensor, row: VerifyRow) -> torch.Tensor:
    if not row.adjusted:
        return logits
    scores = widened(logits)
    adjust(scores, row)
    return scores


def _ratio(logits: torch.Tensor, row: VerifyRow) -> tuple[int, tuple[int, ...]]:
    assert row.support_ids is not None
    assert row.support_probs is not None
    gamma, sampling = len(row.draft_token_ids), row.sampling
    target_probs = target_log_probs(_adjusted(logits.cpu().double(), row), [sampling] * (gamma + 1)).exp()
    draft_probs = expand_support(row.support_ids, row.support_probs, logits.shape[-1]).double()
    draft_probs /= draft_probs.sum(-1, keepdim=True)
    positions = range(row.committed_len, row.committed_len + gamma + 1)
    test = block_test if sampling.acceptance == "block" else ratio_test
    return test(
        row.draft_token_ids,
        target_probs,
        draft_probs,
        [uniform(sampling.seed, position, Role.ACCEPT) for position in positions[:-1]],
        [uniform(sampling.seed, position, Role.RESIDUAL) for position in positions],
    )


def _logprobs(logits: torch.Tensor, emitted: tuple[int, ...], count: int | None) -> tuple[TokenLogprob, ...]:
    if count is None:
        return ()
    rows = logits[: len(emitted)]
    log_probs = torch.log_softmax(rows if rows.dtype == torch.float64 else rows.float(), -1)
    values, ids = log_probs.topk(count, -1) if count else (log_probs[:, :0], log_probs[:, :0])
    return tuple(
        TokenLogprob(
            float(log_probs[index, token]),
            tuple((int(i), float(v)) for i, v in zip(ids[index].tolist(), values[index].tolist(), strict=True)),
        )
        for index, token in enumerate(emitted)
    )
