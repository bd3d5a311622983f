"""Tracks: what was decided for each request, round by round, and what went into it. Kept for the newest requests."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specserve.policies.laws import fired_rule
from specserve.service.ports import Decision, RequestView

from .snapshot import Governing

MAX_TRACKS = 1024
_MAX_STRETCHES = 64
_LAST_ROUND = "end_of_output"
_WHY = {
    "override": "an operator's override turns speculation off here",
    "mode_off": "the request asked for none",
    "mode_on": "the request asked for drafts of its own length every round",
    "policy_off": "the policy's law for this tier is off",
    "fixed": "the policy's law for this tier is a fixed length",
    "schedule": "a rule of the policy's schedule gave the length",
    "adaptive": "drafting promised more tokens per millisecond than not drafting",
    "adaptive_off": "drafting did not promise more tokens per millisecond",
    "probe": "a trial, to learn whether a proposer would pay",
    "warmup": "a plain round, to learn what one costs",
    "no_proposer": "no proposer that the policy allows answers",
    "end_of_output": "at most one more token fits",
}


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """What the decisions of one round under one policy were made from. Rates are weighted tokens per millisecond."""

    number: int
    governing: Governing
    canary: bool
    batch: int
    available: frozenset[str]
    qps: float
    acceptance: Mapping[str, float]
    rate_plain: float
    rate_chosen: float


@dataclass(slots=True)
class _Stretch:
    """Rounds in a row with one decision."""

    decision: Decision
    version: int
    first_round: int
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class Track:
    """One request's decisions: the last real one with its inputs, and the newest stretches, oldest first.

    That no more than one token fits at the end is no real decision, unless there was no other.
    """

    view: RequestView
    facts: RoundFacts
    decision: Decision
    seen_round: int = 0
    num_rounds: int = 0
    num_drafting: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    stretches: deque[_Stretch] = field(default_factory=lambda: deque(maxlen=_MAX_STRETCHES))

    def explained(self) -> dict[str, Any]:
        """Return the track as plain data."""
        view, facts, decision = self.view, self.facts, self.decision
        acceptance = facts.acceptance.get(view.tier, 0.0)
        policy, version = facts.governing.policy, facts.governing.version
        tier = policy.tier(view.tier)
        fired = fired_rule(tier, facts.qps, facts.batch, acceptance) if decision.reason == "schedule" else None
        return {
            "request_id": view.request_id,
            "tier": view.tier,
            "asked": {"mode": view.mode, "max_draft_tokens": view.max_draft_tokens, "proposer": view.proposer},
            "policy": {"name": policy.name, "version": version, "canary": facts.canary},
            "decision": {"proposer": decision.proposer, "gamma": decision.gamma, "reason": decision.reason},
            "why": _WHY.get(decision.reason, decision.reason),
            "law": tier.law,
            "rule": fired,
            "inputs": {
                "round": facts.number,
                "batch": facts.batch,
                "qps": facts.qps,
                "acceptance_rate": acceptance,
                "available": sorted(facts.available),
                "context_tokens": view.context_tokens,
                "remaining_tokens": view.remaining_tokens,
                "tokens_per_ms": {"plain": facts.rate_plain, "chosen": facts.rate_chosen},
            },
            "summary": {
                "rounds": self.num_rounds,
                "drafting_rounds": self.num_drafting,
                "drafted": self.num_drafted,
                "accepted": self.num_accepted,
                "reasons": dict(self.reasons.most_common()),
            },
            "gamma_track": [
                {
                    "first_round": stretch.first_round,
                    "rounds": stretch.num_rounds,
                    "policy_version": stretch.version,
                    "proposer": stretch.decision.proposer,
                    "gamma": stretch.decision.gamma,
                    "reason": stretch.decision.reason,
                    "drafted": stretch.num_drafted,
                    "accepted": stretch.num_accepted,
                }
                for stretch in self.stretches
            ],
        }


class Tracks:
    """The tracks of the newest requests; those that run are never dropped."""

    def __init__(self) -> None:
        self._tracks: dict[str, Track] = {}

    def note(self, decided: Sequence[tuple[RequestView, Decision]], facts: RoundFacts) -> None:
        """Add one round's decisions. Cost: O(requests)."""
        tracks, number, version = self._tracks, facts.number, facts.governing.version
        for view, decision in decided:
            track = tracks.get(view.request_id)
            if track is None:
                track = tracks[view.request_id] = Track(view, facts, decision)
            track.num_rounds += 1
            track.seen_round = number
            track.reasons[decision.reason] += 1
            if decision.reason != _LAST_ROUND:
                track.view, track.facts, track.decision = view, facts, decision
            stretches = track.stretches
            if not stretches or stretches[-1].decision is not decision or stretches[-1].version != version:
                stretches.append(_Stretch(decision, version, number))
            stretches[-1].num_rounds += 1
        for _ in range(len(tracks) - MAX_TRACKS):
            oldest = next(iter(tracks))
            track = tracks.pop(oldest)
            if track.seen_round == number:
                tracks[oldest] = track

    def learn(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Add what became of the request's last draft."""
        track = self._tracks.get(request_id)
        if track is not None:
            track.num_drafting += num_drafted > 0
            track.num_drafted += num_drafted
            track.num_accepted += num_accepted
            track.stretches[-1].num_drafted += num_drafted
            track.stretches[-1].num_accepted += num_accepted

    def of(self, request_id: str) -> Track | None:
        """Return the track of one request."""
        return self._tracks.get(request_id)

    def found(self, name: str) -> list[Track]:
        """Return the tracks of the request `name`, or of every choice of the answer with that id."""
        exact = self._tracks.get(name)
        if exact is not None:
            return [exact]
        return [track for key, track in self._tracks.items() if key.rpartition("-")[0] == name]
