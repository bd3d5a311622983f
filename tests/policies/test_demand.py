"""A kind of proposer is kept while somebody may choose it, let go when nobody does, and asked for again at a price."""

from dataclasses import dataclass
from itertools import pairwise

from specserve.policies.demand import Demand, stance
from specserve.policies.document import Policy, TierPolicy, simple_policy

ON, OFF = simple_policy("adaptive"), simple_policy("off")
NONE: frozenset[str | None] = frozenset()


@dataclass
class Asking:
    tier: str = "default"
    mode: str = "auto"
    proposer: str | None = None


def test_overrides_forbid_and_policies_that_cannot_draft_leave_it_to_requests_that_insist() -> None:
    assert stance("draft", [ON], NONE) == "may"
    assert stance("draft", [ON], frozenset({None})) == "never"
    assert stance("draft", [ON], frozenset({"default"})) == "on_request"
    assert stance("draft", [OFF], NONE) == "on_request"
    assert stance("draft", [OFF, ON], NONE) == "may"
    assert stance("draft", [Policy(proposers=("prompt_lookup",))], NONE) == "on_request"
    tiers = (("default", TierPolicy(law="off")), ("priority", TierPolicy()))
    assert stance("draft", [Policy(tiers=tiers)], NONE) == "may"
    assert stance("draft", [Policy(tiers=tiers)], frozenset({"priority"})) == "on_request"


def test_an_override_lets_go_at_once_and_the_policy_off_keeps_only_what_a_request_insists_on() -> None:
    demand = Demand("draft", idle_s=60.0)
    demand.note([Asking()], [ON], True, 10.0)
    assert demand.wanted("may", True, 10.0)
    assert not demand.wanted("never", True, 10.1)
    assert not demand.wanted("on_request", True, 10.1)
    demand.note([Asking(mode="on", proposer="draft")], [OFF], False, 11.0)
    assert demand.wanted("on_request", False, 11.1)
    assert demand.wanted("on_request", True, 40.0)
    assert not demand.wanted("on_request", True, 72.0)
    assert not demand.wanted("never", True, 11.1)


def test_requests_that_cannot_have_it_do_not_ask() -> None:
    for view, policy in (
        (Asking(mode="off"), ON),
        (Asking(mode="off", proposer="draft"), ON),
        (Asking(proposer="prompt_lookup"), ON),
        (Asking(mode="on", proposer="prompt_lookup"), ON),
        (Asking(proposer="draft"), OFF),
        (Asking(), OFF),
        (Asking(mode="on"), Policy(proposers=("prompt_lookup",))),
    ):
        demand = Demand("draft", idle_s=60.0)
        demand.note([view], [policy], False, 10.0)
        assert not demand.wanted("may", False, 10.0), (view, policy)
    demand = Demand("draft", idle_s=60.0)
    demand.note([Asking()], [ON], False, 10.0)
    assert demand.wanted("may", False, 10.0)


def test_a_quiet_service_lets_go_and_the_next_request_gets_it_back_without_waiting() -> None:
    demand = Demand("draft", idle_s=60.0)
    demand.note([Asking()], [ON], True, 10.0)
    assert demand.wanted("may", True, 11.0)
    demand.note([Asking()], [ON], False, 12.0)
    assert demand.wanted("may", True, 69.0)
    assert not demand.wanted("may", True, 72.0)
    assert not demand.wanted("may", False, 500.0)
    demand.note([Asking()], [ON], False, 501.0)
    assert demand.wanted("may", False, 501.0)


def test_a_kind_the_policy_does_without_is_asked_for_again_ever_more_seldom_but_at_once_by_name() -> None:
    demand, starts, reached, now_s = Demand("draft", idle_s=60.0), [], False, 0.0
    while now_s < 4000.0:
        demand.note([Asking()], [ON], False, now_s)
        wanted = demand.wanted("may", reached, now_s)
        starts += [now_s] if wanted and not reached else []
        reached, now_s = wanted, now_s + 1.0
    apart = [later - sooner for sooner, later in pairwise(starts)]
    assert 4 <= len(starts) <= 7
    assert all(second > 1.3 * first for first, second in pairwise(apart))
    while demand.wanted("may", reached, now_s):
        reached, now_s = True, now_s + 1.0
        demand.note([Asking()], [ON], False, now_s)
    demand.note([Asking(proposer="draft")], [ON], False, now_s)
    assert demand.wanted("may", False, now_s)
    demand.note([Asking(proposer="draft")], [ON], True, now_s)
    assert demand.patience_s == 60.0


def test_short_memory_takes_a_kind_that_does_not_draft_and_leaves_one_that_does() -> None:
    drafting, idle = Demand("draft", idle_s=300.0), Demand("draft", idle_s=300.0)
    for second in range(100):
        drafting.note([Asking()], [ON], True, float(second))
        idle.note([Asking()], [ON], second < 50, float(second))
        assert drafting.wanted("may", True, float(second), memory_short=True)
        assert idle.wanted("may", second < 80, float(second), memory_short=second > 60) == (second < 80)


def test_what_short_memory_took_comes_back_after_it_at_a_price_or_at_once_by_name() -> None:
    demand = Demand("draft", idle_s=300.0)
    demand.note([Asking()], [ON], True, 0.0)
    assert demand.wanted("may", True, 0.0)
    demand.note([Asking()], [ON], False, 31.0)
    assert not demand.wanted("may", True, 31.0, memory_short=True)
    demand.note([Asking()], [ON], False, 200.0)
    assert not demand.wanted("may", False, 200.0, memory_short=True)
    assert demand.wanted("may", False, 200.0)
    demand.note([Asking(proposer="draft")], [ON], False, 201.0)
    assert demand.wanted("may", False, 201.0, memory_short=True)
    assert demand.patience_s == 120.0
