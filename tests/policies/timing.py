"""Prints what planning and learning take a round: `python tests/policies/timing.py`. A figure, not a test."""

import random
import statistics
import time

from specserve.deployments.planning import PolicyPlanner
from specserve.policies.document import simple_policy
from specserve.service.ports import Outcome, RequestView, RoundCost


def measure(num_requests: int, num_rounds: int, names: frozenset[str]) -> tuple[list[float], list[float]]:
    """Return the seconds of every plan and every learn, with requests that are accepted unequally."""
    chance = random.Random(1)
    planner = PolicyPlanner(simple_policy("adaptive"))
    accept = [chance.choice((0.3, 0.6, 0.9)) for _ in range(num_requests)]
    plans, learns = [], []
    for number in range(num_rounds):
        views = [RequestView(f"r{i}", "default", "auto", None, None, 10 + number, 100_000) for i in range(num_requests)]
        started = time.perf_counter()
        decisions = planner.plan(views, names, number * 0.01)
        plans.append(time.perf_counter() - started)
        outcomes, longest = [], dict[str, int]()
        for i, decision in enumerate(decisions):
            if decision.proposer is not None:
                gamma, accepted = decision.gamma, 0
                while accepted < gamma and chance.random() < accept[i]:
                    accepted += 1
                outcomes.append(Outcome(f"r{i}", "default", decision.proposer, gamma, gamma, accepted))
                longest[decision.proposer] = max(longest.get(decision.proposer, 0), gamma)
        tokens = num_requests + sum(outcome.num_drafted for outcome in outcomes)
        spent = tuple((name, gamma, 0.3 * gamma if name == "draft" else 0.1) for name, gamma in longest.items())
        cost = RoundCost(num_requests, tokens, 10.0 + 0.02 * tokens, spent)
        started = time.perf_counter()
        planner.learn(outcomes, cost)
        learns.append(time.perf_counter() - started)
    return plans[num_rounds // 4 :], learns[num_rounds // 4 :]


def main() -> None:
    """Print one line for each batch size."""
    for num_requests, num_rounds in ((1, 4000), (16, 2000), (256, 400)):
        plans, learns = measure(num_requests, num_rounds, frozenset({"draft", "prompt_lookup"}))
        for what, seconds in (("plan", plans), ("learn", learns)):
            least, median = min(seconds) * 1e3, statistics.median(seconds) * 1e3
            print(f"{num_requests:4d} requests  {what:5s}  {least:.3f} ms at least, {median:.3f} ms median")


if __name__ == "__main__":
    main()
