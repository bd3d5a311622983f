"""Estimated acceptance: how easy each request's text is just now, and the proposers' strengths to meet it."""

from dataclasses import dataclass, field

from .strengths import (
    EASE_STEPS,
    PREDICTION,
    PREDICTION_ACCEPTANCE,
    PREDICTION_DRAFTED,
    PRIOR_ACCEPTANCE,
    Curve,
    Rating,
    Shared,
    Standing,
)

_TOTAL_DECAY = 0.98
_EASE_DECAY = 0.88
_EASE_PRIOR = 1.3
_OFFSET_DECAY = 0.98
_OFFSET_PRIOR = 4.0
_IDLE_DECAY = 0.98


@dataclass(slots=True)
class History:
    """What one request's drafts by one proposer showed beyond the ease of its text: an offset, slowly learned.

    `known_tokens` is the context the proposer has seen.
    """

    offset: Rating = field(default_factory=Rating)
    known_tokens: int = 0


@dataclass(slots=True)
class Ease:
    """How easy one request's text is just now, whoever drafts."""

    rating: Rating = field(default_factory=Rating)
    last_round: int = 0

    def learn(
        self, history: History, shared: Shared, curve: Curve, drafted: int, tested: int, accepted: int, round_: int
    ) -> None:
        """Move the ease and the proposer's offset after one draft, given the chances it had."""
        surprise, information = accepted - curve.expected[tested], curve.information[tested]
        if not shared.always_finds:
            chance = curve.drafted[0]
            slope = shared.found_slope
            surprise += ((1.0 if drafted else 0.0) - chance) * slope
            information += chance * (1.0 - chance) * slope * slope
        self.rating.learn(surprise, information, _EASE_DECAY, _EASE_PRIOR)
        history.offset.learn(surprise, information, _OFFSET_DECAY, _OFFSET_PRIOR)
        self.last_round = round_

    def fade(self, round_: int) -> None:
        """Draw the ease back towards the average after rounds without a draft."""
        share = _IDLE_DECAY ** (round_ - self.last_round)
        self.rating.value *= share
        self.rating.information *= share
        self.last_round = round_

    def standing(self, history: History | None) -> Standing:
        """Return the ease for a proposer with this history, in steps."""
        ease = self.rating.value if history is None else self.rating.value + history.offset.value
        return round(ease * EASE_STEPS)


@dataclass(slots=True)
class Acceptance:
    """The proposers' strengths by (proposer, tier), and the decayed accepted and tested tokens by tier."""

    shared: dict[tuple[str, str], Shared] = field(default_factory=dict)
    totals: dict[str, list[float]] = field(default_factory=dict)

    def of(self, proposer: str, tier: str) -> Shared:
        """Return what is known of the proposer in the tier."""
        shared = self.shared.get((proposer, tier))
        if shared is None:
            predicted = proposer == PREDICTION
            shared = Shared(PREDICTION_ACCEPTANCE, PREDICTION_DRAFTED) if predicted else Shared()
            self.shared[proposer, tier] = shared
        return shared

    def count(self, tier: str, tested: int, accepted: int) -> None:
        """Count tested and accepted tokens for the tier's rate."""
        if tested:
            total = self.totals.setdefault(tier, [0.0, 0.0])
            fade = _TOTAL_DECAY**tested
            total[0] = total[0] * fade + accepted
            total[1] = total[1] * fade + tested

    def rate(self, tier: str) -> float:
        """Return the tier's recent acceptance rate, accepted over tested; the prior before any test."""
        total = self.totals.get(tier)
        return total[0] / total[1] if total is not None and total[1] > 0.0 else PRIOR_ACCEPTANCE
