"""Acceptance estimates learn from tested positions only, and tell hard text from weak proposers."""

import pytest

from specserve.policies.acceptance import Acceptance, Ease, History
from specserve.policies.strengths import PRIOR_ACCEPTANCE, Shared


def draft(shared: Shared, ease: Ease, history: History, asked: int, drafted: int, accepted: int, number: int) -> None:
    """Let one draft of one request teach everything it can."""
    standing = ease.standing(history)
    curve = shared.curve(standing, asked)
    tested = min(drafted, accepted + 1)
    shared.tally(curve, ease.rating.value, asked, drafted, tested, accepted)
    ease.learn(history, shared, curve, drafted, tested, accepted, number)
    shared.settle()


def test_only_tested_positions_teach() -> None:
    shared = Shared()
    draft(shared, Ease(), History(), asked=4, drafted=4, accepted=1, number=1)
    assert [(s.yes, s.no) for s in shared.accepted] == [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0)]
    assert (shared.found.yes, shared.found.no) == (1.0, 0.0)
    assert shared.longer[1:] == [[1.0, 1.0]] * 3


def test_an_empty_draft_teaches_that_drafts_are_rare_not_that_they_are_wrong() -> None:
    shared = Shared()
    for _ in range(50):
        draft(shared, Ease(), History(), asked=4, drafted=0, accepted=0, number=1)
    curve = shared.curve(0, 4)
    assert curve.drafted[0] < 0.1
    assert curve.right[0] == pytest.approx(PRIOR_ACCEPTANCE)


def test_chances_fall_along_the_draft_and_follow_the_requests_own_luck() -> None:
    shared, good, bad = Shared(), Ease(), Ease()
    good_history, bad_history = History(), History()
    for number in range(30):
        draft(shared, good, good_history, 4, 4, 4, number)
        draft(shared, bad, bad_history, 4, 4, 0, number)
    lucky = shared.curve(good.standing(good_history), 4)
    unlucky = shared.curve(bad.standing(bad_history), 4)
    assert lucky.accepted == sorted(lucky.accepted, reverse=True)
    assert all(d >= a for d, a in zip(lucky.drafted, lucky.accepted, strict=True))
    assert lucky.accepted[0] > 0.7 > 0.4 > unlucky.accepted[0]
    before = abs(bad.rating.value)
    bad.fade(1000)
    assert abs(bad.rating.value) < 0.01 * before


def test_a_proposer_asked_on_hard_text_is_not_taken_for_a_weak_one() -> None:
    strong, weak = Shared(), Shared()
    easy, hard = Ease(), Ease()
    for number in range(40):
        draft(strong, easy, History(), 4, 4, 4 if number % 2 else 2, number)
        draft(strong, hard, History(), 4, 4, number % 5 == 0, number)
    same_text = strong.curve(hard.standing(None), 4).right[0]
    for number in range(40):
        draft(weak, hard, History(), 4, 4, number % 5 == 0, number)
    assert same_text < 0.5 < strong.curve(0, 4).right[0]
    assert weak.curve(0, 4).right[0] > same_text


def test_the_rate_of_a_tier_is_accepted_over_tested() -> None:
    acceptance = Acceptance()
    assert acceptance.rate("flex") == PRIOR_ACCEPTANCE
    acceptance.count("default", 4, 1)
    assert acceptance.rate("default") == 0.25
    assert acceptance.rate("flex") == PRIOR_ACCEPTANCE
