"""Planning: one draft length and proposer per running request, every round, and what the round taught."""

import math

from .acceptance import History
from .arrivals import running
from .cells import bucket
from .choosing import Chooser, follow, rally
from .document import Policy
from .exploring import compares_plain, probe, starts_plain
from .laws import Reach, Weighed, weigh
from .state import Choice, Memory, Observation, Plan, PlanState
from .work import Candidate, Work

_FORGET_ROUNDS = 256
_IDLE_ROUNDS = 16
_REACH_ROUNDS = 4
_RALLY_ROUNDS = 8
_RALLY_GAIN, _RALLY_GAIN_AGAIN = 1.02, 1.08
_RALLY_REST = 1024
_END = Choice(None, 0, "end_of_output")
_NO_PROPOSER = Choice(None, 0, "no_proposer")
_OFF = Choice(None, 0, "adaptive_off")
_WARMUP = Choice(None, 0, "warmup")


def plan_round(observation: Observation, policy: Policy, state: PlanState) -> tuple[Plan, PlanState]:
    """Return one choice per request, in order, and the state, which is updated in place.

    Deterministic and independent of the order of requests. Never raises on load: what does not fit drafts less.
    Cost: O(requests), and O(n log n) for n = kinds of requests x longest draft.
    """
    state.round_number += 1
    state.active_rounds += state.switch.speculating or state.round_number % _IDLE_ROUNDS == 0
    state.switch.probing = False
    state.behind.clear()
    state.crowd = running(state.crowd, len(observation.requests), observation.now_s)
    if not observation.requests:
        return Plan(()), state
    work = Work(observation, policy, state)
    forced, adaptive, due = _sort_out(work)
    rates = (0.0, 0.0)
    if adaptive and starts_plain(work):
        _fill(work, adaptive, _WARMUP)
        adaptive = []
    _review(work, due, adaptive)
    if forced:
        work.force(forced)
    if adaptive:
        rates = _adapt(work, adaptive)
    plan = Plan(tuple([choice or _OFF for choice in work.choices]), *rates)
    _note_drafts(work, plan)
    _forget(state, work.num)
    return plan, state


def _sort_out(work: Work) -> tuple[list[Candidate], list[Candidate], list[Candidate]]:
    """Return the requests whose length is given, those left to the adaptive law, and those of both whose proposer is
    due for review; settle the others."""
    memories, known, choices, number = work.state.memories, work.asking.known, work.choices, work.number
    forced: list[Candidate] = []
    adaptive: list[Candidate] = []
    due: list[Candidate] = []
    for index, request in enumerate(work.requests):
        memory = memories.get(request.request_id)
        if memory is None:
            memory = memories[request.request_id] = Memory()
        memory.seen_round = number
        key = (request.tier, request.mode, request.max_draft_tokens, request.proposer, request.has_prediction)
        kind = known.get(key) or work.asking.of(key)
        room = request.remaining_tokens - 1
        if kind.settled is not None:
            choices[index] = kind.settled
        elif room <= 0 or not kind.names:
            choices[index] = _END if room <= 0 else _NO_PROPOSER
        else:
            cap = kind.cap if kind.cap < room else room
            if kind.adaptive:
                candidate = (index, memory, kind, cap)
                if cap:
                    adaptive.append(candidate)
            else:
                gamma = work.scheduled(request.tier, kind.tier) if kind.gamma is None else kind.gamma
                candidate = (index, memory, kind, min(gamma, cap))
                forced.append(candidate)
            if memory.review_round <= number or memory.proposer not in kind.names:
                due.append(candidate)
    return forced, adaptive, due


def _review(work: Work, due: list[Candidate], adaptive: list[Candidate]) -> None:
    """Choose the proposers of those due, and let some of them try another."""
    chooser = Chooser(work)
    if len(due) > 1:
        due.sort(key=lambda candidate: work.requests[candidate[0]].request_id)
    for candidate in due:
        if candidate[3] == 0 or work.choices[candidate[0]] is not None:
            continue
        chooser.review(candidate)
    if adaptive and work.state.switch.speculating and len(work.observation.available) > 1:
        chooser.try_others(adaptive)


def _adapt(work: Work, adaptive: list[Candidate]) -> tuple[float, float]:
    """Let the adaptive law choose; return the rates of the round without its drafts and with them."""
    state, choices = work.state, work.choices
    for index, memory, kind, cap in adaptive:
        if choices[index] is None:
            work.join(index, memory, kind, cap)
    if not work.groups:
        return 0.0, 0.0
    weighed = _weigh(work)
    if work.number % _RALLY_ROUNDS == 0:
        weighed = _rally(work, weighed, adaptive)
    plain, drafting = weighed.rate_plain, weighed.rate_drafting
    gain = math.log(drafting / plain) if drafting > 0.0 and plain > 0.0 else -math.inf
    if not work.started and state.switch.speculating and compares_plain(work, gain):
        _fill(work, adaptive, _WARMUP)
        return plain, plain
    if state.switch.turn(gain, bucket(work.num), work.number, work.limits, work.observation.now_s):
        _hand_out(work, weighed)
        return plain, drafting
    if state.switch.probe_due(work.number, work.limits):
        probe(work, [candidate for candidate in adaptive if choices[candidate[0]] is None])
    return plain, plain


def _weigh(work: Work) -> Weighed:
    """Return the best allocation within the reach found so far or, now and then, the one next in turn."""
    state, groups, scale = work.state, [*work.groups.values()], work.scale()
    dearest = max(scale.draft_ms, key=lambda name: (scale.draft_ms[name][1], name))
    longest = max([group.cap for group in groups if group.proposer == dearest], default=0)
    reaches: list[Reach] = [state.reach if len(groups) > 1 else None]
    if len(groups) > 1 and longest > 1 and work.number % _REACH_ROUNDS == 0:
        state.next_reach = state.next_reach % longest + 1
        reaches.append((dearest, state.next_reach))
    weighed = weigh(groups, scale, work.budget_left, reaches)
    state.reach = weighed.reach
    return weighed


def _rally(work: Work, weighed: Weighed, adaptive: list[Candidate]) -> Weighed:
    """Return what is best if all requests drafted with one proposer, where that beats a mix.

    Requests choose as if all were alike; this is where a proposer that few would use pays for its call or goes.
    """
    names = sorted({group.proposer for group in work.groups.values()})
    if len(names) < 2:
        return weighed
    left = [candidate for candidate in adaptive if work.choices[candidate[0]] is None]
    scale = work.scale()
    gain = _RALLY_GAIN if work.number - work.state.rallied_round > _RALLY_REST else _RALLY_GAIN_AGAIN
    for name in names:
        groups = rally(work, left, name)
        alone = weigh([*groups.values()], scale, work.budget_left, (work.state.reach,))
        if alone.rate_drafting > weighed.rate_drafting * gain:
            work.state.rallied_round = work.number
            follow(work, left, name)
            work.groups, weighed = groups, alone
    return weighed


def _hand_out(work: Work, weighed: Weighed) -> None:
    """Give every request the length that was weighed for its group."""
    choices = work.choices
    for number, (group, length) in enumerate(zip(work.groups.values(), weighed.lengths, strict=True)):
        members = group.members
        if number == weighed.extra_group and weighed.extra:
            members = sorted(members, key=lambda index: work.requests[index].request_id)
            longer = Choice(group.proposer, length + 1, "adaptive")
            for index in members[: weighed.extra]:
                choices[index] = longer
            members = members[weighed.extra :]
        choice = Choice(group.proposer, length, "adaptive") if length else _OFF
        for index in members:
            choices[index] = choice


def _fill(work: Work, candidates: list[Candidate], choice: Choice) -> None:
    for candidate in candidates:
        work.choices[candidate[0]] = choice


def _note_drafts(work: Work, plan: Plan) -> None:
    """Remember which context the proposers will have seen, and how much of it is new to them."""
    state = work.state
    for request, choice in zip(work.requests, plan.choices, strict=True):
        proposer = choice.proposer
        if proposer is None:
            continue
        memory = state.memories[request.request_id]
        history = memory.history if proposer == memory.proposer else None
        if history is None:
            history = memory.histories.get(proposer)
            if history is None:
                history = memory.histories[proposer] = History()
            if proposer == memory.proposer:
                memory.history = history
        state.behind[proposer] = state.behind.get(proposer, 0) + request.context_tokens - history.known_tokens
        history.known_tokens = request.context_tokens


def _forget(state: PlanState, num_running: int) -> None:
    if len(state.memories) > 2 * num_running + 256:
        oldest = state.round_number - _FORGET_ROUNDS
        state.memories = {key: memory for key, memory in state.memories.items() if memory.seen_round >= oldest}
