"""Target distributions as `decide` computes them at the positions of a draft, and as plain decoding would, one prefix
after another; both over the same random logits of a toy model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from specserve.service import verifier
from specserve.service.commit import commit
from specserve.service.messages import Draft, Sampling, VerifyRow
from specserve.service.models import embedded_dir, load_tokenizer
from specserve.service.requests import GenerationRequest
from specserve.service.running import RequestStream, Running
from specserve.service.sampling import target_log_probs

from .laws import Prefix

SMALL_VOCAB = 4
PROMPT = (0, 1, 1)
END = 3
Adjust = Callable[[torch.Tensor, VerifyRow], None]


@dataclass(frozen=True)
class Processing:
    """A request's processors over the toy model; `END` ends it where `min_tokens` are asked for."""

    sampling: Sampling
    min_tokens: int = 0

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (END,) if self.min_tokens else ()

    def running(self, *rounds: Prefix) -> Running:
        """Return the engine's book after `rounds` were committed, each as one round."""
        request = GenerationRequest("r", PROMPT, self.sampling, 20, self.min_tokens)
        running = Running(request, RequestStream("r"), 0.0, list(PROMPT))
        for token_ids in rounds:
            running.verify_row(None, self.eos_token_ids)
            done = commit(running.output, request, token_ids, (), _tokenizer(), self.eos_token_ids)
            assert done.token_ids == token_ids
            running.token_ids.extend(token_ids)
        return running


@cache
def _tokenizer():  # type: ignore[no-untyped-def]
    return load_tokenizer(embedded_dir("target"))


@cache
def raw_logits(output: Prefix) -> torch.Tensor:
    """Return the toy model's logits [SMALL_VOCAB] float64 after an output."""
    seed = sum((token + 1) * (SMALL_VOCAB + 1) ** place for place, token in enumerate(output))
    return 2 * torch.randn(SMALL_VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_probs(processing: Processing, output: Prefix) -> torch.Tensor:
    """Return plain decoding's distribution after `output`, processor by processor, as the definitions have it."""
    sampling = processing.sampling
    scores = raw_logits(output).clone()
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    repetition = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    scores = repetition(torch.tensor([PROMPT + output]), scores[None])[0]  # type: ignore[arg-type]
    for token in range(SMALL_VOCAB):
        scores[token] -= sampling.frequency_penalty * output.count(token)
        scores[token] -= sampling.presence_penalty * (token in output)
    if len(output) < processing.min_tokens:
        scores[END] = -torch.inf
    if sampling.greedy:
        return torch.eye(SMALL_VOCAB, dtype=torch.float64)[int(scores.argmax())]
    return target_log_probs(scores[None], [replace(sampling, logit_bias=())])[0].exp()


def draft_of(running: Running, token_ids: Prefix) -> Draft:
    """Return a draft that was sampled, as far as its message says, when the request asks for the ratio test."""
    if running.request.sampling.acceptance == "coupled":
        return Draft("r", running.committed_len, token_ids)
    shape = (len(token_ids), SMALL_VOCAB)
    ids, probs = np.tile(np.arange(SMALL_VOCAB, dtype=np.int32), (shape[0], 1)), np.full(shape, 0.25, np.float32)
    return Draft("r", running.committed_len, token_ids, ids, probs)


class Decided:
    """What `decide` hands to the acceptance rule: the distributions at every position of a row.

    The row stands between two others, which have no processors, so that a wrong offset shows.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen: list[torch.Tensor] = []
        monkeypatch.setattr(verifier, "gumbel_max", self._coupled)
        monkeypatch.setattr(verifier, "ratio_test", self._ratio)

    def _coupled(self, scores: torch.Tensor, seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
        self._seen.append(scores.softmax(-1))
        return [0] * len(scores)

    def _ratio(self, draft: Sequence[int], target_probs: torch.Tensor, *rest: object) -> tuple[int, tuple[int, ...]]:
        self._seen.append(target_probs)
        return 0, (0,)

    def probs(self, row: VerifyRow, output: Prefix) -> torch.Tensor:
        """Return the target probabilities [gamma + 1, SMALL_VOCAB] at the positions of `row`, which has `output`."""
        gamma = len(row.draft_token_ids)
        own = torch.stack([raw_logits(output + row.draft_token_ids[:place]) for place in range(gamma + 1)])
        beside = VerifyRow("beside", 9, Sampling(greedy=False), (1,), None, None, None)
        others = torch.tensor([[0.5, 0.25, -1.0, 0.0], [2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
        logits = torch.cat([others, own, others])
        before = logits.clone()
        self._seen.clear()
        verifier.decide(logits, (beside, row, beside))
        assert torch.equal(logits, before)
        if row.support_ids is not None:
            packed, found = self._seen
        else:
            (packed,) = self._seen
            found, packed = packed[2:-2], torch.cat([packed[:2], packed[-2:]])
        torch.testing.assert_close(packed, torch.cat([others, others]).softmax(-1), rtol=0, atol=1e-12)
        return found
