"""Acceptance estimates learn from tested positions only."""

import pytest

from specserve.policies.acceptance import PRIOR_ACCEPTANCE, Acceptance, Evidence, chances_of, survival


def test_only_tested_positions_teach() -> None:
    acceptance = Acceptance()
    acceptance.learn("draft", "default", Evidence(), asked=4, drafted=4, accepted=1)
    shared = acceptance.shared[("draft", "default")]
    assert [(c.yes, c.total) for c in shared.accepted] == [(1.0, 1.0), (0.0, 1.0)]
    assert [(c.yes, c.total) for c in shared.drafted] == [(1.0, 1.0)] * 4
    assert acceptance.rate("default") < PRIOR_ACCEPTANCE
    assert acceptance.rate("flex") == PRIOR_ACCEPTANCE


def test_an_empty_draft_teaches_that_drafts_are_rare_not_that_they_are_wrong() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.learn("prompt_lookup", "default", Evidence(), asked=4, drafted=0, accepted=0)
    drafted, accepted = acceptance.shared_means("prompt_lookup", "default", 4)
    assert drafted[0] < 0.1
    assert accepted[0] == PRIOR_ACCEPTANCE


def test_survival_falls_along_the_draft_and_follows_the_requests_own_luck() -> None:
    acceptance, good, bad = Acceptance(), Evidence(), Evidence()
    for _ in range(30):
        acceptance.learn("draft", "default", good, 4, 4, 4)
        acceptance.learn("draft", "default", bad, 4, 4, 0)
    means = acceptance.shared_means("draft", "default", 4)
    lucky, unlucky = survival(chances_of(means, good, 0), 4), survival(chances_of(means, bad, 0), 4)
    assert list(lucky.accepted) == sorted(lucky.accepted, reverse=True)
    assert all(d >= a for d, a in zip(lucky.drafted, lucky.accepted, strict=True))
    assert lucky.accepted[0] > 0.7 > 0.4 > unlucky.accepted[0]
    later = survival(chances_of(means, bad, 1000), 4)
    assert later.accepted[0] == pytest.approx(survival(chances_of(means, None, 0), 4).accepted[0], rel=0.01)
