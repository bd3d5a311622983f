"""In a closed loop, learning from nothing, the adaptive law keeps up with plain decoding and with the best fixed gamma.

Simulated with noise; everything is drawn from a seed, so there is no false alarm: a failure is a change of behaviour.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from support.machines import COPY, MACHINE, OPEN, constant, drafting

from specserve.policies.document import Policy, simple_policy
from specserve.policies.simulation import Round, Stretch, Workload, simulate, tokens_per_ms
from specserve.policies.state import PlanState


def run(policy: str, workloads: list[Workload], concurrency: int, tokens: int, seed: int = 1) -> list[Round]:
    return simulate(simple_policy(policy), MACHINE, workloads, concurrency, tokens, seed)


@pytest.mark.parametrize("concurrency", [1, 4, 16])
@pytest.mark.parametrize("workloads", [[COPY], [OPEN], [COPY, OPEN]], ids=["copy", "open", "mixed"])
def test_learning_included_adaptive_loses_little_to_plain_and_to_the_best_fixed_gamma(
    workloads: list[Workload], concurrency: int
) -> None:
    tokens = 2000 * max(concurrency // 2, 1)
    plain = tokens_per_ms(run("off", workloads, concurrency, tokens))
    fixed = {gamma: tokens_per_ms(run(f"fixed:{gamma}", workloads, concurrency, tokens)) for gamma in (1, 2, 4, 8)}
    adaptive = tokens_per_ms(run("adaptive", workloads, concurrency, tokens))
    assert adaptive >= 0.98 * plain
    assert adaptive >= 0.95 * max(fixed.values()), fixed


def mean_gamma(rounds: list[Round]) -> float:
    gammas = [choice.gamma for done in rounds for choice in done.choices]
    return sum(gammas) / len(gammas)


def test_the_same_acceptance_drafts_long_alone_and_short_or_not_in_a_batch_of_sixteen() -> None:
    half = constant(0.5, 0.0, 0.5)
    alone, together = run("adaptive", [half], 1, 800), run("adaptive", [half], 16, 16 * 400)
    assert mean_gamma(alone[100:]) > 1.5
    assert mean_gamma(together[100:]) < 1.0


@pytest.mark.parametrize("concurrency", [1, 4, 16])
@pytest.mark.parametrize("chances", [(0.3, 0.05, 0.3), (0.5, 0.3, 0.5), (0.6, 0.4, 0.7), (0.8, 0.9, 0.9)])
def test_in_a_constant_noisy_environment_nothing_changes_more_than_once_in_ten_seconds(
    chances: tuple[float, float, float], concurrency: int
) -> None:
    rounds = run("adaptive", [constant(*chances)], concurrency, 3000 * concurrency)[300:]
    seconds = sum(done.ms for done in rounds) / 1e3
    switches = sum(a.speculating != b.speculating for a, b in pairwise(rounds))
    changes = 0
    for place in range(concurrency):
        drafted = [done.choices[place] for done in rounds if done.choices[place].reason == "adaptive"]
        changes += sum(a.proposer != b.proposer for a, b in pairwise(drafted))
    allowed = max(seconds / 10.0, 1.0)
    assert switches <= allowed
    assert changes / concurrency <= allowed


def proposers(rounds: list[Round]) -> Counter[str | None]:
    return Counter(choice.proposer for done in rounds for choice in done.choices if choice.reason == "adaptive")


@pytest.mark.parametrize("concurrency", [1, 8])
def test_prompt_lookup_is_chosen_while_it_is_accepted_more_and_left_when_it_is_not(concurrency: int) -> None:
    state = PlanState()
    policy = simple_policy("adaptive")
    good, bad = constant(0.6, 0.9, 0.9), constant(0.6, 0.1, 0.3)
    tokens = 2000 * concurrency
    before = proposers(simulate(policy, MACHINE, [good], concurrency, tokens, 1, state)[-100:])
    after = proposers(simulate(policy, MACHINE, [bad], concurrency, tokens, 2, state)[-100:])
    again = proposers(simulate(policy, MACHINE, [good], concurrency, 3 * tokens, 3, state)[-100:])
    assert before["prompt_lookup"] > 0.8 * before.total()
    assert after["draft"] > 0.8 * after.total()
    assert again["prompt_lookup"] > 0.8 * again.total()


def test_requests_of_both_kinds_each_get_the_proposer_that_suits_them() -> None:
    machine = replace(MACHINE, draft_ms={**MACHINE.draft_ms, "draft": drafting(0.1, 0.02)})
    kinds = [constant(0.6, 0.95, 0.95), constant(0.6, 0.02, 0.3)]
    rounds = simulate(simple_policy("adaptive"), machine, kinds, 2, 8000, 1)[-300:]
    copying, writing = (Counter(done.choices[place].proposer for done in rounds) for place in (0, 1))
    assert copying["prompt_lookup"] > 0.9 * len(rounds)
    assert writing["draft"] > 0.9 * len(rounds)


def test_a_proposer_that_rarely_finds_a_draft_is_worth_the_rare_drafts() -> None:
    rare = constant(0.0, 0.1, 0.95)
    lookup = replace(simple_policy("adaptive"), proposers=("prompt_lookup",))
    rounds = simulate(lookup, MACHINE, [rare], 1, 2000, 1)
    plain = run("off", [rare], 1, 2000)
    # A draft costs next to nothing where none is found; where one is found, it is nearly always right.
    assert tokens_per_ms(rounds) > 1.3 * tokens_per_ms(plain)
    assert mean_gamma(rounds[-200:]) > 6.0


def test_off_is_off_and_recovers_when_drafts_do() -> None:
    state = PlanState()
    policy: Policy = replace(simple_policy("adaptive"), proposers=("draft",))
    bad = simulate(policy, MACHINE, [constant(0.05, 0.0, 0.0)], 4, 4 * 800, 1, state)
    assert sum(any(choice.gamma for choice in done.choices) for done in bad[200:]) <= 0.05 * len(bad[200:])
    good = simulate(policy, MACHINE, [constant(0.9, 0.0, 0.0)], 4, 4 * 6000, 2, state)
    assert mean_gamma(good[-200:]) > 2.0


PREDICTED_MACHINE = replace(MACHINE, draft_ms={**MACHINE.draft_ms, "prediction": lambda gammas: 0.03})


def predicted(found: float, right: float) -> Workload:
    """Return short requests with a prediction, whose text neither prompt nor draft model knows well."""
    stretch = Stretch(100, {"draft": (1.0, 0.5), "prompt_lookup": (0.1, 0.3), "prediction": (found, right)})
    return Workload("predicted", (stretch,), output_tokens=100)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_good_prediction_is_used_from_the_start_and_a_bad_one_costs_next_to_nothing(concurrency: int) -> None:
    policy, tokens = simple_policy("adaptive"), 1500 * concurrency
    good = simulate(policy, PREDICTED_MACHINE, [predicted(0.95, 0.95)], concurrency, tokens, 1)
    used = proposers(good[:100])
    assert used["prediction"] > 0.9 * used.total()
    bad = simulate(policy, PREDICTED_MACHINE, [predicted(0.1, 0.1)], concurrency, tokens, 1)
    without = simulate(policy, MACHINE, [predicted(0.0, 0.0)], concurrency, tokens, 1)
    assert tokens_per_ms(bad) > 0.93 * tokens_per_ms(without)
    assert tokens_per_ms(good) > 1.8 * tokens_per_ms(without)
