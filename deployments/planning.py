"""The planner of the engine: translates between `service` messages and `policies` observations."""

from collections import OrderedDict
from collections.abc import Sequence

from specserve.policies.arrivals import arrival_rate, arrived
from specserve.policies.costs import CostTable
from specserve.policies.document import Policy
from specserve.policies.planning import learn_round, plan_round
from specserve.policies.state import DraftResult, Observation, PlanState, RequestObservation, RoundResult
from specserve.service.ports import Decision, Outcome, RequestView, RoundCost

_EXPLAINED_REQUESTS = 256


class PolicyPlanner:
    """Plans by a policy; implements `service.ports.Planner`."""

    def __init__(self, policy: Policy, version: int = 1, costs: CostTable | None = None) -> None:
        """Start with a policy and, if they were measured, the costs of this engine."""
        self._policy = policy
        self._version = version
        self._state = PlanState() if costs is None else PlanState(costs=costs)
        self._explained: OrderedDict[str, dict[str, object]] = OrderedDict()

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

    def plan(self, requests: Sequence[RequestView], available: frozenset[str], now_s: float) -> tuple[Decision, ...]:
        """Return one decision per request, in order."""
        observation = Observation(tuple(_observed(request) for request in requests), available, now_s)
        plan, self._state = plan_round(observation, self._policy, self._state)
        decisions = tuple(Decision(choice.proposer, choice.gamma, choice.reason) for choice in plan.choices)
        for request, decision in zip(requests[:_EXPLAINED_REQUESTS], decisions, strict=False):
            self._explained[request.request_id] = {
                "decision": decision,
                "request": request,
                "available": available,
                "batch": len(requests),
                "round": self._state.round_number,
                "policy": self._policy.name,
                "policy_version": self._version,
                "rate_plain": plan.rate_plain,
                "rate_chosen": plan.rate_chosen,
            }
            self._explained.move_to_end(request.request_id)
        while len(self._explained) > _EXPLAINED_REQUESTS:
            self._explained.popitem(last=False)
        return decisions

    def learn(self, outcomes: Sequence[Outcome], cost: RoundCost) -> None:
        """Take in what the last round did."""
        drafts = tuple(
            DraftResult(o.request_id, o.tier, o.proposer, o.num_asked, o.num_drafted, o.num_accepted) for o in outcomes
        )
        result = RoundResult(drafts, cost.num_requests, cost.num_tokens, cost.score_ms, cost.propose_ms)
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
        return self._explained.get(request_id)


def _observed(view: RequestView) -> RequestObservation:
    return RequestObservation(
        view.request_id,
        view.tier,
        view.mode,
        view.max_draft_tokens,
        view.proposer,
        view.context_tokens,
        view.remaining_tokens,
    )
