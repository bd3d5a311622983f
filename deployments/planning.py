"""The planner of the engine: translates between `service` messages and `policies` observations."""

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.policies.arrivals import arrival_rate, arrived
from specserve.policies.costs import CostTable
from specserve.policies.document import Policy
from specserve.policies.learning import learn_round
from specserve.policies.planning import plan_round
from specserve.policies.state import Choice, Observation, Plan, PlanState, RoundResult
from specserve.service.ports import Decision, Outcome, RequestView, RoundCost

_EXPLAINED_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class _PlannedRound:
    """What one round's decisions were made from, kept as long as a request that it decided for is remembered."""

    requests: Sequence[RequestView]
    plan: Plan
    decisions: tuple[Decision, ...]
    available: frozenset[str]
    number: int
    policy: str
    policy_version: int


class PolicyPlanner:
    """Plans by a policy; implements `service.ports.Planner`."""

    def __init__(self, policy: Policy, version: int = 1, costs: CostTable | None = None) -> None:
        """Start with a policy and, if they were measured, the costs of this engine."""
        self._policy = policy
        self._version = version
        self._state = PlanState() if costs is None else PlanState(costs=costs)
        self._decisions: dict[tuple[Choice, str], Decision] = {}
        self._planned: dict[str, _PlannedRound] = {}

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @property
    def policy_version(self) -> int:
        """The version of the policy in force."""
        return self._version

    @property
    def costs(self) -> CostTable:
        """The cost table as corrected so far."""
        return self._state.costs

    def set_policy(self, policy: Policy, version: int) -> None:
        """Put another policy in force from the next round; what was learned is kept."""
        self._policy = policy
        self._version = version
        self._decisions = {}

    def plan(self, requests: Sequence[RequestView], available: frozenset[str], now_s: float) -> tuple[Decision, ...]:
        """Return one decision per request, in order."""
        plan, self._state = plan_round(Observation(requests, available, now_s), self._policy, self._state)
        number, name = self._state.round_number, self._policy.name
        planned = _PlannedRound(requests, plan, self._decided(requests, plan), available, number, name, self._version)
        self._planned.update(dict.fromkeys([request.request_id for request in requests], planned))
        while len(self._planned) > _EXPLAINED_REQUESTS:
            del self._planned[next(iter(self._planned))]
        return planned.decisions

    def _decided(self, requests: Sequence[RequestView], plan: Plan) -> tuple[Decision, ...]:
        kinds = [(choice, request.tier) for choice, request in zip(plan.choices, requests, strict=True)]
        for choice, tier in set(kinds) - self._decisions.keys():
            law = self._policy.tier(tier).law
            self._decisions[choice, tier] = Decision(choice.proposer, choice.gamma, choice.reason, law)
        return tuple([self._decisions[kind] for kind in kinds])

    def learn(self, outcomes: Sequence[Outcome], cost: RoundCost) -> None:
        """Take in what the last round did."""
        result = RoundResult(
            outcomes, cost.num_requests, cost.num_tokens, cost.score_ms, cost.propose_ms, cost.num_prefill_tokens
        )
        self._state = learn_round(result, self._state)

    def arrived(self, now_s: float) -> None:
        """Note that a request arrived, for the arrival rate."""
        self._state.arrivals = arrived(self._state.arrivals, now_s)

    def queries_per_second(self, now_s: float) -> float:
        """Return the recent arrival rate."""
        return arrival_rate(self._state.arrivals, now_s)

    def acceptance_rate(self, tier: str) -> float:
        """Return the tier's recent acceptance rate, accepted over tested."""
        return self._state.acceptance.rate(tier)

    def explain(self, request_id: str) -> dict[str, object] | None:
        """Return the request's last decision and what went into it; None when it is not among the last 256."""
        planned = self._planned.get(request_id)
        if planned is None:
            return None
        place = next(i for i, request in enumerate(planned.requests) if request.request_id == request_id)
        return {
            "decision": planned.decisions[place],
            "request": planned.requests[place],
            "available": planned.available,
            "batch": len(planned.requests),
            "round": planned.number,
            "policy": planned.policy,
            "policy_version": planned.policy_version,
            "rate_plain": planned.plan.rate_plain,
            "rate_chosen": planned.plan.rate_chosen,
        }
