"""The law finds the best prefix budget over any cost, within objectives and caps."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.policies.laws import Group, Scale, Weighed, weigh
from specserve.policies.scoring import Steps
from specserve.policies.strengths import Curve

FAR = 1e9


def curve(right: list[float], arrive: float = 1.0) -> Curve:
    """Return a curve of the given chances per position, whose drafts exist with the chance `arrive`."""
    worth = list(itertools.accumulate(right, lambda a, b: a * b))
    return Curve([arrive] * len(right), [arrive * w for w in worth], worth, right, [], [])


def group(name: str, right: list[float], size: int = 1, proposer: str = "draft", arrive: float = 1.0) -> Group:
    """Return a group of `size` requests; its members are only counted here."""
    cap = len(right)
    key = (name, proposer, cap, 0, 0)
    return Group(key, "default", proposer, 1.0, cap, curve(right, arrive), members=list(range(size)))


def stairs(costs: list[float]) -> Steps:
    """Return the cost that is `costs[b]` at b draft tokens, and goes on along the last slope."""
    slopes = [b - a for a, b in itertools.pairwise(costs)]
    return Steps([*map(float, range(len(costs))), FAR], costs, [*slopes, slopes[-1]])


def scale(
    steps: Steps, num: int, draft: tuple[float, float, float] = (0.0, 0.0, 0.0), slo: float | None = None
) -> Scale:
    """Return a round of `num` requests of one tier with one proposer."""
    slo_ms = {} if slo is None else {"default": slo}
    return Scale(
        float(num), 0.0, steps, 1.0, {"draft": draft, "prompt_lookup": (0.05, 0.0, 0.0)}, {}, slo_ms, {"default": num}
    )


def rate(groups: list[Group], lengths: list[int], given: Scale) -> float:
    """Return the tokens per millisecond of an allocation, by definition."""
    value, tokens, spent = given.value, 0.0, 0.0
    for name, (fixed, by_step, by_token) in given.draft_ms.items():
        users = [(g, n) for g, n in zip(groups, lengths, strict=True) if g.proposer == name and n]
        if users:
            spent += fixed + by_step * max(n for _, n in users) + by_token * sum(len(g.members) * n for g, n in users)
    for g, n in zip(groups, lengths, strict=True):
        value += len(g.members) * sum(g.curve.accepted[:n])
        tokens += len(g.members) * sum(g.curve.drafted[:n])
    return value / (given.steps.at(tokens) + spent)


CHANCES = st.lists(st.floats(0.3, 0.95), min_size=1, max_size=4)
STAIRS = st.lists(st.floats(0.0, 3.0), min_size=13, max_size=13).map(
    lambda d: list(itertools.accumulate(d, initial=10.0))
)


@settings(max_examples=150, deadline=None)
@given(st.lists(CHANCES, min_size=1, max_size=3), STAIRS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_over_any_staircase_no_prefix_budget_is_better(
    rights: list[list[float]], costs: list[float], fixed: float, by_token: float
) -> None:
    groups = [group(str(i), right) for i, right in enumerate(rights)]
    given_scale = scale(stairs(costs), len(groups), (fixed, 0.0, by_token))
    weighed = weigh(groups, given_scale, 100)
    lengths = list(weighed.lengths)
    assert weighed.rate_drafting == pytest.approx(rate(groups, lengths, given_scale))
    order = sorted((-g.curve.worth[k], g.key, k, i) for i, g in enumerate(groups) for k in range(g.cap))
    taken, best = [0] * len(groups), 0.0
    for _, _, _, number in order:
        taken[number] += 1
        best = max(best, rate(groups, taken, given_scale))
    assert weighed.rate_drafting == pytest.approx(best)


def test_a_group_is_cut_where_the_cost_steps_up() -> None:
    costs = [10.0] * 11 + [30.0 + b for b in range(20)]
    weighed = weigh([group("a", [0.8], size=16)], scale(stairs(costs), 16), 100)
    assert (weighed.lengths, weighed.extra_group, weighed.extra) == ([0], 0, 10)
    assert weighed.rate_drafting == pytest.approx((16 + 8.0) / 10.0)


def test_the_limit_cuts_the_last_group() -> None:
    weighed = weigh([group("a", [0.9, 0.8], size=4)], scale(stairs([10.0, 10.0]), 4), 6)
    assert (weighed.lengths, weighed.extra) == ([1], 2)


def test_a_reach_saves_the_steps_that_few_requests_would_need() -> None:
    groups = [group("easy", [0.97] * 8, size=1), group("hard", [0.7] + [0.3] * 7, size=7)]
    given_scale = scale(stairs([10.0, 10.05]), 8, (0.1, 1.0, 0.0))
    without = weigh(groups, given_scale, 100)
    best = weigh(groups, given_scale, 100, [None, *(("draft", reach) for reach in range(1, 9))])
    assert best.rate_drafting >= without.rate_drafting
    assert max(best.lengths) <= best.reach[1] if best.reach else True
    assert best.rate_drafting == pytest.approx(rate(groups, best.lengths, given_scale))


def test_drafts_that_may_not_exist_cost_and_bring_less() -> None:
    costs = [10.0 + b for b in range(20)]
    rare = weigh([group("a", [0.9] * 4, arrive=0.1)], scale(stairs(costs), 1), 100)
    sure = weigh([group("a", [0.9] * 4)], scale(stairs(costs), 1), 100)
    assert rare.rate_plain == sure.rate_plain == pytest.approx(0.1)
    assert rare.rate_drafting == pytest.approx((1 + 0.1 * sum(0.9**k for k in range(1, 5))) / 10.4)
    assert rare.rate_drafting < sure.rate_drafting


def length(weighed: Weighed) -> int:
    return weighed.lengths[0]


def test_an_objective_shortens_drafts_but_never_forbids_what_plain_would_break_too() -> None:
    costs = [10.0 + 2.0 * b for b in range(9)]
    free = weigh([group("a", [0.9] * 8)], scale(stairs(costs), 1), 100)
    bound = weigh([group("a", [0.9] * 8)], scale(stairs(costs), 1, slo=5.4), 100)
    assert 0 < length(bound) <= length(free)
    impossible = weigh([group("a", [0.1] * 2)], scale(stairs([10.0, 20.0, 30.0]), 1, slo=1.0), 100)
    assert (length(impossible), impossible.rate_drafting) == (0, 0.0)
