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
    assert port.plan([view("a")], names, 0.0) == (Decision("draft", 3, "fixed", "fixed"),)
    port.learn([Outcome("a", "default", "draft", 3, 3, 3)], RoundCost(1, 4, 10.0, (("draft", 3, 1.0),)))
    port.arrived(0.0)
    assert planner.queries_per_second(0.0) > 0.0
    assert planner.acceptance_rate("default") == 1.0
    planner.set_policy(simple_policy("off"), 2)
    assert port.policy_version == 2
    assert port.plan([view("a")], names, 1.0) == (Decision(None, 0, "policy_off", "off"),)
    assert port.plan([], names, 1.0) == ()


def test_explanations_are_kept_for_the_last_256_requests_only() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    for i in range(300):
        planner.plan([view(f"r{i}")], frozenset({"draft"}), 0.0)
    assert planner.explain("r0") is None
    explained = planner.explain("r299")
    assert explained is not None
    assert explained["decision"] == Decision("draft", 3, "fixed", "fixed")
    assert explained["policy_version"] == 1


def test_rounds_with_prompt_tokens_teach_nothing_about_rounds_without() -> None:
    planner = PolicyPlanner(simple_policy("adaptive"))
    for _ in range(20):
        planner.learn((), RoundCost(4, 4, 10.0, ()))
        planner.learn((), RoundCost(4, 20, 12.0, ()))
    before = [planner.costs.score_ms(4, tokens) for tokens in (4, 20, 520)]
    for _ in range(50):
        planner.learn((), RoundCost(5, 516, 300.0, (), num_prefill_tokens=512))
        planner.learn((), RoundCost(5, 20, 50.0, (), num_prefill_tokens=16))
    assert [planner.costs.score_ms(4, tokens) for tokens in (4, 20, 520)] == before


def test_every_request_of_a_batch_is_explained_by_what_it_was_decided_from() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    planner.plan([view("a"), view("b")], frozenset({"draft"}), 0.0)
    planner.set_policy(simple_policy("off"), 2)
    planner.plan([view("b")], frozenset({"draft"}), 1.0)
    first, second = planner.explain("a"), planner.explain("b")
    assert first is not None
    assert second is not None
    assert (first["decision"], first["request"], first["batch"], first["round"]) == (
        Decision("draft", 3, "fixed", "fixed"),
        view("a"),
        2,
        1,
    )
    assert (second["decision"], second["policy_version"], second["batch"]) == (
        Decision(None, 0, "policy_off", "off"),
        2,
        1,
    )
    assert planner.explain("c") is None


def test_a_running_request_is_still_explained_after_many_others_came_and_went() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    for i in range(600):
        planner.plan([view("long"), view(f"r{i}")], frozenset({"draft"}), 0.0)
    planner.plan([view("long")], frozenset({"draft"}), 0.0)
    explained = planner.explain("long")
    assert explained is not None
    assert explained["round"] == 601
