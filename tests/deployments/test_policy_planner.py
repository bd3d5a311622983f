"""The engine's planner translates, explains, and follows what the controller says."""

from dataclasses import replace
from typing import Any

from specserve.deployments.planning import PolicyPlanner
from specserve.deployments.snapshot import CanaryShare, Governing, Silence, Snapshot
from specserve.deployments.tracks import MAX_TRACKS
from specserve.policies.document import policy_from_dict, simple_policy
from specserve.policies.replay import num_changed, replay
from specserve.service.ports import Decision, Outcome, Planner, RequestView, RoundCost

NAMES = frozenset({"draft"})


def view(request_id: str) -> RequestView:
    return RequestView(request_id, "default", "auto", None, None, 10, 50)


def following(planner: PolicyPlanner, *, now_s: float = 0.0, **changes: Any) -> None:
    snapshot = Snapshot((1, ()), Governing(planner.policy_version, planner.policy))
    planner.follow(replace(snapshot, **changes), now_s)


def test_a_planner_plans_learns_and_swaps_its_policy() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    port: Planner = planner
    names = frozenset({"draft"})
    assert port.plan([view("a")], names, 0.0) == (Decision("draft", 3, "fixed", "fixed"),)
    port.learn([Outcome("a", "default", "draft", 3, 3, 3)], RoundCost(1, 4, 10.0, (("draft", 3, 1.0),)))
    port.arrived(0.0)
    assert planner.queries_per_second(0.0) > 0.0
    assert planner.acceptance_rate("default") == 1.0
    following(planner, active=Governing(2, simple_policy("off")))
    assert port.policy_version == 2
    assert port.plan([view("a")], names, 1.0) == (Decision(None, 0, "policy_off", "off"),)
    assert port.plan([], names, 1.0) == ()


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


def gammas(planner: PolicyPlanner, views: list[RequestView], now_s: float = 0.0) -> list[tuple[int, str]]:
    return [(one.gamma, one.reason) for one in planner.plan(views, NAMES, now_s)]


def test_explanations_are_kept_for_the_newest_requests_and_for_those_that_run() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    for i in range(MAX_TRACKS + 50):
        planner.plan([view("long"), view(f"r{i}")], NAMES, 0.0)
    assert planner.explain("r0") == []
    (newest,), (long,) = planner.explain(f"r{MAX_TRACKS + 49}"), planner.explain("long")
    assert newest["decision"] == {"proposer": "draft", "gamma": 3, "reason": "fixed"}
    assert long["gamma_track"][0]["rounds"] == MAX_TRACKS + 50


def test_a_request_is_explained_by_what_it_was_decided_from_and_its_gamma_track() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    for accepted in (3, 1):
        planner.plan([view("a"), view("b")], NAMES, 0.0)
        planner.learn([Outcome("b", "default", "draft", 3, 3, accepted)], RoundCost(2, 5, 10.0, ()))
    following(planner, active=Governing(2, simple_policy("off")))
    planner.plan([view("b")], NAMES, 1.0)
    (first,), (second,) = planner.explain("a"), planner.explain("b")
    assert (first["inputs"]["batch"], first["inputs"]["round"], first["policy"]["version"]) == (2, 2, 1)
    assert (second["inputs"]["batch"], second["policy"]["version"], second["law"]) == (1, 2, "off")
    assert second["summary"] == {
        "rounds": 3,
        "drafting_rounds": 2,
        "drafted": 6,
        "accepted": 4,
        "reasons": {"fixed": 2, "policy_off": 1},
    }
    track = [(s["gamma"], s["rounds"], s["drafted"], s["accepted"], s["reason"]) for s in second["gamma_track"]]
    assert track == [(3, 2, 6, 4, "fixed"), (0, 1, 0, 0, "policy_off")]
    assert planner.explain("c") == []


def test_the_end_of_the_output_does_not_hide_why_the_request_was_speculated() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    planner.plan([view("a")], NAMES, 0.0)
    planner.plan([replace(view("a"), remaining_tokens=1)], NAMES, 0.0)
    (found,) = planner.explain("a")
    assert (found["decision"]["reason"], found["inputs"]["remaining_tokens"]) == ("fixed", 50)
    assert found["gamma_track"][-1]["reason"] == "end_of_output"


def test_every_choice_of_an_answer_is_found_by_the_answers_id() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    planner.plan([view("cmpl-ab-0"), view("cmpl-ab-1"), view("cmpl-cd")], NAMES, 0.0)
    assert [one["request_id"] for one in planner.explain("cmpl-ab")] == ["cmpl-ab-0", "cmpl-ab-1"]
    assert [one["request_id"] for one in planner.explain("cmpl-cd")] == ["cmpl-cd"]


def test_the_rule_that_fired_is_named() -> None:
    rules = [{"batch": {"above": 4}, "gamma": 1}, {"batch": {"below": 4}, "gamma": 5}]
    policy = policy_from_dict({"tiers": {"default": {"law": "schedule", "rules": rules}}})
    planner = PolicyPlanner(policy)
    planner.plan([view("a")], NAMES, 0.0)
    assert planner.explain("a")[0]["rule"] == 1


def test_an_override_silences_its_tier_from_the_next_round_and_ends_by_itself() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    requests = [view("a"), replace(view("b"), tier="flex", mode="on", max_draft_tokens=2)]
    following(planner, now_s=100.0, silences=(Silence("flex", 5.0),))
    assert gammas(planner, requests, 104.9) == [(3, "fixed"), (0, "override")]
    assert gammas(planner, requests, 105.0) == [(3, "fixed"), (2, "mode_on")]
    following(planner, now_s=200.0, silences=(Silence(None), Silence("flex", 5.0)))
    assert gammas(planner, requests, 1e9) == [(0, "override"), (0, "override")]
    following(planner)
    assert gammas(planner, requests) == [(3, "fixed"), (2, "mode_on")]


def test_a_canary_decides_for_its_share_of_its_tiers_and_for_the_same_requests_always() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    share = CanaryShare(Governing(2, simple_policy("fixed:5")), 20.0, ("default",))
    following(planner, canary=share)
    requests = [replace(view(f"r{i}"), tier=("default", "flex")[i % 2]) for i in range(2000)]
    covered = [one for one in requests if share.covers(one.request_id, one.tier)]
    assert {one.tier for one in covered} == {"default"}
    chosen = {one.request_id for one in covered}
    assert 150 < len(chosen) < 250
    few = [*[one for one in requests if one.request_id in chosen][:5], view("cmpl-not-in-it-3")]
    assert gammas(planner, few) == [(5, "fixed")] * 5 + [(3, "fixed")]
    assert {planner.version_of(one.request_id) for one in few[:5]} == {2}
    assert planner.version_of(few[5].request_id) == 1
    planner.learn([Outcome(few[0].request_id, "default", "draft", 5, 5, 2)], RoundCost(6, 20, 10.0, ()))
    planner.ended(few[0].request_id, False, 12.0)
    assert (planner.tallies[2].tested, planner.tallies[2].accepted, planner.tallies[2].finished) == (3, 2, 1)


def test_a_shadow_is_counted_and_never_acts() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    following(planner, shadow=Governing(2, simple_policy("fixed:5")))
    assert gammas(planner, [view("a"), replace(view("b"), mode="off")]) == [(3, "fixed"), (0, "mode_off")]
    shadow = planner.shadow
    assert shadow is not None
    assert (shadow.version, shadow.decisions, shadow.changed) == (2, 2, 1)
    assert (shadow.draft_tokens, shadow.shadow_draft_tokens) == (3, 5)
    following(planner)
    assert planner.shadow is None


def test_what_was_learned_outlives_a_change_and_the_canary_begins_with_it() -> None:
    planner = PolicyPlanner(simple_policy("adaptive"))
    for _ in range(30):
        planner.plan([view("a")], NAMES, 0.0)
        planner.learn([Outcome("a", "default", "draft", 4, 4, 4)], RoundCost(1, 5, 10.0, (("draft", 4, 0.1),)))
    share = CanaryShare(Governing(2, replace(simple_policy("adaptive"), name="other")), 100.0)
    following(planner, canary=share)
    (decision,) = planner.plan([view("a")], NAMES, 0.0)
    assert decision.gamma > 4
    assert planner.version_of("a") == 2


def test_a_recording_holds_the_rounds_and_replays_to_the_same_decisions() -> None:
    planner = PolicyPlanner(simple_policy("fixed:3"))
    for i in range(10):
        planner.plan([view("a"), view(f"b{i}")], NAMES, float(i))
        planner.learn([Outcome("a", "default", "draft", 3, 3, 2)], RoundCost(2, 8, 10.0, (("draft", 3, 1.0),)))
    recording = planner.recording(4)
    assert [round_.now_s for round_ in recording.rounds] == [6.0, 7.0, 8.0, 9.0]
    same = replay(recording.rounds, simple_policy("fixed:3"), recording.state)
    assert same.choices == [tuple(round_.choices) for round_ in recording.rounds]
    more = replay(recording.rounds, simple_policy("fixed:8"), planner.recording(4).state)
    assert num_changed(same, more) == 8
    assert more.gammas == {8: 8}
    assert more.tokens_per_step > same.tokens_per_step > 1.0
    none = replay(recording.rounds, simple_policy("off"), planner.recording(4).state)
    assert (none.tokens_per_step, none.gammas) == (1.0, {0: 8})
    assert none.tokens_per_s > 0.0
