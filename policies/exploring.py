"""Rounds that are worth more for what they teach: plain ones to compare with, and probes while speculation is off."""

import math

from .state import Choice, PlanState
from .work import Candidate, Work

_PROBE_GAMMA = 4
_PROBED_SHARE = 8
_UNSURE = 2.0
_OUTLIER = 0.8
_UNMEASURED = 0.15
_LEAST_NOISE = 0.03
_FIRST_WAIT = 2
_MOST_ATTEMPTS = 3
_PAUSE = 32


def starts_plain(work: Work) -> bool:
    """Return whether this round is to be plain because no round was ever measured."""
    return not work.state.costs.score.rows and _attempt(work.state)


def compares_plain(work: Work, gain: float) -> bool:
    """Return whether this round is to be plain because the gain's logarithm is too close to call.

    The plain cost is known as well as it was often measured at this batch size; the first measurements are often far
    off.
    """
    state, score = work.state, work.state.costs.score
    known = score.num_plain(work.num)
    if known == 0.0:
        return gain < _UNSURE * _UNMEASURED and _attempt(state)
    noise = max(score.seen.noise, _LEAST_NOISE)
    unsure = max(_UNSURE * noise / math.sqrt(known), _OUTLIER / known)
    waited = state.round_number - state.plain_round >= _FIRST_WAIT * (1.0 + known)
    return gain < unsure and waited and _attempt(state)


def _attempt(state: PlanState) -> bool:
    """Count an attempt to measure; rounds that are never learned from hold up speculation a few times only."""
    if state.plain_attempts >= _MOST_ATTEMPTS and state.round_number - state.plain_round < _PAUSE:
        return False
    state.plain_attempts += 1
    state.plain_round = state.round_number
    return True


def probe(work: Work, candidates: list[Candidate]) -> None:
    """Let a few requests draft once although speculation is off, those first that waited longest."""
    state, requests = work.state, work.requests
    candidates.sort(key=lambda c: (c[1].probed_round, requests[c[0]].request_id))
    drafted, accepted, longest = 0.0, 0.0, 0
    name = ""
    for index, memory, kind, cap in candidates[: max(1, len(candidates) // _PROBED_SHARE)]:
        gamma = min(_PROBE_GAMMA, cap, work.budget_left)
        if gamma < 1:
            break
        name = kind.names[state.switch.probes % len(kind.names)]
        work.choices[index] = Choice(name, gamma, "probe")
        work.budget_left -= gamma
        memory.probed_round = state.round_number
        curve = work.curve(requests[index].tier, name, memory.standing(name), gamma)
        drafted += curve.drafted[gamma - 1] * gamma
        accepted += sum(curve.accepted[:gamma])
        longest = max(longest, gamma)
    if longest:
        plain_ms = work.steps.at(0.0) * work.factor
        fixed, by_step, by_token = work.draft_ms(name)
        extra_ms = work.steps.at(drafted) * work.factor - plain_ms + fixed + by_step * longest + by_token * drafted
        state.switch.probed(state.round_number, extra_ms / plain_ms - accepted / work.num, work.limits)
