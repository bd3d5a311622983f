"""Planning keeps its caps, ignores order, settles, and follows costs and acceptance in a closed loop."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.policies.document import Limits, Policy, TierPolicy, policy_from_dict, simple_policy
from specserve.policies.learning import learn_round
from specserve.policies.planning import plan_round
from specserve.policies.state import (
    Choice,
    DraftResult,
    Observation,
    Plan,
    PlanState,
    RequestObservation,
    RoundResult,
)

DRAFT = frozenset({"draft"})


def run(
    policy: Policy,
    rounds: int,
    accept: Callable[[str, int], float],
    score: Callable[[int], float],
    num_requests: int = 1,
    hit: float = 1.0,
    names: frozenset[str] = DRAFT,
    draft_step_ms: float = 0.3,
    state: PlanState | None = None,
) -> tuple[list[Plan], PlanState]:
    """Return the plans of a simulated engine whose drafts survive with the given chance per position."""
    chance = random.Random(7)
    state = state or PlanState()
    plans = []
    for number in range(rounds):
        requests = tuple(RequestObservation(f"r{i}") for i in range(num_requests))
        plan, state = plan_round(Observation(requests, names, number * 0.01), policy, state)
        plans.append(plan)
        drafts, tokens, longest = [], num_requests, Counter[str]()
        for request, choice in zip(requests, plan.choices, strict=True):
            if choice.proposer is None:
                continue
            found = choice.proposer == "draft" or chance.random() < hit
            drafted = choice.gamma if found else 0
            accepted = 0
            while accepted < drafted and chance.random() < accept(choice.proposer, number):
                accepted += 1
            drafts.append(
                DraftResult(request.request_id, request.tier, choice.proposer, choice.gamma, drafted, accepted)
            )
            tokens += drafted
            longest[choice.proposer] = max(longest[choice.proposer], choice.gamma)
        spent = tuple((n, g, draft_step_ms * g if n == "draft" else 0.1) for n, g in sorted(longest.items()))
        noise = 1.0 + 0.02 * chance.random()
        state = learn_round(RoundResult(tuple(drafts), num_requests, tokens, score(tokens) * noise, spent), state)
    return plans, state


def gammas(plans: list[Plan]) -> list[int]:
    return [choice.gamma for plan in plans for choice in plan.choices]


def flat(tokens: int) -> float:
    return 10.0 + 0.02 * tokens


def proportional(tokens: int) -> float:
    return 5.0 * tokens


@pytest.mark.parametrize("num_requests", [1, 8])
def test_good_cheap_drafts_grow_long(num_requests: int) -> None:
    plans, _ = run(simple_policy("adaptive"), 300, lambda p, n: 0.9, flat, num_requests)
    tail = gammas(plans[100:])
    assert sum(tail) / len(tail) > 5.0


@pytest.mark.parametrize("num_requests", [1, 8])
def test_bad_drafts_are_given_up_and_rarely_probed(num_requests: int) -> None:
    plans, _ = run(simple_policy("adaptive"), 1200, lambda p, n: 0.05, flat, num_requests, draft_step_ms=1.0)
    drafting = [plan for plan in plans[200:] if any(choice.gamma for choice in plan.choices)]
    assert len(drafting) <= 0.05 * 1000
    assert any(choice.reason == "probe" for plan in drafting for choice in plan.choices)


@pytest.mark.parametrize("num_requests", [1, 8])
def test_without_free_verification_speculation_goes_off(num_requests: int) -> None:
    plans, _ = run(simple_policy("adaptive"), 1200, lambda p, n: 0.7, proportional, num_requests)
    assert sum(any(c.gamma for c in plan.choices) for plan in plans[200:]) <= 50


def test_probes_find_back_when_acceptance_recovers() -> None:
    plans, _ = run(simple_policy("adaptive"), 3000, lambda p, n: 0.05 if n < 300 else 0.95, flat, draft_step_ms=1.0)
    assert max(gammas(plans[250:300])) == 0 or gammas(plans[250:300]).count(0) > 40
    tail = gammas(plans[-200:])
    assert sum(tail) / len(tail) > 4.0


def test_the_proposer_that_pays_wins_and_its_empty_drafts_are_counted() -> None:
    names = frozenset({"draft", "prompt_lookup"})
    accept = {"draft": 0.9, "prompt_lookup": 0.9}
    rare, _ = run(simple_policy("adaptive"), 400, lambda p, n: accept[p], flat, 4, hit=0.05, names=names)
    often, _ = run(
        simple_policy("adaptive"), 400, lambda p, n: accept[p], flat, 4, hit=1.0, names=names, draft_step_ms=1.0
    )
    last = Counter(c.proposer for plan in rare[-100:] for c in plan.choices)
    assert last["draft"] > 300
    last = Counter(c.proposer for plan in often[-100:] for c in plan.choices)
    assert last["prompt_lookup"] > 300


def test_a_constant_environment_settles() -> None:
    plans, _ = run(simple_policy("adaptive"), 600, lambda p, n: 1.0, flat, 4)
    assert len(set(gammas(plans[300:]))) == 1


def test_zero_probe_duty_never_probes() -> None:
    policy = Policy(limits=Limits(probe_duty=0.0))
    plans, _ = run(policy, 600, lambda p, n: 0.0, flat)
    assert sum(gammas(plans[200:])) == 0


def test_warmup_measures_plain_rounds_first_and_ends_even_without_learning() -> None:
    state, reasons = PlanState(), []
    for _ in range(10):
        plan, state = plan_round(Observation((RequestObservation("a"),), DRAFT), Policy(), state)
        reasons.append(plan.choices[0].reason)
    assert reasons[0] == "warmup"
    assert reasons[-1] == "adaptive"


def one(request: RequestObservation, policy: Policy, names: frozenset[str] = DRAFT) -> Choice:
    plan, _ = plan_round(Observation((request,), names), policy, PlanState())
    return plan.choices[0]


def test_each_reason_is_given_where_it_belongs() -> None:
    fixed = simple_policy("fixed:5")
    assert one(RequestObservation("a", mode="off"), fixed) == Choice(None, 0, "mode_off")
    assert one(RequestObservation("a", mode="on", max_draft_tokens=3), fixed) == Choice("draft", 3, "mode_on")
    assert one(RequestObservation("a", mode="on"), simple_policy("off")) == Choice("draft", 8, "mode_on")
    assert one(RequestObservation("a"), simple_policy("off")) == Choice(None, 0, "policy_off")
    assert one(RequestObservation("a"), fixed) == Choice("draft", 5, "fixed")
    assert one(RequestObservation("a", max_draft_tokens=2), fixed) == Choice("draft", 2, "fixed")
    assert one(RequestObservation("a", remaining_tokens=3), fixed) == Choice("draft", 2, "fixed")
    assert one(RequestObservation("a", remaining_tokens=1), fixed) == Choice(None, 0, "end_of_output")
    assert one(RequestObservation("a"), fixed, frozenset()) == Choice(None, 0, "no_proposer")
    assert one(RequestObservation("a", proposer="suffix"), fixed) == Choice(None, 0, "no_proposer")
    rules = [{"batch": {"below": 2}, "gamma": 3}]
    schedule = policy_from_dict({"tiers": {"default": {"law": "schedule", "rules": rules}}})
    assert one(RequestObservation("a"), schedule) == Choice("draft", 3, "schedule")
    plan, _ = plan_round(Observation((RequestObservation("a"), RequestObservation("b")), DRAFT), schedule, PlanState())
    assert plan.choices[0] == Choice(None, 0, "schedule")


REQUEST = st.builds(
    RequestObservation,
    request_id=st.integers(0, 10_000).map(str),
    tier=st.sampled_from(["default", "flex", "priority", "other"]),
    mode=st.sampled_from(["on", "off", "auto"]),
    max_draft_tokens=st.none() | st.integers(0, 20),
    proposer=st.none() | st.sampled_from(["draft", "suffix", "mine"]),
    remaining_tokens=st.integers(0, 40),
)
TIER = st.builds(
    TierPolicy,
    law=st.sampled_from(["off", "fixed", "schedule", "adaptive"]),
    gamma=st.integers(0, 12),
    max_gamma=st.integers(0, 12),
    tpot_slo_ms=st.none() | st.floats(1.0, 100.0),
    weight=st.floats(0.1, 8.0),
    otherwise=st.integers(0, 12),
)
POLICY = st.builds(
    lambda a, b, limit: Policy(tiers=(("default", a), ("priority", b)), limits=Limits(limit)),
    TIER,
    TIER,
    st.integers(0, 40),
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(REQUEST, max_size=12, unique_by=lambda r: r.request_id),
    POLICY,
    st.frozensets(st.sampled_from(["draft", "suffix", "mine"])),
    st.randoms(use_true_random=False),
)
def test_caps_hold_and_the_order_of_requests_does_not_matter(
    requests: list[RequestObservation], policy: Policy, names: frozenset[str], chance: random.Random
) -> None:
    shuffled = list(requests)
    chance.shuffle(shuffled)
    state, other = PlanState(), PlanState()
    for number in range(8):
        plan, state = plan_round(Observation(tuple(requests), names), policy, state)
        twin, other = plan_round(Observation(tuple(shuffled), names), policy, other)
        chosen = {r.request_id: c for r, c in zip(requests, plan.choices, strict=True)}
        assert chosen == {r.request_id: c for r, c in zip(shuffled, twin.choices, strict=True)}
        assert sum(c.gamma for c in plan.choices) <= policy.limits.draft_tokens_per_round
        results = []
        for request, choice in zip(requests, plan.choices, strict=True):
            assert (choice.gamma == 0) == (choice.proposer is None)
            assert 0 <= choice.gamma <= policy.tier(request.tier).max_gamma
            assert choice.gamma <= max(request.remaining_tokens - 1, 0)
            assert request.max_draft_tokens is None or choice.gamma <= request.max_draft_tokens
            assert choice.proposer is None or choice.proposer in names
            assert request.mode != "off" or choice.gamma == 0
            if choice.proposer is not None:
                accepted = (number + len(request.request_id)) % (choice.gamma + 1)
                results.append(
                    DraftResult(request.request_id, request.tier, choice.proposer, choice.gamma, choice.gamma, accepted)
                )
        tokens = len(requests) + sum(c.gamma for c in plan.choices)
        state = learn_round(RoundResult(tuple(results), len(requests), tokens, 10.0), state)
        other = learn_round(RoundResult(tuple(reversed(results)), len(requests), tokens, 10.0), other)


NAMES = frozenset({"prediction", "prompt_lookup", "draft"})


def chosen(policy: str, request: RequestObservation, state: PlanState | None = None) -> Choice:
    """Return the choice for one request once the plain rounds that measure are over."""
    state = state or PlanState()
    for number in range(4):
        plan, state = plan_round(Observation((request,), NAMES, number * 0.01), simple_policy(policy), state)
        state = learn_round(RoundResult((), 1, 1, 10.0), state)
    return plan.choices[0]


@pytest.mark.parametrize("policy", ["adaptive", "fixed:4"])
def test_a_fresh_prediction_is_believed_and_a_request_without_one_never_gets_it(policy: str) -> None:
    assert chosen(policy, RequestObservation("r", has_prediction=True)).proposer == "prediction"
    for mode in ("auto", "on"):
        for wish in (None, "prediction"):
            assert (
                chosen(policy, RequestObservation("r", mode=mode, proposer=wish)).proposer
                in {
                    None: {"prompt_lookup", "draft"},
                    "prediction": {None},
                }[wish]
            )


def test_in_one_batch_only_those_with_a_prediction_use_it() -> None:
    requests = tuple(RequestObservation(f"r{i}", has_prediction=i % 2 == 0) for i in range(8))
    state, policy = PlanState(), simple_policy("adaptive")
    for number in range(60):
        plan, state = plan_round(Observation(requests, NAMES, number * 0.01), policy, state)
        results = [
            DraftResult(request.request_id, "default", choice.proposer, choice.gamma, choice.gamma, choice.gamma)
            for request, choice in zip(requests, plan.choices, strict=True)
            if choice.proposer is not None
        ]
        state = learn_round(RoundResult(results, 8, 8 + sum(choice.gamma for choice in plan.choices), 10.0), state)
        assert all(
            choice.proposer != "prediction"
            for request, choice in zip(requests, plan.choices, strict=True)
            if not request.has_prediction
        )
    assert {choice.proposer for choice in plan.choices[::2]} == {"prediction"}
