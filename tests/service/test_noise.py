import math

import pytest
import torch

from specserve.service.noise import Role, gumbel_noise, gumbel_rows, uniform


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    first, again = gumbel_noise(7, 3, 50), gumbel_noise(7, 3, 50)
    assert first.dtype == torch.float64
    assert torch.equal(first, again)
    assert not torch.equal(first, gumbel_noise(8, 3, 50))
    assert not torch.equal(first, gumbel_noise(7, 4, 50))
    assert not torch.equal(gumbel_noise(3, 7, 50), gumbel_noise(7, 3, 50))


def test_noise_is_pinned_so_that_a_new_version_replays_an_old_round() -> None:
    expected = torch.tensor([3.0620, -0.7939, -0.8059, 0.5705, -0.1024], dtype=torch.float64)
    assert torch.allclose(gumbel_noise(1, 2, 5), expected, atol=1e-4)
    assert uniform(1, 2, Role.DRAFT) == pytest.approx(0.20650054369739224, abs=1e-15)


@pytest.mark.parametrize("vocab_size", [5, 97, 4096])
def test_a_row_does_not_depend_on_the_batch_around_it(vocab_size: int) -> None:
    seeds, positions = [5, -1, 2**63, 2**70, 0, 5, 9], [0, 1, 2, 3, 10**6, 1, 1]
    rows = gumbel_rows(seeds, positions, vocab_size)
    assert rows.shape == (7, vocab_size)
    for row, seed, position in zip(rows, seeds, positions, strict=True):
        assert torch.equal(row, gumbel_noise(seed, position, vocab_size))
    assert torch.equal(gumbel_rows(seeds[::-1], positions[::-1], vocab_size), rows.flip(0))


def test_a_smaller_vocabulary_sees_the_first_numbers_of_a_larger_one() -> None:
    assert torch.equal(gumbel_noise(1, 1, 300)[:77], gumbel_noise(1, 1, 77))


def test_no_rows_give_an_empty_tensor() -> None:
    assert gumbel_rows([], [], 8).shape == (0, 8)


def test_roles_and_salts_are_different_streams() -> None:
    assert len({uniform(1, 1, role) for role in Role}) == len(Role)
    assert not torch.equal(gumbel_rows([1], [1], 9), gumbel_rows([1], [1], 9, salt=1))


def test_uniforms_are_strictly_inside_the_unit_interval_and_gumbels_finite() -> None:
    assert all(0.0 < uniform(seed, 0, Role.ACCEPT) < 1.0 for seed in range(2000))
    assert torch.isfinite(gumbel_rows(range(50), range(50), 4096)).all()


def test_uniforms_and_gumbels_are_uniform_and_roles_independent() -> None:
    """Chi-square over 16 bins (or 4 x 4 cells): 15 degrees of freedom, 2 * 31.5 + 15 = 60.2 has a tail below 1e-6.

    Six statistics, so a fresh hash of ideal randomness would fail with probability below 6e-6; this one is fixed.
    """
    size = 16_384
    gumbel = gumbel_rows(range(16), [3] * 16, 1024).flatten()
    samples = {
        "along the vocabulary": torch.exp(-torch.exp(-gumbel)),
        "along seeds": torch.exp(-torch.exp(-gumbel_rows(range(size), [5] * size, 1)[:, 0])),
        "along positions": torch.exp(-torch.exp(-gumbel_rows([5] * size, range(size), 1)[:, 0])),
    }
    roles = {
        role: torch.tensor([uniform(11, position, role) for position in range(size)], dtype=torch.float64)
        for role in Role
    }
    cells = {name: (values * 16).long() for name, values in samples.items()}
    for one, other in ((Role.ACCEPT, Role.RESIDUAL), (Role.ACCEPT, Role.DRAFT), (Role.RESIDUAL, Role.DRAFT)):
        cells[f"{one.name} and {other.name}"] = (roles[one] * 4).long() * 4 + (roles[other] * 4).long()
    for name, values in cells.items():
        counts = torch.bincount(values, minlength=16).double()
        assert float(((counts - size / 16) ** 2 / (size / 16)).sum()) < 60.2, name


def test_gumbel_max_draws_from_the_distribution() -> None:
    """20 000 draws, five standard deviations in 3 cells: false alarm below 2e-6 for ideal noise; seeds are fixed."""
    probs, draws = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), 20_000
    tokens = (probs.log() + gumbel_rows(range(draws), [17] * draws, 3)).argmax(-1)
    for prob, count in zip(probs.tolist(), torch.bincount(tokens, minlength=3).tolist(), strict=True):
        assert abs(count - draws * prob) < 5 * math.sqrt(draws * prob * (1 - prob))
