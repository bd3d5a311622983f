"""The law tests: whatever the drafter, the output has the target's distribution, to 1e-12, over all branches."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.laws import Law, Prefix, Table, one_hot_argmax, output_law, random_table, sampled, table, target_law

from specserve.service.acceptance import coupled_tokens, expand_support, inverse_cdf, ratio_test, residual, walk_chain
from specserve.service.messages import Sampling
from specserve.service.sampling import target_log_probs

EXACT = 1e-12


def counted_ratio_test(
    draft: Sequence[int], p: torch.Tensor, q: torch.Tensor, accept: Sequence[float], residuals: Sequence[float]
) -> tuple[int, tuple[int, ...]]:
    num_accepted, emitted = ratio_test(draft, p, q, accept, residuals)
    assert len(emitted) == num_accepted + 1
    assert emitted[:-1] == tuple(draft[:num_accepted])
    return num_accepted, emitted


def assert_exact(target: Table, draft: Table, gamma: int, *, deterministic: bool = False) -> None:
    law = output_law(counted_ratio_test, target, draft, gamma, one_hot_argmax if deterministic else sampled)
    assert law.distance(target_law(target, gamma + 1)) < EXACT
    assert not law.forbidden


def warped_table(vocab_size: int, length: int, seed: int, sampling: Sampling) -> Table:
    generator = torch.Generator().manual_seed(seed)

    def row(_: Prefix) -> list[float]:
        logits = torch.randn(1, vocab_size, generator=generator, dtype=torch.float64)
        return [float(prob) for prob in target_log_probs(logits, [sampling])[0].exp()]

    return table(vocab_size, length, row)


def pinned(*rows: list[float]) -> Table:
    """Rows that depend on the last token of the prefix: rotated by it."""
    size = len(rows[0])

    def row(prefix: Prefix) -> list[float]:
        base = rows[len(prefix) % len(rows)]
        shift = prefix[-1] if prefix else 0
        return [base[(token + shift) % size] for token in range(size)]

    return table(size, 4, row)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("vocab_size", "gamma"), [(3, 1), (4, 1), (5, 1), (3, 2), (4, 2), (3, 3)])
def test_rejection_sampling_has_the_targets_law_for_random_tables(vocab_size: int, gamma: int, seed: int) -> None:
    zeros = 0.3 if seed % 2 and gamma < 3 else 0.0
    target, draft = (random_table(vocab_size, gamma + 1, 2 * seed + side, zeros) for side in (0, 1))
    assert_exact(target, draft, gamma)


CASES = {
    "ties": ([0.25, 0.25, 0.5], [0.5, 0.25, 0.25]),
    "equal": ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
    "uniform": ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
    "disjoint": ([0.4, 0.6, 0.0, 0.0], [0.0, 0.0, 0.7, 0.3]),
    "one-hot target": ([0.0, 1.0, 0.0], [0.5, 0.2, 0.3]),
    "one-hot draft": ([0.5, 0.2, 0.3], [0.0, 0.0, 1.0]),
    "one-hot and equal": ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
    "nested supports": ([0.2, 0.3, 0.5, 0.0], [0.0, 0.9, 0.1, 0.0]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gamma", [1, 2])
def test_rejection_sampling_has_the_targets_law_in_degenerate_cases(case: str, gamma: int) -> None:
    target, draft = CASES[case]
    assert_exact(pinned(target), pinned(draft), gamma)


@pytest.mark.parametrize("seed", range(3))
def test_rejection_sampling_has_the_targets_law_when_both_are_truncated_differently(seed: int) -> None:
    target = warped_table(4, 3, seed, Sampling(greedy=False, temperature=0.8, top_p=0.7))
    draft = warped_table(4, 3, seed + 50, Sampling(greedy=False, temperature=1.3, top_k=3, min_p=0.05))
    assert_exact(target, draft, 2)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_a_deterministic_draft_with_one_hot_q_has_the_targets_law(gamma: int) -> None:
    assert_exact(random_table(4, gamma + 1, 7, 0.2), random_table(4, gamma + 1, 8), gamma, deterministic=True)


def test_an_empty_draft_yields_one_token_of_the_target() -> None:
    assert_exact(random_table(5, 1, 1), random_table(5, 1, 2), 0)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_sample_and_walk_has_the_targets_law_for_every_draft(gamma: int) -> None:
    target = random_table(3, gamma + 1, 5, 0.2)
    for draft in itertools.product(range(3), repeat=gamma):
        probs: dict[Prefix, float] = defaultdict(float)
        rows = [target(draft[:place]) for place in range(gamma + 1)]
        for own in itertools.product(range(3), repeat=gamma + 1):
            weight = float(np.prod([float(row[token]) for row, token in zip(rows, own, strict=True)]))
            num_accepted, emitted = walk_chain(draft, own)
            assert emitted[:-1] == draft[:num_accepted]
            assert len(emitted) == num_accepted + 1
            for tail in itertools.product(range(3), repeat=gamma - num_accepted):
                tokens, share = emitted, 1.0
                for token in tail:
                    share *= float(target(tokens)[token])
                    tokens = (*tokens, token)
                probs[tokens] += weight * share
        assert Law(dict(probs)).distance(target_law(target, gamma + 1)) < EXACT


def test_sample_and_walk_stops_at_the_first_disagreement_even_if_later_tokens_agree() -> None:
    assert walk_chain((1, 2, 3), (1, 9, 3, 4)) == (1, (1, 9))
    assert walk_chain((1, 2, 3), (1, 2, 3, 4)) == (3, (1, 2, 3, 4))
    assert walk_chain((), (4,)) == (0, (4,))


def test_coupled_tokens_are_the_gumbel_maxima_and_ties_go_to_the_lowest_id() -> None:
    log_probs = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]], dtype=torch.float64).log()
    zero = torch.zeros(2, 3, dtype=torch.float64)
    assert coupled_tokens(log_probs, zero) == [0, 1]
    assert coupled_tokens(log_probs, torch.tensor([[0.0, 9.0, 0.0], [99.0, 0.0, 1.0]]).double()) == [1, 2]


def test_the_residual_is_normalised_and_falls_back_to_the_target() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.1, 0.6, 0.3]).double()
    assert residual(p, q).tolist() == [1.0, 0.0, 0.0]
    assert torch.equal(residual(p, p), p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_inverse_cdf_never_returns_a_token_of_probability_zero(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        probs = torch.rand(7, generator=generator, dtype=dtype) * (torch.rand(7, generator=generator) < 0.4)
        probs[int(torch.randint(7, (1,), generator=generator))] = 0.3
        edges = (probs.double().cumsum(-1) / probs.double().sum()).tolist()
        for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53, *(edge for edge in edges if edge < 1.0)):
            assert float(probs[inverse_cdf(probs, u)]) > 0.0


def test_sparse_draft_distributions_become_dense_ones() -> None:
    ids = np.array([[3, 0], [1, 1]], dtype=np.int32)
    dense = expand_support(ids, np.array([[0.75, 0.25], [1.0, 0.0]], dtype=np.float32), 4)
    assert dense.tolist() == [[0.25, 0.0, 0.0, 0.75], [0.0, 1.0, 0.0, 0.0]]
