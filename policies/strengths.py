"""How strong each proposer is at each draft position, and the chances that follow.

The chance that a token is accepted is the logistic function of the proposer's strength at its position plus the ease
of the request's text just now (the Rasch model). Both follow from every draft by its surprise, divided by the
information gathered so far. So a proposer that happens to be asked on hard text is not taken for a weak one, and a
request that finds its text easy with one proposer expects it of the others.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from .document import MAX_GAMMA

PRIOR_ACCEPTANCE = 0.6
PRIOR_DRAFTED = 0.8
PREDICTION = "prediction"
PREDICTION_ACCEPTANCE = 0.9
PREDICTION_DRAFTED = 0.9
"""A prediction is sent by somebody who knows what will come: it is taken for right until it turns out wrong."""
EASE_STEPS = 3.0
"""Steps of one logit in a `Standing`."""
_PRIOR_ANSWERS = 4.0
_DECAY = 0.993
_MOST_STRENGTH = 5.0
_TILT_PRIOR = 2.0
_LEAST_SLOPE, _MOST_SLOPE = 0.5, 3.0
_TALLIED = MAX_GAMMA + 2
_LONGER_CEILING = 0.999
_LONGER_WEIGHT = 4.0
_ALWAYS = 0.95
_MAX_EASE = 5.0
_REFRESH_ROUNDS = 4
_SURE_DRAFTS = 64.0

Standing = int
"""The ease of a request's text for one proposer, in steps."""


@dataclass(slots=True)
class Strength:
    """How much speaks for yes on average text, in logits, and the decayed numbers of yes and no that say so."""

    value: float
    yes: float = 0.0
    no: float = 0.0

    @property
    def information(self) -> float:
        """What the answers tell of the logit."""
        return self.yes * self.no / (self.yes + self.no) if self.yes + self.no > 0.0 else 0.0

    def learn(self, yes: float, total: float, expected: float, decay: float) -> None:
        """Move by how the answers compare to `expected` yes of `total`, as one more step of a logistic regression."""
        no = total - yes
        old_yes, old_no = self.yes * decay + _PRIOR_ANSWERS, self.no * decay + _PRIOR_ANSWERS
        more_yes = math.log((old_yes + yes) / (old_yes + expected))
        more_no = math.log((old_no + no) / (old_no + total - expected))
        self.value = max(-_MOST_STRENGTH, min(_MOST_STRENGTH, self.value + more_yes - more_no))
        self.yes, self.no = old_yes - _PRIOR_ANSWERS + yes, old_no - _PRIOR_ANSWERS + no


@dataclass(slots=True)
class Rating:
    """A quantity in logits and how much evidence says so."""

    value: float = 0.0
    information: float = 0.0

    def learn(self, surprise: float, information: float, decay: float, prior: float) -> None:
        """Move by a surprise over all evidence, and a little back towards zero as older evidence fades."""
        self.information = self.information * decay + information
        moved = self.value + (surprise - (1.0 - decay) * prior * self.value) / (self.information + prior)
        self.value = max(-_MAX_EASE, min(_MAX_EASE, moved))


class Curve(NamedTuple):
    """Chances for k = 1..length, at index k - 1: `drafted` that k tokens arrive, `accepted` that all k are accepted,
    `worth` that they are accepted once drafted; `right` that the k-th is, if those before it are.

    `expected[n]` is the accepted tokens expected of n tested ones, and `information[n]` what the test tells.
    """

    drafted: list[float]
    accepted: list[float]
    worth: list[float]
    right: list[float]
    expected: list[float]
    information: list[float]


@dataclass(slots=True)
class _Tally:
    """One round's drafts by one proposer: how many had how many tokens wanted, drafted, tested and accepted."""

    wanted: list[int] = field(default_factory=lambda: [0] * _TALLIED)
    drafted: list[int] = field(default_factory=lambda: [0] * _TALLIED)
    tested: list[int] = field(default_factory=lambda: [0] * _TALLIED)
    accepted: list[int] = field(default_factory=lambda: [0] * _TALLIED)
    expected: list[float] = field(default_factory=lambda: [0.0] * _TALLIED)
    num: int = 0
    longest: int = 0
    found_expected: float = 0.0
    tilt_surprise: float = 0.0
    tilt_information: float = 0.0


@dataclass(slots=True)
class Shared:
    """One proposer's strengths in one tier, and the curves that follow from them for each standing.

    `accepted` is by position; `found` says whether there is a draft at all, which may depend on the ease more or less
    than acceptance does: `found_tilt` is how much. `longer` holds the decayed (yes, total) of whether a draft goes on.
    Drafts are tallied during a round and counted by `settle` at its end, whatever their order.
    """

    prior_acceptance: float = PRIOR_ACCEPTANCE
    prior_drafted: float = PRIOR_DRAFTED
    accepted: list[Strength] = field(default_factory=list)
    found: Strength = field(init=False)
    found_tilt: Rating = field(default_factory=Rating)
    longer: list[list[float]] = field(default_factory=list)
    num_drafts: float = 0.0
    _tally: _Tally = field(default_factory=_Tally)
    _length: int = 8
    _odds: list[tuple[float, float]] = field(default_factory=list)
    _curves: dict[Standing, Curve] = field(default_factory=dict)
    _age: int = 0

    def __post_init__(self) -> None:
        self.found = Strength(_logit(self.prior_drafted))

    @property
    def always_finds(self) -> bool:
        """Whether the proposer drafts whatever the text."""
        return self.found.value > _logit(_ALWAYS)

    @property
    def found_slope(self) -> float:
        """How much the ease speaks for finding a draft, in logits per logit."""
        return max(_LEAST_SLOPE, min(_MOST_SLOPE, 1.0 + self.found_tilt.value))

    @property
    def information(self) -> float:
        """What its first tokens told so far."""
        return self.found.information + (self.accepted[0].information if self.accepted else 0.0)

    def tally(self, curve: Curve, ease: float, asked: int, drafted: int, tested: int, accepted: int) -> None:
        """Note one draft. Positions up to the first missing token and up to the first rejection teach."""
        tally = self._tally
        expected, right = tally.expected, curve.right
        for position in range(tested):
            expected[position] += right[position]
        wanted = drafted + 1 if drafted < asked else asked
        tally.tested[tested] += 1
        tally.accepted[accepted] += 1
        tally.wanted[wanted] += 1
        tally.drafted[drafted] += 1
        tally.num += 1
        if wanted > tally.longest:
            tally.longest = wanted
        chance = curve.drafted[0]
        tally.found_expected += chance
        tally.tilt_surprise += ((1.0 if drafted else 0.0) - chance) * ease
        tally.tilt_information += chance * (1.0 - chance) * ease * ease

    def settle(self) -> None:
        """Count what was tallied. Cost: O(longest draft); curves are made anew every few rounds."""
        tally = self._tally
        decay = _DECAY ** math.sqrt(tally.num)
        num_found = tally.num - tally.drafted[0]
        self.found.learn(num_found, tally.num, tally.found_expected, decay)
        self.found_tilt.learn(tally.tilt_surprise, tally.tilt_information, decay, _TILT_PRIOR)
        while len(self.accepted) < tally.longest:
            self.accepted.append(Strength(_logit(self.prior_acceptance)))
            self.longer.append([0.0, 0.0])
        num_tested = num_accepted = num_wanted = num_drafted = 0
        for position in range(tally.longest - 1, -1, -1):
            num_tested += tally.tested[position + 1]
            num_accepted += tally.accepted[position + 1]
            num_wanted += tally.wanted[position + 1]
            num_drafted += tally.drafted[position + 1]
            if num_tested:
                strength = self.accepted[position]
                if position and strength.yes + strength.no == 0.0:
                    strength.value = self.accepted[position - 1].value
                strength.learn(num_accepted, num_tested, tally.expected[position], decay)
            longer = self.longer[position]
            longer[0] = longer[0] * decay + num_drafted
            longer[1] = longer[1] * decay + num_wanted
        self.num_drafts += tally.num
        self._tally = _Tally()
        self._age += 1
        if self._age >= _REFRESH_ROUNDS or self.num_drafts < _SURE_DRAFTS:
            self._forget_curves()

    def curve(self, standing: Standing, length: int) -> Curve:
        """Return the chances of a request of this standing, for at least `length` positions."""
        if length > self._length:
            self._length = length
            self._forget_curves()
        curve = self._curves.get(standing)
        if curve is None:
            curve = self._curves[standing] = self._make(standing / EASE_STEPS)
        return curve

    def _forget_curves(self) -> None:
        self._age = 0
        self._odds.clear()
        self._curves.clear()

    def _make(self, ease: float) -> Curve:
        if not self._odds:
            self._work_out()
        arrived = _chance(self.found.value + (0.0 if self.always_finds else ease * self.found_slope))
        easier = math.exp(ease)
        worth, sum_right, sum_doubt = 1.0, 0.0, 0.0
        drafted, accepted, worths, rights, expected, information = curve = Curve([], [], [], [], [0.0], [0.0])
        for odds, longer in self._odds:
            arrived *= longer
            moved = odds * easier
            right = moved / (1.0 + moved)
            worth *= right
            sum_right += right
            sum_doubt += right / (1.0 + moved)
            drafted.append(arrived)
            accepted.append(arrived * worth)
            worths.append(worth)
            rights.append(right)
            expected.append(sum_right)
            information.append(sum_doubt)
        return curve

    def _work_out(self) -> None:
        """Set the odds of acceptance and the chance of one more token by position; unknown ones follow the known."""
        strength, longer = _logit(self.prior_acceptance), self.prior_drafted
        for position in range(self._length):
            if position < len(self.accepted):
                if self.accepted[position].yes + self.accepted[position].no > 0.0:
                    strength = self.accepted[position].value
                if position:
                    yes, total = self.longer[position]
                    longer = min((yes + _LONGER_WEIGHT * longer) / (total + _LONGER_WEIGHT), _LONGER_CEILING)
            self._odds.append((math.exp(strength), longer if position else 1.0))


def _logit(chance: float) -> float:
    return math.log(chance / (1.0 - chance))


def _chance(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))
