"""A text is followed in its prediction, found again after an edit, and counted the same however it is cut."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.service.alignment import Alignment

OLD = tuple(range(100, 160))
INSERTED = (1, 2, 3)
EDITS = {
    "nothing": OLD,
    "one token replaced": (*OLD[:20], 1, *OLD[21:]),
    "one replaced by three": (*OLD[:20], *INSERTED, *OLD[21:]),
    "three inserted": (*OLD[:20], *INSERTED, *OLD[20:]),
    "three deleted": (*OLD[:20], *OLD[23:]),
    "forty deleted": (*OLD[:10], *OLD[50:]),
    "another beginning": (*INSERTED, *OLD),
    "two edits": (*OLD[:15], *INSERTED, *OLD[15:30], 9, *OLD[31:]),
}


def missed(old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """Return how many tokens of `new` were not the one expected before them."""
    alignment, count = Alignment(old), 0
    for token in new:
        count += alignment.upcoming(1) != (token,)
        alignment.extend((token,))
    return count


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_costs_its_own_tokens_and_at_most_two_more_for_finding_the_place(edit: str) -> None:
    new = EDITS[edit]
    own = len([token for token in new if token not in OLD])
    edits = {"nothing": 0, "two edits": 2}.get(edit, 1)
    assert missed(OLD, new) <= own + 2 * edits
    if edit == "nothing":
        assert missed(OLD, new) == 0


def test_the_nearest_place_ahead_is_preferred_to_one_behind_and_one_far_ahead() -> None:
    block = (1, 2, 3, 4, 5)
    old = (*block, 10, *block, 11, *block, 12)
    alignment = Alignment(old)
    alignment.extend((*block, 10, 99, 3, 4))
    assert alignment.upcoming(2) == (5, 11)


def test_a_place_behind_is_found_when_there_is_none_ahead() -> None:
    alignment = Alignment(OLD)
    alignment.extend((*OLD[:40], 1, *OLD[5:8]))
    assert alignment.upcoming(2) == OLD[8:10]


def test_four_tokens_behind_outdo_single_ones_ahead() -> None:
    block = (100, 101, 102, 103, 104, 105)
    alignment = Alignment((*block, 105, 200, 104, 201, 103, 202, 102, 203, 101, 204, 100))
    alignment.extend((*block, 1, 101, 102))
    assert alignment.upcoming(2) == (203, 101)
    alignment.extend((103, 104))
    assert alignment.upcoming(2) == (105, 105)


def test_one_common_token_far_ahead_is_no_place() -> None:
    alignment = Alignment((*range(100, 110), *range(200, 260), 7, 8))
    alignment.extend((*range(100, 110), 1, 7))
    assert alignment.upcoming(4) == ()


def test_nothing_is_expected_after_the_end_and_where_nothing_matches() -> None:
    alignment = Alignment(OLD)
    alignment.extend(OLD)
    assert alignment.upcoming(5) == ()
    alignment.extend((1, 2, 3))
    assert alignment.upcoming(5) == ()
    assert Alignment(()).upcoming(5) == ()


def test_a_prediction_that_came_true_appeared_whole_and_one_that_did_not_appeared_nowhere() -> None:
    true, false = Alignment(OLD), Alignment(tuple(range(500, 560)))
    for alignment in (true, false):
        alignment.extend(OLD)
    assert true.num_appeared == len(OLD)
    assert false.num_appeared == 0


@pytest.mark.parametrize(("edit", "appeared"), [("three inserted", 60), ("three deleted", 57), ("forty deleted", 20)])
def test_what_an_edit_left_appeared(edit: str, appeared: int) -> None:
    alignment = Alignment(OLD)
    alignment.extend(EDITS[edit])
    assert alignment.num_appeared == appeared


TOKENS = st.lists(st.integers(0, 4), max_size=40).map(tuple)


@given(TOKENS, TOKENS, st.randoms(use_true_random=False))
def test_the_count_has_both_bounds_and_does_not_depend_on_the_cuts(
    old: tuple[int, ...], new: tuple[int, ...], chance: random.Random
) -> None:
    whole, cut = Alignment(old), Alignment(old)
    whole.extend(new)
    place = 0
    while place < len(new):
        step = chance.randint(1, 5)
        cut.extend(new[place : place + step])
        place += step
    assert cut.num_appeared == whole.num_appeared <= min(len(old), len(new))
    upcoming = whole.upcoming(5)
    assert upcoming == cut.upcoming(5)
    assert any(old[start : start + len(upcoming)] == upcoming for start in range(len(old) + 1))
