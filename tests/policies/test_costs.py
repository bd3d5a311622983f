"""Cost tables interpolate, stay monotone and follow what is measured."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.policies.costs import measured_costs, unmeasured_costs


def test_a_measured_table_interpolates_and_extends() -> None:
    table = measured_costs(
        [(1, 1, 10.0), (1, 11, 20.0)], {"draft": [(1, 1, 1.0), (1, 4, 4.0), (8, 1, 2.0), (8, 4, 8.0)]}
    )
    assert table.score_ms(1, 6) == pytest.approx(15.0)
    assert table.score_ms(1, 1024) > 900.0
    assert table.draft_ms("draft", 1, 2) == pytest.approx(2.0)
    assert table.draft_ms("draft", 8, 4) == pytest.approx(8.0)
    assert table.draft_ms("draft", 0, 4) == 0.0
    assert table.draft_ms("draft", 4, 0) == 0.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 900), st.floats(0.01, 1e4)), max_size=20))
def test_costs_stay_monotone_whatever_is_measured(seen: list[tuple[int, int, float]]) -> None:
    table = unmeasured_costs()
    for requests, tokens, ms in seen:
        table = table.observe_score(requests, tokens, ms)
    values = table.score.values(4)
    assert values == sorted(values)
    assert all(value > 0.0 for value in values)


def test_a_table_learns_a_machine_whose_cost_grows_with_tokens() -> None:
    table = unmeasured_costs()
    for _ in range(200):
        for tokens in (1, 2, 4, 8, 16, 32):
            table = table.observe_score(1, tokens, 3.0 * tokens)
    for tokens in (1, 2, 4, 8, 16, 32):
        assert table.score_ms(1, tokens) == pytest.approx(3.0 * tokens, rel=0.05)


def test_nonsense_measurements_are_ignored() -> None:
    table = unmeasured_costs()
    for ms in (0.0, -1.0, float("nan"), float("inf")):
        assert table.observe_score(1, 4, ms) == table
