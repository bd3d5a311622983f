"""The guard ends a canary for the reason it names, and never on too little evidence."""

import pytest

from specserve.deployments.guard import Tally, verdict
from specserve.deployments.rollout import Guard


def tally(tpot_ms: float, count: int = 20, failed: int = 0, tested: int = 0, accepted: int = 0) -> Tally:
    made = Tally(tested=tested, accepted=accepted)
    for _ in range(count):
        made.end(False, tpot_ms)
    for _ in range(failed):
        made.end(True)
    return made


@pytest.mark.parametrize(
    ("guard", "canary", "words"),
    [
        (Guard(), tally(12.0), None),
        (Guard(), tally(12.0, failed=1), None),
        (Guard(), tally(12.0, failed=2), "9.1% of the canary's requests failed"),
        (Guard(), tally(16.0), "over 1.25 x"),
        (Guard(tpot_p95_ratio=None), tally(16.0), None),
        (Guard(tpot_p95_ms=15.0, tpot_p95_ratio=None), tally(16.0), "over 15.0 ms"),
        (Guard(acceptance_floor=0.3), tally(12.0, tested=100, accepted=20), "acceptance is 0.20, under 0.30"),
        (Guard(acceptance_floor=0.3), tally(12.0, tested=100, accepted=40), None),
        (Guard(acceptance_floor=0.3), tally(12.0, tested=10, accepted=0), None),
        (Guard(tpot_p95_ms=1.0, min_requests=21), tally(16.0), None),
        (Guard(error_rate=0.0, min_requests=1), tally(16.0, count=0, failed=1), "failed"),
    ],
)
def test_the_verdict_names_what_is_too_bad(guard: Guard, canary: Tally, words: str | None) -> None:
    said = verdict(guard, canary, tally(12.0))
    assert (said is None) == (words is None)
    assert words is None or (said is not None and words in said)


def test_the_95th_percentile_is_that_of_the_requests_to_five_percent() -> None:
    mixed = tally(10.0, 95).plus(tally(100.0, 5))
    worse = tally(10.0, 94).plus(tally(100.0, 6))
    assert mixed.tpot_p95_ms == pytest.approx(10.0, rel=0.05)
    assert worse.tpot_p95_ms == pytest.approx(100.0, rel=0.05)
    assert Tally().tpot_p95_ms is None
