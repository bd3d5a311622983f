"""Traffic that rises: what looking ahead changes. `PYTHONPATH=tests python -m support.ramps` prints a table."""

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, quantiles

from specserve.policies.document import Policy, policy_from_dict, simple_policy
from specserve.policies.simulation import Round, Served, Workload, replay

from .machines import COPY, MACHINE, OPEN

RISES_S = (10.0, 40.0)
SCHEDULE = policy_from_dict(
    {
        "tiers": {"default": {"law": "schedule", "rules": [{"qps": {"below": 2.5}, "gamma": 4}]}},
        "proposers": ["draft"],
    }
)


def ramp(low: float, high: float, total_s: float, seed: int) -> list[float]:
    """Return arrival times of a random stream whose rate rises from `low` to `high` between `RISES_S`."""
    chance, now_s = random.Random(f"{seed} arrivals"), 0.0
    start_s, end_s = RISES_S
    times = []
    while (now_s := now_s + chance.expovariate(high)) < total_s:
        risen = min(max((now_s - start_s) / (end_s - start_s), 0.0), 1.0)
        if chance.random() * high < low + (high - low) * risen:
            times.append(now_s)
    return times


def climb(policy: Policy, workload: Workload, ahead_s: float, seed: int) -> tuple[list[Round], list[Served]]:
    """Return what becomes of a ramp to just below what the machine can do plain, looking `ahead_s` seconds ahead."""
    looking = replace(policy, limits=replace(policy.limits, forecast_s=ahead_s))
    machine = replace(MACHINE, prompt_share=128)
    return replay(looking, machine, [workload], ramp(1.0, 3.6, 60.0, seed), 32, seed)


def mean_waiting(rounds: Sequence[Round]) -> float:
    """Return how many requests had no token yet, on average over time."""
    return sum(done.num_waiting * done.ms for done in rounds) / sum(done.ms for done in rounds)


def p95_tpot_ms(served: Sequence[Served]) -> float:
    """Return the 95th percentile of the milliseconds for each token after the first."""
    return quantiles([one.tpot_ms for one in served], n=20)[-1]


def main() -> None:
    """Print one line for each law, workload and horizon: means over eight seeds."""
    for name, policy in (("schedule", SCHEDULE), ("adaptive", simple_policy("adaptive"))):
        for workload in (OPEN, COPY):
            for ahead_s in (0.0, 2.0):
                runs = [climb(policy, workload, ahead_s, seed) for seed in range(8)]
                most = fmean(max(done.num_waiting for done in rounds) for rounds, _ in runs)
                waiting = fmean(mean_waiting(rounds) for rounds, _ in runs)
                tpot_ms = fmean(p95_tpot_ms(served) for _, served in runs)
                ttft_s = fmean(
                    quantiles([one.first_token_s - one.arrived_s for one in served], n=20)[-1] for _, served in runs
                )
                print(
                    f"{name:8s}  {workload.name:10s}  {ahead_s:g} s ahead  waiting {waiting:.2f}, at most {most:.1f}"
                    f"  p95 TPOT {tpot_ms:.1f} ms  p95 TTFT {ttft_s * 1e3:.0f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
