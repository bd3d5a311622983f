"""Which proposer drafts for a request: the one that promises most per millisecond, tried before it is trusted."""

import math
from collections.abc import Sequence

from .document import MAX_GAMMA
from .laws import FAINT, Group, GroupKey
from .state import Trial
from .strengths import EASE_STEPS, Standing
from .work import Candidate, Work

# Choosing. A change has to promise more, by a margin that grows with every change; catching up on the context is
# spread over the rounds the proposer is expected to stay.
_MORE_MARGIN, _MOST_MARGIN = 0.05, 1.15
_EARLY = 4
_STAY_ROUNDS = 32.0

# Trying. What is hoped for beyond what is expected shrinks as the evidence grows. The wait after a trial is what it
# cost, in rounds, times the square root of the trials so far: the loss grows more slowly than time. A trial waits for
# text where it looks promising, but not for ever.
_HOPE = 4.0
_CHALLENGE, _PROMISING = 1.05, 1.4
_WAIT_PER_LOSS, _LEAST_LOSS, _GROWTH = 60, 0.1, 0.5
_TRIAL_WAIT, _LOOK_AGAIN, _LATE = 8, 6, 4
_TRIED_SHARE = 4
_TRIAL_GAMMA = 2
_DEAR_STEP = 0.01


class Chooser:
    """The proposers' promises this round."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._promises: dict[tuple[str, str, Standing, int], float] = {}

    def review(self, candidate: Candidate) -> None:
        """Choose the request's proposer anew; the one it has stays unless another promises clearly more."""
        index, memory, kind, cap = candidate
        work, tier, names = self._work, self._work.requests[index].tier, kind.names
        best = names[0]
        if len(names) > 1:
            promises = {
                name: self._promise(tier, name, memory.standing(name), cap) / self._entry(name, candidate)
                for name in names
            }
            best = max(names, key=lambda name: promises[name])
            if memory.proposer in promises and promises[best] < promises[memory.proposer] * memory.margin:
                best = memory.proposer
        dwell = max(work.limits.min_dwell_rounds, 1)
        if best == memory.proposer:
            memory.patience = min(2 * memory.patience, 2 * dwell)
        else:
            if memory.proposer is not None:
                memory.margin = min(memory.margin + _MORE_MARGIN, _MOST_MARGIN)
            memory.proposer, memory.patience = best, max(dwell // _EARLY, 1)
        memory.history, memory.chosen_ease = memory.histories.get(best), memory.ease.rating.value
        memory.review_round = work.number + memory.patience

    def _entry(self, name: str, candidate: Candidate) -> float:
        """Return how much longer the next rounds take while the proposer catches up on contexts like this one."""
        index, memory, _, _ = candidate
        if name == memory.proposer:
            return 1.0
        work = self._work
        catch_up_ms = work.behind(index, memory, name) * work.state.costs.draft(name).catch_up_ms * work.num
        return 1.0 + catch_up_ms / (_STAY_ROUNDS * work.steps.at(0.0) * work.factor)

    def try_others(self, adaptive: Sequence[Candidate]) -> None:
        """Let requests that draft with one proposer try another for a round, where one is due."""
        if self._work.limits.probe_duty <= 0.0:
            return
        work, trials = self._work, self._work.state.trials
        for tier, name in work.asking.pairs:
            trial = trials.get((tier, name))
            if trial is None:
                trial = trials[tier, name] = Trial()
            if work.number >= trial.next_round:
                self._try(tier, name, trial, adaptive)

    def _try(self, tier: str, name: str, trial: Trial, adaptive: Sequence[Candidate]) -> None:
        """Try one proposer, if any request may and it could still win. The wait grows, so trying costs ever less."""
        work, requests = self._work, self._work.requests
        able = [
            candidate
            for candidate in adaptive
            if candidate[1].proposer != name and name in candidate[2].names and requests[candidate[0]].tier == tier
        ]
        able = [candidate for candidate in able if work.choices[candidate[0]] is None]
        prospects = {candidate[0]: self._prospect(name, candidate) for candidate in able}
        best = max(prospects.values(), default=0.0)
        if best < (_CHALLENGE if work.number >= trial.late_round else _PROMISING):
            trial.next_round = work.number + (_TRIAL_WAIT if work.number >= trial.late_round else _LOOK_AGAIN)
            return
        able.sort(key=lambda candidate: (-prospects[candidate[0]], requests[candidate[0]].request_id))
        trial.count += 1
        wait = math.ceil(self._wait(tier, name, able[0]) * trial.count**_GROWTH)
        trial.next_round, trial.late_round = work.number + wait, work.number + _LATE * wait
        for index, memory, kind, cap in able[: max(1, work.num // _TRIED_SHARE)]:
            gamma = min(cap, self._trial_gamma(name), work.budget_left)
            if gamma > 0:
                memory.review_round = work.number + 1
                work.give(index, memory, name, gamma, kind, "probe")

    def _prospect(self, name: str, candidate: Candidate) -> float:
        """Return what the proposer would promise if it did far better than expected, over what the present one does."""
        index, memory, _, cap = candidate
        assert memory.proposer is not None
        tier = self._work.requests[index].tier
        hope = _HOPE / math.sqrt(1.0 + self._work.state.acceptance.of(name, tier).information)
        hoped = memory.standing(name) + round(hope * EASE_STEPS)
        now = self._promise(tier, memory.proposer, memory.standing(memory.proposer), cap)
        return self._promise(tier, name, hoped, cap) / now

    def _wait(self, tier: str, name: str, candidate: Candidate) -> float:
        """Return how long to wait after a first trial: by what it is expected to lose, in rounds."""
        work, (index, memory, _, cap) = self._work, candidate
        assert memory.proposer is not None
        now = self._promise(tier, memory.proposer, memory.standing(memory.proposer), cap)
        worse = max(1.0 - self._promise(tier, name, memory.standing(name), cap) / now, _LEAST_LOSS)
        fixed, by_step, _ = work.draft_ms(name)
        catch_up_ms = work.behind(index, memory, name) * work.state.costs.draft(name).catch_up_ms
        call = (fixed + by_step * self._trial_gamma(name) + catch_up_ms) / (work.steps.at(0.0) * work.factor)
        share = 1.0 / work.num if work.num < _TRIED_SHARE else 1.0 / _TRIED_SHARE
        loss = worse * share + call * (1.0 - share)
        return _WAIT_PER_LOSS * loss * (1.0 + (3.0 * loss) ** 2)

    def _trial_gamma(self, name: str) -> int:
        """Return a trial's length: short where steps cost something."""
        by_step = self._work.draft_ms(name)[1]
        return _TRIAL_GAMMA if by_step > _DEAR_STEP * self._work.steps.at(0.0) * self._work.factor else MAX_GAMMA

    def _promise(self, tier: str, proposer: str, standing: Standing, cap: int) -> float:
        """Return the tokens per millisecond of a batch in which every request were like this one."""
        key = (tier, proposer, standing, cap)
        if key not in self._promises:
            self._promises[key] = self._worked_out(tier, proposer, standing, cap)
        return self._promises[key]

    def _worked_out(self, tier: str, proposer: str, standing: Standing, cap: int) -> float:
        work, num = self._work, self._work.num
        curve = work.curve(tier, proposer, standing, cap)
        fixed, by_step, by_token = work.draft_ms(proposer)
        room = work.budget_left / num
        tokens, value, best = 0.0, work.crowd, work.crowd / (work.steps.at(0.0) * work.factor)
        for k in range(cap):
            if curve.accepted[k] < FAINT:
                break
            tokens += curve.drafted[k]
            value += curve.accepted[k]
            score_ms = work.steps.at(num * min(tokens, room)) * work.factor
            best = max(best, value / (score_ms + fixed + (by_step + by_token * num) * (k + 1)))
        return best


def rally(work: Work, adaptive: Sequence[Candidate], name: str) -> dict[GroupKey, Group]:
    """Return the groups if every request drafted with the one proposer; none when some may not."""
    groups: dict[GroupKey, Group] = {}
    for index, memory, kind, cap in adaptive:
        if name not in kind.names:
            return {}
        tier, standing = work.requests[index].tier, memory.standing(name)
        key = (tier, name, cap, standing, 0)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(key, tier, name, kind.tier.weight, cap, work.curve(tier, name, standing, cap))
        group.members.append(index)
    return groups


def follow(work: Work, adaptive: Sequence[Candidate], name: str) -> None:
    """Let every request draft with the one proposer until its next review."""
    for _, memory, _, _ in adaptive:
        if memory.proposer != name:
            memory.proposer, memory.history = name, memory.histories.get(name)
        memory.chosen_ease = memory.ease.rating.value
        memory.review_round = work.number + memory.patience
