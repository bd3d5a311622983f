import itertools
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specserve.service.messages import Sampling
from specserve.service.sampling import target_log_probs

SETTINGS = [
    Sampling(greedy=False, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.3, 1.0, 1.7), (None, 1, 5, 1000), (0.05, 0.8, 1.0), (0.0, 0.1, 1.0)
    )
]


def random_logits(rows: int, vocab_size: int = 40, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)


def transformers_log_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    ids: Any = torch.zeros(1, 1, dtype=torch.long)
    scores: torch.Tensor = TemperatureLogitsWarper(sampling.temperature)(ids, logits[None])
    if sampling.top_k is not None:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p > 0.0:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    return scores[0].log_softmax(-1)


def test_every_combination_means_what_it_means_in_transformers_also_in_one_mixed_batch() -> None:
    logits = random_logits(len(SETTINGS))
    batch = target_log_probs(logits, SETTINGS)
    for row, own, sampling in zip(batch, logits, SETTINGS, strict=True):
        expected = transformers_log_probs(own, sampling)
        assert torch.equal(row.isinf(), expected.isinf()), sampling
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(target_log_probs(own[None], [sampling])[0], expected, rtol=0, atol=1e-12)


def test_greedy_rows_are_plain_log_probabilities_whatever_their_other_settings() -> None:
    logits = random_logits(2)
    settings = [Sampling(temperature=0.1, top_k=2, top_p=0.1, min_p=0.9), Sampling(greedy=False, top_k=3)]
    result = target_log_probs(logits, settings)
    torch.testing.assert_close(result[0], logits[0].log_softmax(-1), rtol=0, atol=1e-12)
    assert int(torch.isfinite(result[1]).sum()) == 3


@pytest.mark.parametrize(
    ("given", "returned"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_the_result_is_float64_only_for_float64_logits(given: torch.dtype, returned: torch.dtype) -> None:
    for sampling in (Sampling(), Sampling(greedy=False, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01)):
        result = target_log_probs(random_logits(3).to(given), [sampling] * 3)
        assert result.dtype == returned
        torch.testing.assert_close(result.exp().sum(-1), torch.ones(3, dtype=returned))


def test_the_likeliest_token_always_stays_and_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]], dtype=torch.float64)
    assert int(target_log_probs(logits, [Sampling()]).argmax()) == 1
    nucleus = target_log_probs(logits, [Sampling(greedy=False, top_p=0.01)])[0]
    assert nucleus.exp().tolist() == [0.0, 1.0, 0.0, 0.0]
    assert target_log_probs(logits, [Sampling(greedy=False, top_k=1)])[0].isfinite().tolist() == [
        False,
        True,
        True,
        True,
    ]


def test_tokens_masked_before_stay_masked() -> None:
    logits = random_logits(1)
    logits[0, ::2] = -torch.inf
    result = target_log_probs(logits, [Sampling(greedy=False, temperature=0.5, top_k=30, top_p=0.99, min_p=0.001)])
    assert result[0, ::2].isinf().all()
    assert not result.isnan().any()


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(2)
    before = logits.clone()
    target_log_probs(logits, [Sampling(greedy=False, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1), Sampling()])
    assert torch.equal(logits, before)


def test_no_rows_give_no_rows() -> None:
    assert target_log_probs(random_logits(0), []).shape == (0, 40)


def nucleus_by_hand(logits: torch.Tensor, mass: float) -> list[bool]:
    """The likeliest tokens, lower ids first at a tie, until their total reaches `mass`."""
    probs = [float(prob) for prob in logits.softmax(-1)]
    kept, total = [False] * len(probs), 0.0
    for token in sorted(range(len(probs)), key=lambda token: (-float(logits[token]), token)):
        if total >= mass:
            break
        kept[token] = True
        total += probs[token]
    return kept


@pytest.mark.parametrize("mass", [1e-9, 0.05, 0.5, 0.9, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("spread", [0.0, 1.0, 12.0])
def test_the_nucleus_is_the_smallest_also_among_ties(mass: float, spread: float) -> None:
    logits = (spread * random_logits(6, 300, seed=2)).round()
    logits[3, ::3] = -torch.inf
    masses = [mass, 0.3, mass, mass, mass, mass]
    batch = target_log_probs(logits, [Sampling(greedy=False, top_p=one) for one in masses])
    for row, own, one in zip(batch, logits, masses, strict=True):
        assert row.isfinite().tolist() == nucleus_by_hand(own, one)
        assert torch.equal(row, target_log_probs(own[None], [Sampling(greedy=False, top_p=one)])[0])
