"""What holds for every policy: load, weights, objectives, prices of coming back, dwell and probes."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machines import MACHINE, constant

from specserve.policies.arrivals import Arrivals, arrived
from specserve.policies.costs import measured_costs
from specserve.policies.document import Bounds, Limits, Policy, Rule, TierPolicy, simple_policy
from specserve.policies.laws import scheduled_gamma
from specserve.policies.planning import plan_round
from specserve.policies.simulation import Machine, Round, simulate
from specserve.policies.state import Observation, PlanState, RequestObservation
from specserve.policies.switching import Switch, first_interval

DRAFT = frozenset({"draft"})


@st.composite
def falling_schedules(draw: st.DrawFn) -> TierPolicy:
    """Rules that bound load from above only, in the order of their gammas: what an operator writes to shed load."""
    gammas = sorted(draw(st.lists(st.integers(0, 12), min_size=1, max_size=5)), reverse=True)
    bounds = st.builds(Bounds, above=st.none(), below=st.none() | st.floats(0.5, 20.0))
    accepted = st.builds(Bounds, above=st.none() | st.floats(0.0, 0.9), below=st.none())
    rules = tuple(Rule(gamma, draw(bounds), draw(bounds), draw(accepted)) for gamma in gammas[:-1])
    return TierPolicy("schedule", max_gamma=12, rules=rules, otherwise=gammas[-1])


@settings(max_examples=300, deadline=None)
@given(falling_schedules(), st.floats(0, 30), st.floats(0, 30), st.integers(1, 30), st.integers(0, 30), st.floats(0, 1))
def test_more_load_never_raises_what_a_falling_schedule_says(
    tier: TierPolicy, qps: float, more_qps: float, batch: int, more: int, acceptance: float
) -> None:
    assert scheduled_gamma(tier, qps + more_qps, batch + more, acceptance) <= scheduled_gamma(
        tier, qps, batch, acceptance
    )


@settings(max_examples=100, deadline=None)
@given(
    falling_schedules(),
    st.integers(1, 12),
    st.integers(0, 12),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(0, 40),
    st.sampled_from([0.0, 2.0]),
)
def test_more_load_never_raises_a_requests_gamma_under_schedule(
    tier: TierPolicy, num: int, more: int, arrivals: int, later: int, limit: int, ahead_s: float
) -> None:
    policy = Policy(tiers=(("default", tier),), limits=Limits(limit, forecast_s=ahead_s))

    def gammas(num_requests: int, num_arrivals: int) -> list[int]:
        seen = Arrivals()
        for _ in range(num_arrivals):
            seen = arrived(seen, 0.0)
        requests = tuple(RequestObservation(f"r{i:02d}") for i in range(num_requests))
        plan, _ = plan_round(Observation(requests, DRAFT), policy, PlanState(arrivals=seen))
        return [choice.gamma for choice in plan.choices]

    quiet, busy = gammas(num, arrivals), gammas(num + more, arrivals + later)
    assert all(under <= before for before, under in zip(quiet, busy, strict=False))


def shared_round(tiers: dict[str, TierPolicy], limit: int = 256, num: int = 8, **changes: int) -> dict[str, int]:
    """Return the draft tokens that each tier's requests get, `num` requests in all, once costs are known."""
    table = measured_costs(
        [(n, n * (1 + k), 10.0 + 0.3 * n * k) for n in (1, 8) for k in (0, 1, 2, 4, 8) for _ in range(9)],
        {"draft": [(n, k, 0.05 * k) for n in (1, 8) for k in (1, 8)]},
    )
    policy = Policy(tiers=tuple(tiers.items()), limits=Limits(limit))
    names = sorted(tiers)
    requests = tuple(RequestObservation(f"r{i}", names[i % len(names)], **changes) for i in range(num))
    plan, _ = plan_round(Observation(requests, DRAFT), policy, PlanState(costs=table))
    found = dict.fromkeys(names, 0)
    for request, choice in zip(requests, plan.choices, strict=True):
        found[request.tier] += choice.gamma
    return found


def test_a_heavier_tier_is_served_first_from_the_rounds_budget() -> None:
    equal = shared_round({"default": TierPolicy(), "priority": TierPolicy()}, limit=8)
    heavier = shared_round({"default": TierPolicy(), "priority": TierPolicy(weight=8.0)}, limit=8)
    assert abs(equal["default"] - equal["priority"]) <= 1
    assert heavier == {"default": 0, "priority": 8}


def test_a_tiers_objective_shortens_the_drafts_of_all_who_lengthen_its_rounds() -> None:
    free = shared_round({"default": TierPolicy(), "priority": TierPolicy(max_gamma=0)})
    bound = shared_round({"default": TierPolicy(), "priority": TierPolicy(max_gamma=0, tpot_slo_ms=11.5)})
    assert 0 < bound["default"] < free["default"]


def test_a_long_context_that_the_proposer_has_not_seen_is_read_only_where_enough_output_is_left() -> None:
    def first(remaining: int, catch_up_ms: float) -> int:
        state = PlanState(costs=measured_costs([(1, 1 + k, 10.0 + 0.1 * k) for k in (0, 1, 4, 8) for _ in range(9)]))
        state.costs.draft("draft").plane = [0.1, 0.1, 0.0, catch_up_ms]
        request = RequestObservation("r", context_tokens=4000, remaining_tokens=remaining)
        plan, _ = plan_round(Observation((request,), DRAFT), simple_policy("adaptive"), state)
        return plan.choices[0].gamma

    assert first(remaining=4, catch_up_ms=0.05) == 0
    assert first(remaining=400, catch_up_ms=0.05) > 0
    assert first(remaining=4, catch_up_ms=0.0001) > 0


GAINS = st.lists(st.floats(-0.6, 0.6), min_size=20, max_size=300)
LIMITS = st.builds(
    lambda dwell, gain, duty: Limits(min_gain=gain, min_dwell_rounds=dwell, probe_duty=duty),
    st.integers(0, 40),
    st.floats(0.0, 0.2),
    st.sampled_from([0.0, 0.01, 0.05, 0.2]),
)


@settings(max_examples=200, deadline=None)
@given(GAINS, LIMITS, st.lists(st.booleans(), min_size=300, max_size=300), st.floats(-0.1, 0.5))
def test_speculation_stays_off_for_the_dwell_and_probes_keep_to_their_share(
    gains: list[float], limits: Limits, lucky: list[bool], loss: float
) -> None:
    switch = Switch()
    changes, probes = [], []
    was = switch.speculating
    for number, gain in enumerate(gains, 1):
        speculating = switch.turn(gain, 1, number, limits, 0.01 * number)
        if speculating != was:
            changes.append((number, speculating))
        if not speculating and switch.probe_due(number, limits):
            probes.append(number)
            switch.probed(number, loss, limits)
        switch.heard(4, 4 if lucky[number - 1] else 0, number)
        was = speculating
    for (since, _), (until, on) in pairwise(changes):
        assert not on or until - since >= limits.min_dwell_rounds
    assert limits.probe_duty > 0.0 or not probes
    for earlier, later in pairwise(probes):
        assert later - earlier >= first_interval(limits) >= 1.0 / limits.probe_duty - 1e-9


@pytest.mark.parametrize(("gain", "least", "most"), [(0.01, 64, 10_000), (0.08, 17, 63), (0.3, 16, 16)])
def test_a_gain_below_the_least_waits_for_the_rest_a_clear_one_for_one_more_probe_a_great_one_only_for_the_dwell(
    gain: float, least: int, most: int
) -> None:
    switch, limits, number = Switch(), Limits(), 0
    while switch.turn(-0.2, 1, number := number + 1, limits, 0.0):
        pass
    off = number
    while not switch.turn(gain, 1, number := number + 1, limits, 100.0):
        if switch.probe_due(number, limits):
            switch.probed(number, 0.0, limits)
            switch.heard(4, 0, number)
    assert least <= number - off <= most


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num", [1, 8])
def test_at_the_very_pivot_noise_switches_at_most_once_in_ten_seconds(num: int, seed: int) -> None:
    """One draft token brings 60% more tokens and takes 60% longer: drafting and plain are equally fast, exactly."""
    machine = Machine(lambda n, tokens: 10.0 * (1.0 + 0.6 * (tokens - n) / n), {"draft": lambda gammas: 1e-6})
    one = Policy(tiers=(("default", TierPolicy(max_gamma=1)),), proposers=("draft",))
    rounds = simulate(one, machine, [constant(0.6, 0.0, 0.0)], num, 6000 * num, seed)[300:]
    seconds = sum(done.ms for done in rounds) / 1e3
    assert seconds > 30.0
    assert sum(a.speculating != b.speculating for a, b in pairwise(rounds)) <= seconds / 10.0


def follows(rounds: list[Round], wanted: bool) -> int:
    """Return after how many rounds most of the next fifty draft, or do not."""
    right = [any(choice.gamma for choice in done.choices) == wanted for done in rounds]
    return next(place for place in range(len(rounds)) if sum(right[place : place + 50]) > 40)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num", [1, 8])
def test_a_step_of_acceptance_is_followed_within_200_rounds_down_and_1200_up(num: int, seed: int) -> None:
    """Up takes as long as the back-off of the probes, 1024 rounds at most, and one more probe."""
    state = PlanState()
    policy = replace(simple_policy("adaptive"), proposers=("draft",))
    good, bad = constant(0.9, 0.0, 0.0), constant(0.05, 0.0, 0.0)
    simulate(policy, MACHINE, [good], num, 1000 * num, seed, state)
    down = simulate(policy, MACHINE, [bad], num, 3000 * num, seed + 10, state)
    up = simulate(policy, MACHINE, [good], num, 6000 * num, seed + 20, state)
    assert follows(down, False) <= 200
    assert follows(up, True) <= 1200


def test_a_clock_that_jumped_back_an_hour_does_not_hold_up_speculation() -> None:
    switch, limits, number = Switch(unrest=3.0, unrest_s=3600.0), Limits(), 0
    while switch.turn(-0.2, 1, number := number + 1, limits, 3600.0):
        pass
    off = number
    while not switch.turn(0.01, 1, number := number + 1, limits, 0.05 * (number - off)):
        assert number - off < 5000
    assert number - off > 64
