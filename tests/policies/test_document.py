"""Policy documents: defaults, round trips and errors that name the bad field."""

import re

import pytest

from specserve.policies.document import Bounds, Policy, Rule, policy_from_dict, policy_to_dict, simple_policy

DESIGN = {
    "name": "default",
    "tiers": {
        "priority": {"law": "adaptive", "max_gamma": 12, "tpot_slo_ms": 30, "weight": 4},
        "default": {"law": "adaptive", "max_gamma": 8, "tpot_slo_ms": 80, "weight": 1},
        "flex": {
            "law": "schedule",
            "rules": [{"qps": {"below": 4}, "batch": {"below": 8}, "acceptance": {"above": 0.5}, "gamma": 4}],
            "otherwise": 0,
        },
    },
    "proposers": ["prediction", "prompt_lookup", "suffix", "draft"],
    "limits": {"draft_tokens_per_round": 256, "probe_duty": 0.05, "min_gain": 0.02, "min_dwell_rounds": 16},
}


def test_the_document_of_the_design_is_read() -> None:
    policy = policy_from_dict(DESIGN)
    assert policy.tier("priority").max_gamma == 12
    assert policy.tier("unheard of") == policy.tier("default")
    assert policy.tier("flex").rules == (Rule(4, Bounds(below=4.0), Bounds(below=8.0), Bounds(above=0.5)),)


def test_an_empty_document_is_the_default_policy() -> None:
    assert policy_from_dict({}) == Policy()


@pytest.mark.parametrize("policy", [policy_from_dict(DESIGN), simple_policy("fixed:12"), simple_policy("off")])
def test_a_policy_survives_the_round_trip(policy: Policy) -> None:
    assert policy_from_dict(policy_to_dict(policy)) == policy


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ([], "policy:"),
        ({"nme": "x"}, "nme:"),
        ({"tiers": {"flex": {"law": "magic"}}}, "tiers.flex.law:"),
        ({"tiers": {"flex": {"law": []}}}, "tiers.flex.law:"),
        ({"tiers": {"flex": {"max_gamma": True}}}, "tiers.flex.max_gamma:"),
        ({"tiers": {"flex": {"weight": 0}}}, "tiers.flex.weight:"),
        ({"tiers": {"flex": {"rules": [{"gamma": 1}, {"qps": {"under": 1}, "gamma": 2}]}}}, "flex.rules[1].qps.under:"),
        ({"tiers": {"flex": {"rules": [{}]}}}, "tiers.flex.rules[0].gamma:"),
        ({"proposers": ["draft", 3]}, "proposers[1]:"),
        ({"proposers": ["draft", "draft"]}, "proposers:"),
        ({"limits": {"probe_duty": 2}}, "limits.probe_duty:"),
        ({"limits": {"min_gain": float("nan")}}, "limits.min_gain:"),
    ],
)
def test_an_error_names_the_path_of_the_bad_field(data: object, path: str) -> None:
    with pytest.raises(ValueError, match=re.escape(path)):
        policy_from_dict(data)


@pytest.mark.parametrize("text", ["", "fixed", "fixed:", "fixed:-1", "fixed:x", "fixed:1000", "on"])
def test_a_short_policy_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="policy:"):
        simple_policy(text)
