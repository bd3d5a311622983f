"""Replicas follow load up at once and down with care, within bounds; a kind nobody wants has none."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.policies.scaling import Bounds, CellLoad, ProposerLoad, cells_wanted, proposers_wanted

FULL = CellLoad(32, 10, 32)
IDLE = CellLoad(0, 0, 32)
HALF = CellLoad(16, 0, 32)
SOME = Bounds(0, 8)
DRAFT = ProposerLoad(wanted=True, busy=0.5, num_cells=4, asked_s=100.0)


def test_cells_follow_the_queue_and_the_round_time_up_and_leave_one_by_one() -> None:
    bounds = Bounds(1, 8)
    assert cells_wanted([FULL], bounds) == 2
    assert cells_wanted([replace(IDLE, round_over_objective=2.5)], bounds) == 3
    assert cells_wanted([HALF, HALF], bounds) == 2
    assert cells_wanted([IDLE, IDLE, IDLE], bounds) == 2
    assert cells_wanted([IDLE], bounds) == 1
    assert cells_wanted([], bounds) == 1


def test_a_kind_that_no_cell_wants_or_nobody_asked_for_goes_and_comes_back_when_asked() -> None:
    assert proposers_wanted(DRAFT, 1, 101.0, SOME) == 1
    assert proposers_wanted(replace(DRAFT, wanted=False), 3, 101.0, SOME) == 0
    assert proposers_wanted(DRAFT, 1, 200.0, SOME) == 0
    assert proposers_wanted(DRAFT, 1, 200.0, Bounds(1, 8)) == 1
    assert proposers_wanted(DRAFT, 0, 101.0, SOME) == 1


@pytest.mark.parametrize(("busy", "now", "wanted"), [(0.9, 1, 2), (3.0, 1, 4), (9.0, 2, 4), (0.9, 2, 2), (0.4, 2, 1)])
def test_proposers_follow_the_drafts_and_are_never_more_than_cells(busy: float, now: int, wanted: int) -> None:
    assert proposers_wanted(replace(DRAFT, busy=busy), now, 101.0, SOME) == wanted


CELL = st.builds(CellLoad, st.integers(0, 64), st.integers(0, 500), st.integers(1, 64), st.floats(0.0, 20.0))


@settings(max_examples=200, deadline=None)
@given(st.lists(CELL, max_size=10), st.integers(0, 5), st.integers(0, 10))
def test_bounds_hold_and_one_decision_is_followed_by_none_that_undoes_it(
    cells: list[CellLoad], least: int, more: int
) -> None:
    bounds = Bounds(least, least + more)
    wanted = cells_wanted(cells, bounds)
    assert bounds.least <= wanted <= bounds.most
    if cells and wanted > len(cells):
        spread = sum(max((c.num_running + c.num_waiting) / c.num_places, c.round_over_objective) for c in cells)
        after = [CellLoad(0, 0, 1, spread / wanted)] * wanted
        assert cells_wanted(after, bounds) >= wanted


@settings(max_examples=200, deadline=None)
@given(st.floats(0.0, 20.0), st.integers(0, 10), st.integers(1, 10))
def test_a_constant_load_settles_on_one_number_of_proposers(busy: float, now: int, num_cells: int) -> None:
    load, seen = replace(DRAFT, busy=busy, num_cells=num_cells), [now]
    for _ in range(20):
        seen.append(proposers_wanted(load, seen[-1], 101.0, SOME))
    assert len(set(seen[12:])) == 1
