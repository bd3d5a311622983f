"""The engine's planner translates, explains and swaps policies."""

from specserve.deployments.planning import PolicyPlanner
from specserve.policies.document import simple_policy
from specserve.service.ports import Decision, Outcome, Planner, RequestView, RoundCost


def view(request_id: str) -> RequestView:
    return RequestView(request_id, "default", "auto", None, None, 10, 50)


def test_a_planner_plans_learns_and_swaps_its_policy() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    port: Planner = planner
    names = frozenset({"draft"})
    assert port.plan([view("a")], names, 0.0) == (Decision("draft", 3, "fixed"),)
    port.learn([Outcome("a", "default", "draft", 3, 3, 3)], RoundCost(1, 4, 10.0, (("draft", 3, 1.0),)))
    port.arrived(0.0)
    assert planner.queries_per_second(0.0) > 0.0
    assert planner.acceptance_rate("default") == 1.0
    planner.set_policy(simple_policy("off"), 2)
    assert port.policy_version == 2
    assert port.plan([view("a")], names, 1.0) == (Decision(None, 0, "policy_off"),)
    assert port.plan([], names, 1.0) == ()


def test_explanations_are_kept_for_the_last_256_requests_only() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    for i in range(300):
        planner.plan([view(f"r{i}")], frozenset({"draft"}), 0.0)
    assert planner.explain("r0") is None
    explained = planner.explain("r299")
    assert explained is not None
    assert explained["decision"] == Decision("draft", 3, "fixed")
    assert explained["policy_version"] == 1
