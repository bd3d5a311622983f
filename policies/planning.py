"""Planning: one draft length and proposer per running request, every round, and what the round taught."""

import math
from collections.abc import Sequence

from .acceptance import Chances, Evidence, Survival, chances_of, survival
from .arrivals import arrival_rate
from .costs import interpolate
from .document import Policy, TierPolicy
from .laws import Candidate, Scale, scheduled_gamma, trim_evenly, weigh_budgets
from .state import Choice, Memory, Observation, Plan, PlanState, RequestObservation, RoundResult

_MAX_PROBE_INTERVAL = 1024
_PROBE_GAMMA = 4
_TRIAL_GAMMA = 4
_ENOUGH_TRIED = 8.0
_MOST_TRIED = 64.0
_TRIED_FADE = 0.999
_WARMUP_ROUNDS = 3
_FORGET_ROUNDS = 256


def plan_round(observation: Observation, policy: Policy, state: PlanState) -> tuple[Plan, PlanState]:
    """Return one choice per request, in order, and the state, which is updated in place.

    Deterministic and independent of the order of requests. Never raises on load: what does not fit drafts less.
    Cost: O(requests + draft tokens x log requests).
    """
    state.round_number += 1
    state.active_rounds += state.speculating
    state.probing = False
    work = _Work(observation, policy, state)
    forced: list[tuple[int, int, str]] = []
    adaptive: list[int] = []
    for index, request in enumerate(observation.requests):
        memory = state.memories.setdefault(request.request_id, Memory())
        memory.seen_round = state.round_number
        gamma, reason = work.ask(index, request)
        if gamma is None:
            adaptive.append(index)
        elif gamma == 0:
            work.choices[index] = Choice(None, 0, reason)
        else:
            forced.append((index, gamma, reason))
    work.force(forced)
    if adaptive:
        work.adapt(adaptive)
    _forget(state, len(observation.requests))
    for key in state.tried:
        state.tried[key] *= _TRIED_FADE
    blank = Choice(None, 0, "adaptive_off")
    plan = Plan(tuple(choice or blank for choice in work.choices), work.rate_plain, work.rate_chosen)
    return plan, state


def learn_round(result: RoundResult, state: PlanState) -> PlanState:
    """Return the state, updated in place, after the outcome and cost of one round."""
    num_drafted = num_accepted = 0
    users: dict[str, int] = {}
    for draft in sorted(result.drafts, key=lambda d: d.request_id):
        users[draft.proposer] = users.get(draft.proposer, 0) + 1
        memory = state.memories.setdefault(draft.request_id, Memory(seen_round=state.round_number))
        own = memory.evidence.setdefault(draft.proposer, Evidence())
        state.acceptance.learn(draft.proposer, draft.tier, own, draft.num_asked, draft.num_drafted, draft.num_accepted)
        own.last_round = state.active_rounds
        key = (draft.proposer, draft.tier)
        state.tried[key] = min(state.tried.get(key, 0.0) + 1.0, _MOST_TRIED)
        num_drafted += draft.num_drafted
        num_accepted += draft.num_accepted
    if result.num_tokens > 0:
        state.costs = state.costs.observe_score(result.num_requests, result.num_tokens, result.score_ms)
    for proposer, gamma, ms in result.propose_ms:
        state.costs = state.costs.observe_draft(proposer, max(users.get(proposer, 0), 1), gamma, ms)
    if state.probing:
        if 2 * num_accepted >= max(num_drafted, 1):
            state.probe_interval = state.first_interval
            state.next_probe_round = state.round_number + state.probe_interval
        state.probing = False
    return state


class _Work:
    """One round's planning: the inputs, the choices so far and the caches that keep it cheap."""

    def __init__(self, observation: Observation, policy: Policy, state: PlanState) -> None:
        self.requests = observation.requests
        self.state = state
        self.limits = policy.limits
        self.num = len(observation.requests)
        self.qps = arrival_rate(state.arrivals, observation.now_s)
        self.choices: list[Choice | None] = [None] * self.num
        self.rate_plain = self.rate_chosen = 0.0
        self.available = observation.available
        self.usable = tuple(name for name in policy.proposers if name in observation.available)
        self.tiers: dict[str, TierPolicy] = {r.tier: policy.tier(r.tier) for r in observation.requests}
        self.caps = [0] * self.num
        self.budget_left = policy.limits.draft_tokens_per_round
        self.forced_tokens = self.forced_value = 0.0
        self.started: dict[str, int] = {}
        self._means: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
        self._draft_ms: dict[str, list[float]] = {}
        self._picks: dict[tuple[str, int], str] = {}
        self._longest = max([tier.max_gamma for tier in self.tiers.values()], default=0)
        knots = state.costs.score.knots
        values = state.costs.score.values(self.num) if self.num else []
        tokens = min(self.budget_left, self.num * self._longest)
        self._score = [interpolate(knots, values, self.num + b) for b in range(tokens + 2)] if self.num else []

    def ask(self, index: int, request: RequestObservation) -> tuple[int | None, str]:
        """Return the gamma asked for and why; None leaves it to the adaptive law."""
        tier = self.tiers[request.tier]
        if request.mode == "off":
            return 0, "mode_off"
        law = "on" if request.mode == "on" else tier.law
        if law == "off":
            return 0, "policy_off"
        if request.remaining_tokens <= 1:
            return 0, "end_of_output"
        if not self.candidates(request):
            return 0, "no_proposer"
        cap = min(tier.max_gamma, request.remaining_tokens - 1)
        if request.max_draft_tokens is not None:
            cap = min(cap, max(request.max_draft_tokens, 0))
        self.caps[index] = cap
        if law == "on":
            return cap, "mode_on"
        if law == "fixed":
            return min(tier.gamma, cap), "fixed"
        if law == "schedule":
            acceptance = self.state.acceptance.rate(request.tier)
            return min(scheduled_gamma(tier, self.qps, self.num, acceptance), cap), "schedule"
        return (0, "adaptive_off") if cap == 0 else (None, "adaptive")

    def candidates(self, request: RequestObservation) -> tuple[str, ...]:
        """Return the proposers the request may use now."""
        if request.proposer is None:
            return self.usable
        return (request.proposer,) if request.proposer in self.available else ()

    def force(self, forced: Sequence[tuple[int, int, str]]) -> None:
        """Give the lengths asked for by requests and operators, trimmed evenly to the cap on the round."""
        asked = [
            (self.tiers[self.requests[i].tier].weight, self.requests[i].request_id, gamma) for i, gamma, _ in forced
        ]
        for (index, _, reason), gamma in zip(forced, trim_evenly(asked, self.budget_left), strict=True):
            if gamma == 0:
                self.choices[index] = Choice(None, 0, reason)
            else:
                self.give(index, self.pick(index, gamma), gamma, reason)
        self.budget_left -= sum(choice.gamma for choice in self.choices if choice is not None)

    def give(self, index: int, proposer: str, gamma: int, reason: str) -> None:
        """Fix one request's choice before the adaptive law weighs the rest."""
        request = self.requests[index]
        self.choices[index] = Choice(proposer, gamma, reason)
        chances = self.survival(request, proposer, gamma)
        self.forced_tokens += sum(chances.drafted)
        self.forced_value += self.tiers[request.tier].weight * sum(chances.accepted)
        self.started[proposer] = max(self.started.get(proposer, 0), gamma)

    def adapt(self, indices: Sequence[int]) -> None:
        """Let the adaptive law choose for the given requests."""
        state = self.state
        if self._warm_up():
            for index in indices:
                self.choices[index] = Choice(None, 0, "warmup")
            return
        rest = self._trials(indices) if state.speculating else list(indices)
        candidates = [self._candidate(index) for index in rest]
        budget = weigh_budgets(candidates, self._scale(), self.budget_left)
        chosen = self._settle(budget.rates, budget.best, len(candidates))
        self.rate_plain, self.rate_chosen = budget.rates[0], budget.rates[chosen]
        lengths = [0] * len(candidates)
        for number in budget.order[:chosen]:
            lengths[number] += 1
        for candidate, gamma in zip(candidates, lengths, strict=True):
            chosen_by = candidate.proposer if gamma else None
            self.choices[candidate.index] = Choice(chosen_by, gamma, "adaptive" if gamma else "adaptive_off")
        if not state.speculating:
            self._probe(rest)

    def survival(self, request: RequestObservation, proposer: str, gamma: int) -> Survival:
        """Return the estimated survival of the request's first gamma tokens."""
        return survival(self.chances(request, proposer), gamma)

    def chances(self, request: RequestObservation, proposer: str) -> Chances:
        """Return the request's estimated chances by position with the proposer."""
        own = self.state.memories[request.request_id].evidence.get(proposer)
        key = (proposer, request.tier)
        if key not in self._means:
            longest = self.tiers[request.tier].max_gamma
            self._means[key] = self.state.acceptance.shared_means(proposer, request.tier, longest)
        return chances_of(self._means[key], own, self.state.active_rounds)

    def pick(self, index: int, gamma: int) -> str:
        """Return the proposer that promises most per millisecond if all requests were like this one.

        A choice stands for the dwell time, so that drafters keep their caches and planning stays cheap.
        """
        request = self.requests[index]
        memory = self.state.memories[request.request_id]
        names = self.candidates(request)
        age = self.state.round_number - memory.chosen_round
        if memory.proposer in names and (len(names) == 1 or age < self.limits.min_dwell_rounds):
            return memory.proposer
        if len(names) == 1:
            best = names[0]
        elif memory.evidence or request.proposer is not None:
            best = max(names, key=lambda name: (self._promise(request, name, gamma), -names.index(name)))
        else:
            shared = (request.tier, gamma)
            if shared not in self._picks:
                self._picks[shared] = max(
                    names, key=lambda name: (self._promise(request, name, gamma), -names.index(name))
                )
            best = self._picks[shared]
        memory.proposer, memory.chosen_round = best, self.state.round_number
        return best

    def draft_ms(self, proposer: str) -> list[float]:
        """Return the milliseconds of a call by its largest gamma, as if every request took part."""
        if proposer not in self._draft_ms:
            curve = self.state.costs.draft_curve(proposer)
            values = curve.values(self.num)
            self._draft_ms[proposer] = [0.0] + [
                interpolate(curve.knots, values, g) for g in range(1, self._longest + 1)
            ]
        return self._draft_ms[proposer]

    def score_ms(self, extra_tokens: float) -> float:
        """Return the score cost of this batch with `extra_tokens` draft tokens."""
        whole = min(int(extra_tokens), len(self._score) - 2)
        return self._score[whole] + (self._score[whole + 1] - self._score[whole]) * (extra_tokens - whole)

    def _promise(self, request: RequestObservation, proposer: str, gamma: int) -> float:
        chances = self.survival(request, proposer, gamma)
        spent = self.draft_ms(proposer)
        room = min(self.budget_left, self.num * self._longest) / self.num
        tokens, emitted, best = 0.0, 1.0, 0.0
        for k in range(gamma):
            tokens += chances.drafted[k]
            emitted += chances.accepted[k]
            best = max(best, emitted / (self.score_ms(self.num * min(tokens, room)) + spent[k + 1]))
        return best

    def _warm_up(self) -> bool:
        """Return whether the plain round still has to be measured at this batch size."""
        score = self.state.costs.score
        if score.evidence(self.num + self.forced_tokens) >= 2.0:
            return False
        size = max(self.num, 1).bit_length()
        self.state.warmed[size] = self.state.warmed.get(size, 0) + 1
        return self.state.warmed[size] <= _WARMUP_ROUNDS

    def _candidate(self, index: int) -> Candidate:
        request, gamma = self.requests[index], self.caps[index]
        proposer = self.pick(index, gamma)
        weight = self.tiers[request.tier].weight
        return Candidate(
            index, request.request_id, request.tier, weight, proposer, gamma, self.chances(request, proposer)
        )

    def _scale(self) -> Scale:
        names = {*self.usable, *self.started, *(r.proposer for r in self.requests if r.proposer in self.available)}
        sizes: dict[str, int] = {}
        for request in self.requests:
            sizes[request.tier] = sizes.get(request.tier, 0) + 1
        room = min(self.budget_left, len(self._score))
        return Scale(
            value=sum(self.tiers[r.tier].weight for r in self.requests) + self.forced_value,
            score_ms=[self.score_ms(self.forced_tokens + b) for b in range(room + 1)],
            fixed_ms=0.0,
            draft_ms={name: self.draft_ms(name) for name in names if name is not None},
            started=self.started,
            slo_ms={name: t.tpot_slo_ms for name, t in self.tiers.items() if t.tpot_slo_ms is not None},
            tier_sizes=sizes,
        )

    def _settle(self, rates: Sequence[float], best: int, num_candidates: int) -> int:
        """Return the budget to use: the best one, unless staying put costs less than the margin."""
        state, margin = self.state, 1.0 + self.limits.min_gain
        if len(rates) == 1:
            return 0
        dwelt = state.round_number - state.switched_round >= self.limits.min_dwell_rounds
        if not state.speculating:
            if best == 0 or not dwelt or rates[best] < rates[0] * margin:
                return 0
            state.speculating, state.switched_round = True, state.round_number
        elif best == 0:
            nearest = max(rates[1:], default=0.0)
            if dwelt or nearest * margin < rates[0]:
                state.speculating, state.switched_round = False, state.round_number
                state.probe_interval = self._first_interval()
                state.next_probe_round = state.round_number + state.probe_interval
            state.budget_share = 0.0
            return 0
        current = min(round(state.budget_share * num_candidates), len(rates) - 1)
        if current > 0 and rates[best] < rates[current] * margin and rates[current] > rates[0]:
            return current
        state.budget_share = best / max(num_candidates, 1)
        return best

    def _first_interval(self) -> int:
        duty = self.limits.probe_duty
        return max(math.ceil(1.0 / duty), 1) if duty > 0.0 else 0

    def _probe(self, indices: Sequence[int]) -> None:
        """Let a few requests draft once in a while although speculation is off, ever more rarely in vain."""
        state, first = self.state, self._first_interval()
        if first == 0 or self.budget_left < 1 or state.round_number < state.next_probe_round:
            return
        memories = state.memories
        ids = {i: self.requests[i].request_id for i in indices}
        order = sorted(indices, key=lambda i: (memories[ids[i]].probed_round, ids[i]))
        for index in order[: max(1, len(order) // 8)]:
            gamma = min(_PROBE_GAMMA, self.caps[index], self.budget_left)
            if gamma < 1:
                break
            names = self.candidates(self.requests[index])
            self.choices[index] = Choice(names[state.probes % len(names)], gamma, "probe")
            memories[ids[index]].probed_round = state.round_number
            self.budget_left -= gamma
        state.probes += 1
        state.probing = True
        state.first_interval = first
        state.probe_interval = max(min(2 * state.probe_interval, _MAX_PROBE_INTERVAL), first)
        state.next_probe_round = state.round_number + state.probe_interval

    def _trials(self, indices: Sequence[int]) -> list[int]:
        """Give hardly tried proposers a short draft each; return the requests that are left."""
        tried, rest = self.state.tried, []
        planned: dict[tuple[str, str], float] = {}
        for index in sorted(indices, key=lambda i: self.requests[i].request_id):
            request = self.requests[index]
            names = self.candidates(request)
            gamma = min(_TRIAL_GAMMA, self.caps[index], self.budget_left)
            counts = [tried.get((n, request.tier), 0.0) + planned.get((n, request.tier), 0.0) for n in names]
            fewest = min(counts)
            if len(names) < 2 or gamma < 1 or fewest >= _ENOUGH_TRIED:
                rest.append(index)
                continue
            name = names[counts.index(fewest)]
            planned[(name, request.tier)] = planned.get((name, request.tier), 0.0) + 1.0
            self.give(index, name, gamma, "probe")
            self.budget_left -= gamma
        return rest


def _forget(state: PlanState, num_running: int) -> None:
    if len(state.memories) > 2 * num_running + 256:
        oldest = state.round_number - _FORGET_ROUNDS
        state.memories = {key: memory for key, memory in state.memories.items() if memory.seen_round >= oldest}
