"""Cost tables interpolate, stay monotone, follow what is measured, and keep unlike rounds apart."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.policies.cells import bucket
from specserve.policies.costs import CostTable, measured_costs, unmeasured_costs


def test_a_measured_table_interpolates_and_extends() -> None:
    table = measured_costs(
        [(1, 1, 10.0), (1, 11, 20.0)], {"draft": [(1, 1, 1.0), (1, 4, 4.0), (8, 1, 2.0), (8, 4, 8.0)]}
    )
    assert table.score_ms(1, 6) == pytest.approx(15.0)
    assert table.score_ms(1, 1024) > 900.0
    assert table.draft_ms("draft", 1, 2) == pytest.approx(2.0, rel=0.03)
    assert table.draft_ms("draft", 8, 4) == pytest.approx(8.0, rel=0.03)
    assert table.draft_ms("draft", 0, 4) == 0.0
    assert table.draft_ms("draft", 4, 0) == 0.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 900), st.floats(0.01, 1e4)), max_size=20))
def test_costs_stay_monotone_and_positive_whatever_is_measured(seen: list[tuple[int, int, float]]) -> None:
    table = unmeasured_costs()
    for requests, draft_tokens, ms in seen:
        table.score.observe(requests, draft_tokens, ms)
    for requests in (1, 4, 33):
        values = [table.score_ms(requests, requests + drafts) for drafts in range(0, 600, 7)]
        assert all(a <= b * (1.0 + 1e-9) for a, b in pairwise(values))
        assert all(value > 0.0 for value in values)


def test_a_table_learns_a_machine_whose_cost_grows_with_tokens() -> None:
    table = unmeasured_costs()
    for _ in range(200):
        for tokens in (1, 2, 4, 8, 16, 32):
            table.score.observe(1, tokens - 1, 3.0 * tokens)
    for tokens in (1, 2, 4, 8, 16, 32):
        assert table.score_ms(1, tokens) == pytest.approx(3.0 * tokens, rel=0.05)


def test_nonsense_measurements_are_ignored() -> None:
    table = unmeasured_costs()
    for ms in (0.0, -1.0, float("nan"), float("inf")):
        table.score.observe(1, 3, ms)
        table.draft("draft").observe(3, 3, ms)
    assert not table.score.rows
    assert not table.draft("draft").seen.cells


def staircase(num_requests: int, tokens: int) -> float:
    """16 requests: 25 ms plain, 60 ms with four drafts each; one request: 10 ms, 11 ms."""
    return 9.75 + 0.25 * min(tokens, 8) + 0.547 * max(tokens - 8, 0) + 0.593 * (num_requests - 1)


def warmed_up() -> CostTable:
    """Return what the service measures before the first request."""
    table = unmeasured_costs()
    for _ in range(2):
        for requests in (1, 4, 16):
            for each in (1, 2, 3, 5, 9):
                table.score.observe(requests, requests * (each - 1), staircase(requests, requests * each))
    return table


@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_predictions_come_from_rounds_of_similar_batch_sizes(num_requests: int) -> None:
    table = warmed_up()
    for each in (1, 2, 4, 5, 7, 9):
        tokens = num_requests * each
        assert table.score_ms(num_requests, tokens) == pytest.approx(staircase(num_requests, tokens), rel=0.06)
    # As many tokens in a batch of another size cost something else, and keep doing so.
    assert table.score_ms(16, 16) > 1.3 * table.score_ms(4, 16)


def test_batch_sizes_in_between_are_told_from_their_neighbours() -> None:
    table = warmed_up()
    for num_requests in (2, 3, 6, 8, 12, 24):
        for each in (1, 3, 5):
            tokens = num_requests * each
            assert table.score_ms(num_requests, tokens) == pytest.approx(staircase(num_requests, tokens), rel=0.2)


def test_a_slower_machine_is_slower_for_every_round_not_only_for_those_it_ran() -> None:
    table, noise = warmed_up(), random.Random(3)
    for speed in (1.0, 1.6):
        for _ in range(300):
            table.score.observe(4, 12, staircase(4, 16) * speed * noise.lognormvariate(0.0, 0.05))
    ratio = table.score_ms(4, 16) / table.score_ms(4, 4)
    assert ratio == pytest.approx(staircase(4, 16) / staircase(4, 4), rel=0.08)
    assert table.score_ms(4, 16) == pytest.approx(1.6 * staircase(4, 16), rel=0.08)


def test_an_interrupted_measurement_does_not_stick() -> None:
    table = warmed_up()
    table.score.observe(8, 0, 4.0 * staircase(8, 8))
    for _ in range(3):
        table.score.observe(8, 0, staircase(8, 8))
    assert table.score_ms(8, 8) == pytest.approx(staircase(8, 8), rel=0.1)


def test_catching_up_on_a_context_is_not_taken_for_the_cost_of_drafting() -> None:
    costs = unmeasured_costs().draft("draft")
    for behind in (1000, 4, 300, 5, 2000, 6):
        for gamma in (2, 4):
            costs.observe(gamma, 2.0 * gamma, 1.0 + gamma + 0.01 * behind, behind)
    for gamma in (2, 4):
        assert costs.at(gamma, 2.0 * gamma) == pytest.approx(1.0 + gamma, rel=0.03)
    assert costs.catch_up_ms == pytest.approx(0.01, rel=0.03)


def test_size_classes_are_exact_to_eight_and_grow_with_size() -> None:
    classes = [bucket(size) for size in range(2000)]
    assert classes[:9] == list(range(9))
    assert classes == sorted(classes)
    assert all(b - a <= 1 for a, b in pairwise(classes))
    assert bucket(144) == bucket(150) != bucket(128)
