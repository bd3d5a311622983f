"""One round's planning while it lasts: its inputs, the choices so far and what they already cost."""

from collections.abc import Sequence

from .arrivals import arrival_rate, expected_crowd, expected_rate
from .document import Policy, TierPolicy
from .laws import Group, GroupKey, Scale, scheduled_gamma, trim_evenly
from .state import Asked, Asking, Choice, Memory, Observation, PlanState
from .strengths import Curve, Standing

_ENTRY_TOKENS = 64
_ENTRY_ROUNDS = 64.0
_ENTRY_STEP_MS = 1.0 / 16.0
_FADE_EVERY = 8
_MOST_CROWD = 4.0

Candidate = tuple[int, Memory, Asked, int]
"""A request that may draft: its place in the batch, its memory and kind, and the longest draft it may have."""


class Work:
    """The batch, what each request gets, and the groups the adaptive law weighs."""

    def __init__(self, observation: Observation, policy: Policy, state: PlanState) -> None:
        if state.asking is None or state.asking.policy is not policy or state.asking.available != observation.available:
            state.asking = Asking(policy, observation.available)
        self.observation = observation
        self.asking = state.asking
        self.requests = observation.requests
        self.state = state
        self.limits = policy.limits
        self.number = state.round_number
        self.num = len(observation.requests) + observation.num_beside
        self.choices: list[Choice | None] = [None] * len(observation.requests)
        self.budget_left = policy.limits.draft_tokens_per_round
        self.qps, self.crowd = self._load()
        self.groups: dict[GroupKey, Group] = {}
        self.started: dict[str, tuple[int, int]] = {}
        self.forced_tokens = self.forced_value = 0.0
        self.steps = state.costs.score.steps(self.num)
        self.factor = state.costs.score.factor
        self._draft_ms: dict[str, tuple[float, float, float]] = {}
        self._scheduled: dict[str, int] = {}

    def _load(self) -> tuple[float, float]:
        """Return the requests per second, and how many requests there are for each one here: now or soon."""
        state, now_s, ahead_s = self.state, self.observation.now_s, self.limits.forecast_s
        qps = arrival_rate(state.arrivals, now_s)
        if ahead_s <= 0.0 or qps <= 0.0:
            return qps, 1.0
        crowd = expected_crowd(state.crowd, state.arrivals, now_s, ahead_s) / self.num
        return max(qps, expected_rate(state.arrivals, now_s, ahead_s)), min(max(crowd, 1.0), _MOST_CROWD)

    def scheduled(self, tier: str, policy: TierPolicy) -> int:
        """Return what the tier's rules say this round."""
        if tier not in self._scheduled:
            batch = round(self.num * self.crowd)
            self._scheduled[tier] = scheduled_gamma(policy, self.qps, batch, self.state.acceptance.rate(tier))
        return self._scheduled[tier]

    def draft_ms(self, proposer: str) -> tuple[float, float, float]:
        """Return the proposer's milliseconds per call, step and token."""
        if proposer not in self._draft_ms:
            self._draft_ms[proposer] = self.state.costs.draft(proposer).coefficients()
        return self._draft_ms[proposer]

    def curve(self, tier: str, proposer: str, standing: Standing, cap: int) -> Curve:
        """Return the chances of requests of this standing with the proposer."""
        return self.state.acceptance.of(proposer, tier).curve(standing, cap)

    def force(self, forced: Sequence[Candidate]) -> None:
        """Give the lengths asked for by requests and operators, trimmed evenly to the cap on the round."""
        if len(forced) > 1:
            forced = sorted(forced, key=lambda candidate: self.requests[candidate[0]].request_id)
        asked = [(kind.tier.weight, self.requests[index].request_id, gamma) for index, _, kind, gamma in forced]
        for (index, memory, kind, _), gamma in zip(forced, trim_evenly(asked, self.budget_left), strict=True):
            if gamma == 0 or memory.proposer is None:
                self.choices[index] = Choice(None, 0, kind.reason)
            else:
                self.give(index, memory, memory.proposer, gamma, kind, kind.reason)

    def give(self, index: int, memory: Memory, proposer: str, gamma: int, kind: Asked, reason: str) -> None:
        """Fix one request's choice before the adaptive law weighs the rest."""
        self.choices[index] = Choice(proposer, gamma, reason)
        self.budget_left -= gamma
        longest, tokens = self.started.get(proposer, (0, 0))
        self.started[proposer] = max(longest, gamma), tokens + gamma
        curve = self.curve(self.requests[index].tier, proposer, memory.standing(proposer), gamma)
        self.forced_tokens += sum(curve.drafted[:gamma])
        self.forced_value += kind.tier.weight * sum(curve.accepted[:gamma])

    def behind(self, index: int, memory: Memory, proposer: str) -> int:
        """Return how many tokens of the request's context the proposer has not seen."""
        history = memory.histories.get(proposer)
        known = 0 if history is None else history.known_tokens
        return max(self.requests[index].context_tokens - known, 0)

    def join(self, index: int, memory: Memory, kind: Asked, cap: int) -> None:
        """Put one request into the group of those like it, for the adaptive law."""
        request, history, proposer = self.requests[index], memory.history, memory.proposer
        assert proposer is not None
        entry, ease = 0, memory.ease
        if self.state.active_rounds - ease.last_round >= _FADE_EVERY:
            ease.fade(self.state.active_rounds)
        standing = ease.standing(history)
        behind = request.context_tokens - (history.known_tokens if history is not None else 0)
        if behind > _ENTRY_TOKENS:
            rounds = min(_ENTRY_ROUNDS, 1.0 + request.remaining_tokens / 2)
            entry = int(behind * self.state.costs.draft(proposer).catch_up_ms / rounds / _ENTRY_STEP_MS)
        key = (request.tier, proposer, cap, standing, entry)
        group = self.groups.get(key)
        if group is None:
            curve = self.state.acceptance.of(proposer, request.tier).curve(standing, cap)
            weight, entry_ms = kind.tier.weight, entry * _ENTRY_STEP_MS
            group = self.groups[key] = Group(key, request.tier, proposer, weight, cap, curve, entry_ms)
        group.members.append(index)

    def scale(self) -> Scale:
        """Return the round without adaptive drafts.

        Requests that are on their way count as if they got their token each round: drafts that hold up more of them
        than they bring are not worth it, so lengths fall before the queue grows.
        """
        sizes: dict[str, int] = {}
        for request in self.requests:
            sizes[request.tier] = sizes.get(request.tier, 0) + 1
        value, slo_ms = self.forced_value + self.observation.num_beside, {}
        for tier, size in sorted(sizes.items()):
            policy = self.asking.policy.tier(tier)
            value += policy.weight * size * self.crowd
            if policy.tpot_slo_ms is not None:
                slo_ms[tier] = policy.tpot_slo_ms
        names = {*self.started, *(group.proposer for group in self.groups.values())}
        draft_ms = {name: self.draft_ms(name) for name in names}
        return Scale(value, self.forced_tokens, self.steps, self.factor, draft_ms, self.started, slo_ms, sizes)
