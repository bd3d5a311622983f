"""The planner of the engine: translates between `service` messages and `policies` observations."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specserve.policies.arrivals import arrival_rate, arrived
from specserve.policies.costs import CostTable
from specserve.policies.demand import Demand, stance
from specserve.policies.document import Law, Policy
from specserve.policies.learning import learn_round
from specserve.policies.planning import plan_round
from specserve.policies.replay import RecordedRound, Recording
from specserve.policies.state import Choice, Observation, Plan, PlanState, RoundResult
from specserve.service.ports import Decision, Outcome, RequestView, RoundCost

from .guard import Tally
from .recorder import Recorder, ShadowTally
from .snapshot import CanaryShare, Governing, Snapshot
from .tracks import RoundFacts, Tracks

_MAX_TALLIES = 8
_LATE_ROUNDS = 32
_OVERRIDDEN = Choice(None, 0, "override")
_NOTHING = Decision(None, 0, "override")


@dataclass(slots=True)
class _Lane:
    """A policy, its version, and the state it plans with. Every lane learns from every round."""

    governing: Governing
    state: PlanState

    @property
    def version(self) -> int:
        return self.governing.version

    def plan(self, views: Sequence[RequestView], available: frozenset[str], now_s: float, beside: int = 0) -> Plan:
        observation = Observation(views, available, now_s, beside)
        plan, self.state = plan_round(observation, self.governing.policy, self.state)
        return plan


class PolicyPlanner:
    """Plans by what the controller last said; implements `service.ports.Planner`."""

    def __init__(self, policy: Policy, version: int = 1, costs: CostTable | None = None) -> None:
        """Start with a policy and, if they were measured, the costs of this engine."""
        self._active = _Lane(Governing(version, policy), PlanState() if costs is None else PlanState(costs=costs))
        self._canary: _Lane | None = None
        self._shadow: _Lane | None = None
        self._share: CanaryShare | None = None
        self._silent_until: dict[str | None, float] = {}
        self._round = 0
        self._decisions: dict[tuple[Choice, Law], Decision] = {}
        self._tracks = Tracks()
        self._recorder = Recorder()
        self.snapshot: Snapshot | None = None
        self.tallies: dict[int, Tally] = {}
        self._shadow_tally = ShadowTally()
        self._demands: dict[str, Demand] = {}

    @property
    def policy(self) -> Policy:
        """The active policy."""
        return self._active.governing.policy

    @property
    def policy_version(self) -> int:
        """The version of the active policy."""
        return self._active.version

    @property
    def shadow(self) -> ShadowTally | None:
        """What the shadow would have done; None when there is none."""
        return None if self._shadow is None else self._shadow_tally

    @property
    def costs(self) -> CostTable:
        """The cost table as corrected so far."""
        return self._active.state.costs

    def tpot_slo_ms(self, tier: str) -> float | None:
        """Return the tier's objective under the active policy."""
        return self.policy.tier(tier).tpot_slo_ms

    def version_of(self, request_id: str) -> int:
        """Return the version that decided for the request last."""
        track = self._tracks.of(request_id)
        return self._active.version if track is None else track.facts.governing.version

    def follow(self, snapshot: Snapshot, now_s: float) -> None:
        """Let `snapshot` govern from the next round; what was learned is kept. `now_s` is on the clock of `plan`."""
        self.snapshot = snapshot
        if snapshot.active.version != self._active.version or snapshot.active.policy != self.policy:
            self._active.governing = snapshot.active
        self._share = snapshot.canary
        self._canary = self._lane(self._canary, None if snapshot.canary is None else snapshot.canary.governing)
        watched = None if self._shadow is None else self._shadow.version
        self._shadow = self._lane(self._shadow, snapshot.shadow)
        if snapshot.shadow is not None and snapshot.shadow.version != watched:
            self._shadow_tally = ShadowTally(snapshot.shadow.version)
        self._silent_until = {}
        for silence in snapshot.silences:
            end = math.inf if silence.remaining_s is None else now_s + silence.remaining_s
            self._silent_until[silence.tier] = max(end, self._silent_until.get(silence.tier, end))

    def _lane(self, lane: _Lane | None, governing: Governing | None) -> _Lane | None:
        """Return a lane for `governing`: the one there is, or one that begins with all that is known."""
        if governing is None or (lane is not None and lane.governing == governing):
            return None if governing is None else lane
        return _Lane(governing, copy.deepcopy(self._active.state))

    def plan(self, requests: Sequence[RequestView], available: frozenset[str], now_s: float) -> tuple[Decision, ...]:
        """Return one decision per request, in order."""
        self._round += 1
        silent = self._silent(requests, now_s)
        views = requests
        if silent:
            views = [_silenced(view) if place in silent else view for place, view in enumerate(requests)]
        choices = [_OVERRIDDEN] * len(views)
        planned = []
        for lane, places in self._parts(views):
            part = views if len(places) == len(views) else [views[place] for place in places]
            plan = lane.plan(part, available, now_s, len(views) - len(places))
            planned.append((lane, places, plan))
            for place, choice in zip(places, plan.choices, strict=True):
                choices[place] = choice
        if self._shadow is not None:
            self._shadow_tally.compare(choices, self._shadow.plan(views, available, now_s).choices)
        for demand in self._demands.values():
            chosen = any(choice.gamma > 0 and choice.proposer == demand.name for choice in choices)
            demand.note(views, self._policies, chosen, now_s)
        for place in silent:
            choices[place] = _OVERRIDDEN
        qps = self.queries_per_second(now_s)
        self._recorder.plan(RecordedRound(requests, available, now_s, qps, choices))
        decisions: list[Decision] = [_NOTHING] * len(views)
        acceptance = {tier: self.acceptance_rate(tier) for tier in {view.tier for view in requests}}
        for lane, places, plan in planned:
            facts = RoundFacts(
                self._round,
                lane.governing,
                lane is self._canary,
                len(views),
                available,
                qps,
                acceptance,
                plan.rate_plain,
                plan.rate_chosen,
            )
            laws: dict[str, Law] = {tier: lane.governing.policy.tier(tier).law for tier in acceptance}
            for place in places:
                decisions[place] = self._decision(choices[place], laws[requests[place].tier])
            self._tracks.note([(requests[place], decisions[place]) for place in places], facts)
        return tuple(decisions)

    def learn(self, outcomes: Sequence[Outcome], cost: RoundCost) -> None:
        """Take in what the last round did."""
        result = RoundResult(
            outcomes, cost.num_requests, cost.num_tokens, cost.score_ms, cost.propose_ms, cost.num_prefill_tokens
        )
        for lane in (self._active, self._canary, self._shadow):
            if lane is not None:
                lane.state = learn_round(result, lane.state)
        self._recorder.learn(result)
        for outcome in outcomes:
            drafted, accepted = outcome.num_drafted, outcome.num_accepted
            self._tracks.learn(outcome.request_id, drafted, accepted)
            self._tally(outcome.request_id).test(min(accepted + 1, drafted), accepted)

    def ended(self, request_id: str, failed: bool, tpot_ms: float | None) -> None:
        """Count a request that ended for the version that decided for it; see `guard.Tally`."""
        self._tally(request_id).end(failed, tpot_ms)

    @property
    def _policies(self) -> list[Policy]:
        return [lane.governing.policy for lane in (self._active, self._canary) if lane is not None]

    def watch_demand(self, name: str, idle_s: float) -> None:
        """Begin to keep account of who wants the proposer `name`, for `wants`."""
        self._demands[name] = Demand(name, idle_s)

    def wants(self, name: str, reached: bool, now_s: float, memory_short: bool = False) -> bool:
        """Return whether the proposer should be there, given whether it is and whether KV pages are short.

        `now_s` is on the clock of `plan`.
        """
        silent = frozenset(tier for tier, end_s in self._silent_until.items() if now_s < end_s)
        return self._demands[name].wanted(stance(name, self._policies, silent), reached, now_s, memory_short)

    def arrived(self, now_s: float) -> None:
        """Note that a request arrived, for the arrival rate."""
        for lane in (self._active, self._canary, self._shadow):
            if lane is not None:
                lane.state.arrivals = arrived(lane.state.arrivals, now_s)

    def queries_per_second(self, now_s: float) -> float:
        """Return the recent arrival rate."""
        return arrival_rate(self._active.state.arrivals, now_s)

    def acceptance_rate(self, tier: str) -> float:
        """Return the tier's recent acceptance rate, accepted over tested."""
        return self._active.state.acceptance.rate(tier)

    def gauges(self, now_s: float) -> dict[str, Any]:
        """Return what operators watch: arrivals, acceptance by tier, and the batch and draft length of late rounds."""
        state, rounds = self._active.state, self._recorder.newest(_LATE_ROUNDS)
        lengths = [choice.gamma for round_ in rounds for choice in round_.choices]
        return {
            "policy_version": self.policy_version,
            "speculating": state.switch.speculating,
            "qps": self.queries_per_second(now_s),
            "acceptance_rate": {tier: state.acceptance.rate(tier) for tier in sorted(state.acceptance.totals)},
            "mean_batch": len(lengths) / len(rounds) if rounds else 0.0,
            "mean_gamma": sum(lengths) / len(lengths) if lengths else 0.0,
        }

    def explain(self, name: str) -> list[dict[str, Any]]:
        """Return what is known of the request `name`, or of every choice of the answer with that id; [] if nothing."""
        return [track.explained() for track in self._tracks.found(name)]

    def recording(self, num_rounds: int) -> Recording:
        """Return the last rounds and a copy of what was learned by now."""
        return Recording(self._recorder.newest(num_rounds), copy.deepcopy(self._active.state))

    def _silent(self, requests: Sequence[RequestView], now_s: float) -> Sequence[int] | frozenset[int]:
        """Return the places of the requests for which an override turns speculation off."""
        binding = {tier for tier, end_s in self._silent_until.items() if now_s < end_s}
        if None in binding:
            return range(len(requests))
        return frozenset(place for place, view in enumerate(requests) if view.tier in binding) if binding else ()

    def _parts(self, views: Sequence[RequestView]) -> list[tuple[_Lane, Sequence[int]]]:
        """Return which lane decides for which places."""
        share = self._share
        if share is None or self._canary is None:
            return [(self._active, range(len(views)))]
        covered = [share.covers(view.request_id, view.tier) for view in views]
        parts: list[tuple[_Lane, Sequence[int]]] = [
            (self._active, [place for place, is_canary in enumerate(covered) if not is_canary]),
            (self._canary, [place for place, is_canary in enumerate(covered) if is_canary]),
        ]
        return [(lane, places) for lane, places in parts if places]

    def _decision(self, choice: Choice, law: Law) -> Decision:
        decision = self._decisions.get((choice, law))
        if decision is None:
            made = Decision(choice.proposer, choice.gamma, choice.reason, law)
            decision = self._decisions[choice, law] = made
        return decision

    def _tally(self, request_id: str) -> Tally:
        version = self.version_of(request_id)
        tally = self.tallies.get(version)
        if tally is None:
            tally = self.tallies[version] = Tally()
            while len(self.tallies) > _MAX_TALLIES:
                del self.tallies[next(iter(self.tallies))]
        return tally


def _silenced(view: RequestView) -> RequestView:
    """Return the request as if it asked for no drafts; `dataclasses.replace` takes three times as long."""
    return RequestView(
        view.request_id,
        view.tier,
        "off",
        view.max_draft_tokens,
        view.proposer,
        view.context_tokens,
        view.remaining_tokens,
    )
