"""The verifier's part of a round: head, processors, acceptance, logprobs. Keeps no truth: a round can be replayed."""

import time
from collections.abc import Sequence

import torch

from .acceptance import block_test, expand_support, ratio_test, recursive_rejection, walk_chain, walk_tree
from .coupled import gumbel_max
from .grammar import Grammars, Matchers
from .kernels.native import argmax
from .messages import Features, Sampling, TokenLogprob, Verdict, VerdictBatch, VerifyBatch, VerifyRow
from .models import LoadedModel, head_of
from .noise import Role, uniform
from .packed_linear import Head
from .sampling import adjust, target_log_probs, target_scores, widened
from .target import unpack_features
from .trees import children


class Verifier:
    """Owns the LM head (`head` if that is laid out already). Everything else it needs comes with the batch.

    Without `grammars` no row may be constrained.
    """

    def __init__(self, model: LoadedModel, grammars: Grammars | None = None, head: Head | None = None) -> None:
        self._matchers = None if grammars is None else Matchers(grammars)
        self._head = head or head_of(model)
        self.num_rounds = 0

    @torch.inference_mode()
    def verify(self, features: Features, batch: VerifyBatch) -> VerdictBatch:
        """Return one verdict per row, in order."""
        started = time.perf_counter()
        self.num_rounds += 1
        logits = self._head(unpack_features(features).to(self._head.device))
        verdicts = decide(logits, batch.rows, within_grammars(logits, batch.rows, self._matchers))
        return VerdictBatch(batch.round, verdicts, (time.perf_counter() - started) * 1e3)


def within_grammars(logits: torch.Tensor, rows: tuple[VerifyRow, ...], matchers: Matchers | None) -> torch.Tensor:
    """Return `logits`, or a copy in which -inf stands wherever the grammar of a constrained row forbids a token.

    Each position, the bonus token's too, is held to the grammar on its own prefix.
    """
    if all(row.constraint is None for row in rows):
        return logits
    assert matchers is not None
    allowed, start = logits.clone(), 0
    for row in rows:
        end = start + len(row.draft_token_ids) + 1
        if row.constraint is not None:
            masks = matchers.at(row.request_id, row.constraint).masks(row.draft_token_ids, row.parents)
            allowed[start:end].masked_fill_(torch.from_numpy(~masks).to(logits.device), -torch.inf)
        start = end
    return allowed


def decide(
    logits: torch.Tensor, rows: tuple[VerifyRow, ...], allowed: torch.Tensor | None = None
) -> tuple[Verdict, ...]:
    """Return the verdicts of packed `logits` [sum(gamma + 1), vocab]; each position is processed on its own prefix.

    A chain's position i follows i of its tokens, a tree's the way to its node i.
    `allowed` are the logits within the rows' grammars, where there are any.
    Greedy positions are decided in the logits' own dtype; only what is adjusted, sampled or logged becomes float32.
    Log-probabilities are those of the raw logits, before every processor.
    """
    spans: list[tuple[int, int]] = []
    start = 0
    for row in rows:
        spans.append((start, start + len(row.draft_token_ids) + 1))
        start = spans[-1][1]
    allowed = logits if allowed is None else allowed
    tokens = _target_tokens(allowed, rows, spans)
    verdicts = []
    for row, (start, end) in zip(rows, spans, strict=True):
        if tokens[start] is None:
            path, emitted = _ratio(allowed[start:end], row)
        else:
            path, emitted = _walk(row, [token for token in tokens[start:end] if token is not None])
        logprobs = _logprobs(logits[start:end], (0, *path), emitted, row.num_logprobs)
        verdicts.append(Verdict(row.request_id, row.committed_len, len(path), emitted, logprobs))
    return tuple(verdicts)


def _walk(row: VerifyRow, own: list[int]) -> tuple[Sequence[int], tuple[int, ...]]:
    """Return (accepted nodes, emitted), given the target's `own` token at every position."""
    if row.parents is not None:
        return walk_tree(row.parents, row.draft_token_ids, own)
    num_accepted, emitted = walk_chain(row.draft_token_ids, own)
    return range(1, num_accepted + 1), emitted


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
        positions.extend(row.positions)
    return gumbel_max(target_scores(chosen, samplings), [sampling.seed for sampling in samplings], positions)


def _adjusted(logits: torch.Tensor, row: VerifyRow) -> torch.Tensor:
    if not row.adjusted:
        return logits
    scores = widened(logits)
    adjust(scores, row)
    return scores


def _ratio(logits: torch.Tensor, row: VerifyRow) -> tuple[Sequence[int], tuple[int, ...]]:
    """Return (accepted nodes, emitted) of a draft that was sampled."""
    assert row.support_ids is not None
    assert row.support_probs is not None
    gamma, sampling = len(row.draft_token_ids), row.sampling
    target_probs = target_log_probs(_adjusted(logits.cpu().double(), row), [sampling] * (gamma + 1)).exp()
    draft_probs = expand_support(row.support_ids, row.support_probs, logits.shape[-1]).double()
    draft_probs /= draft_probs.sum(-1, keepdim=True)
    residuals = [uniform(sampling.seed, position, Role.RESIDUAL) for position in row.positions]
    if row.parents is not None:
        # Siblings share a position, so each of them needs numbers of its own; cousins never meet in one walk.
        ranks = {node: rank for group in children(row.parents) for rank, node in enumerate(group)}
        accept = [
            uniform(sampling.seed, position - 1, Role.ACCEPT + (ranks[node] << 8))
            for node, position in enumerate(row.positions)
            if node > 0
        ]
        return recursive_rejection(row.parents, row.draft_token_ids, target_probs, draft_probs, accept, residuals)
    accept = [uniform(sampling.seed, position, Role.ACCEPT) for position in row.positions[:-1]]
    test = block_test if sampling.acceptance == "block" else ratio_test
    num_accepted, emitted = test(row.draft_token_ids, target_probs, draft_probs, accept, residuals)
    return range(1, num_accepted + 1), emitted


def _logprobs(
    logits: torch.Tensor, nodes: Sequence[int], emitted: tuple[int, ...], count: int | None
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of what was emitted at `nodes`."""
    if count is None:
        return ()
    rows = logits[list(nodes)]
    log_probs = torch.log_softmax(rows if rows.dtype == torch.float64 else rows.float(), -1)
    values, ids = log_probs.topk(count, -1) if count else (log_probs[:, :0], log_probs[:, :0])
    return tuple(
        TokenLogprob(
            float(log_probs[index, token]),
            tuple((int(i), float(v)) for i, v in zip(ids[index].tolist(), values[index].tolist(), strict=True)),
        )
        for index, token in enumerate(emitted)
    )
