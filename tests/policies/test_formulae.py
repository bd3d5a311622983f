"""The closed formulae equal the published tables."""

import pytest

from specserve.policies.formulae import best_gamma, expected_tokens_per_round, speedup

GAMMAS = (2, 4, 7, 10)
EXPECTED = {
    0.5: (1.75, 1.94, 1.99, 2.00),
    0.6: (1.96, 2.31, 2.46, 2.49),
    0.7: (2.19, 2.77, 3.14, 3.27),
    0.8: (2.44, 3.36, 4.16, 4.57),
    0.9: (2.71, 4.10, 5.70, 6.86),
}
SPEEDUP = {
    0.6: (1.78, 1.92, 1.82, 1.66),
    0.7: (1.99, 2.31, 2.33, 2.18),
    0.8: (2.22, 2.80, 3.08, 3.05),
    0.9: (2.46, 3.41, 4.22, 4.57),
}


def test_expected_tokens_equal_the_table() -> None:
    for alpha, row in EXPECTED.items():
        for gamma, value in zip(GAMMAS, row, strict=True):
            assert expected_tokens_per_round(alpha, gamma) == pytest.approx(value, abs=0.0051), (alpha, gamma)


def test_speedups_equal_the_table() -> None:
    for alpha, row in SPEEDUP.items():
        for gamma, value in zip(GAMMAS, row, strict=True):
            assert speedup(alpha, gamma, 0.05) == pytest.approx(value, abs=0.0051), (alpha, gamma)


def test_ends_are_exact_and_nonsense_is_refused() -> None:
    assert expected_tokens_per_round(1.0, 5) == 6.0
    assert expected_tokens_per_round(0.0, 5) == 1.0
    for call in (
        lambda: expected_tokens_per_round(1.1, 2),
        lambda: expected_tokens_per_round(0.5, -1),
        lambda: speedup(0.5, 1, -0.1),
    ):
        with pytest.raises(ValueError, match="must"):
            call()


def test_best_gamma_is_plain_when_drafts_never_pay() -> None:
    assert best_gamma(0.1, 0.5, 10) == 0
    assert best_gamma(1.0, 0.0, 10) == 10
    assert best_gamma(0.7, 0.05, 12) in (5, 6)
