"""When traffic rises, drafts shorten before the queue grows, not after. Everything is drawn from seeds."""

from statistics import fmean

import pytest
from support.machines import COPY, OPEN
from support.ramps import SCHEDULE, climb, mean_waiting, p95_tpot_ms

from specserve.policies.document import simple_policy
from specserve.policies.simulation import Round, Workload

SEEDS = range(3)


def waiting_when_drafting_ends(rounds: list[Round]) -> float:
    """Return how many requests were waiting in the five seconds before drafts ended."""
    plain = [not any(choice.gamma for choice in done.choices) for done in rounds]
    end = next(
        place for place, done in enumerate(rounds) if done.start_s > 10.0 and sum(plain[place : place + 20]) >= 18
    )
    return mean_waiting([done for done in rounds[: end + 1] if done.start_s > rounds[end].start_s - 5.0])


def test_on_a_ramp_a_schedule_that_looks_ahead_stops_drafting_before_the_queue_grows() -> None:
    late, early = ([climb(SCHEDULE, OPEN, ahead_s, seed) for seed in SEEDS] for ahead_s in (0.0, 2.0))
    assert [len(served) for _, served in late] == [len(served) for _, served in early]
    before, after = ([waiting_when_drafting_ends(rounds) for rounds, _ in runs] for runs in (early, late))
    assert max(before) < 1.0
    assert all(sooner <= later for sooner, later in zip(before, after, strict=True))
    assert fmean(before) < 0.7 * fmean(after)
    assert fmean(mean_waiting(rounds) for rounds, _ in early) < 0.85 * fmean(mean_waiting(rounds) for rounds, _ in late)
    assert fmean(p95_tpot_ms(served) for _, served in early) < fmean(p95_tpot_ms(served) for _, served in late)


@pytest.mark.parametrize("workload", [OPEN, COPY], ids=["open", "copy"])
def test_the_adaptive_law_loses_nothing_by_looking_ahead(workload: Workload) -> None:
    policy = simple_policy("adaptive")
    without, ahead = (fmean(p95_tpot_ms(climb(policy, workload, s, seed)[1]) for seed in SEEDS) for s in (0.0, 2.0))
    assert ahead < 1.05 * without
