"""Estimated acceptance: decayed counts per proposer, tier and position, shrunk between a request and everyone."""

from dataclasses import dataclass, field

PRIOR_ACCEPTANCE = 0.6
PRIOR_DRAFTED = 0.8
_PRIOR_WEIGHT = 4.0
_OWN_WEIGHT = 6.0
_DECAY = 0.98
_OWN_DECAY = 0.9
_IDLE_DECAY = 0.99
_MAX_POSITION = 32
_CEILING = 0.999
_UNMOVED = (0.0, 1.0)


@dataclass(slots=True)
class Cell:
    """Decayed counts of one yes-or-no question."""

    yes: float = 0.0
    total: float = 0.0

    def add(self, yes: bool, decay: float) -> None:
        """Count one answer after fading the older ones."""
        self.yes = self.yes * decay + (1.0 if yes else 0.0)
        self.total = self.total * decay + 1.0

    def mean(self, prior: float, weight: float) -> float:
        """Return the mean under a Beta-like prior of the given mean and weight."""
        return min((self.yes + prior * weight) / (self.total + weight), _CEILING)


@dataclass(slots=True)
class Evidence:
    """What one owner saw of one proposer: by position, was a token drafted, and was it accepted when tested."""

    drafted: list[Cell] = field(default_factory=list)
    accepted: list[Cell] = field(default_factory=list)
    last_round: int = 0

    def learn(self, asked: int, drafted: int, accepted: int, decay: float, width: int) -> None:
        """Count one draft. Positions up to the first missing token and up to the first rejection teach."""
        accepted = min(accepted, drafted)
        for position in range(min(asked, drafted + 1)):
            self._cell(self.drafted, position, width).add(position < drafted, decay)
        for position in range(min(drafted, accepted + 1)):
            self._cell(self.accepted, position, width).add(position < accepted, decay)

    @staticmethod
    def _cell(cells: list[Cell], position: int, width: int) -> Cell:
        position = min(position, width - 1)
        while len(cells) <= position:
            cells.append(Cell())
        return cells[position]


@dataclass(frozen=True, slots=True)
class Survival:
    """For k = 1..gamma: `drafted[k-1]` the chance that k tokens arrive, `accepted[k-1]` that all k are accepted."""

    drafted: tuple[float, ...]
    accepted: tuple[float, ...]


@dataclass(slots=True)
class Acceptance:
    """Everyone's evidence by (proposer, tier), and the decayed accepted and tested totals by tier."""

    shared: dict[tuple[str, str], Evidence] = field(default_factory=dict)
    totals: dict[str, Cell] = field(default_factory=dict)

    def learn(self, proposer: str, tier: str, own: Evidence, asked: int, drafted: int, accepted: int) -> None:
        """Take in one draft of one request."""
        shared = self.shared.setdefault((proposer, tier), Evidence())
        shared.learn(asked, drafted, accepted, _DECAY, _MAX_POSITION)
        own.learn(asked, drafted, accepted, _OWN_DECAY, 2)
        total = self.totals.setdefault(tier, Cell())
        for position in range(min(drafted, accepted + 1)):
            total.add(position < accepted, _DECAY)

    def rate(self, tier: str) -> float:
        """Return the tier's recent acceptance rate, accepted over tested; the prior before any test."""
        total = self.totals.get(tier)
        return total.yes / total.total if total is not None and total.total > 0.0 else PRIOR_ACCEPTANCE

    def shared_means(self, proposer: str, tier: str, gamma: int) -> tuple[list[float], list[float]]:
        """Return everyone's chances per position: drafted given the one before, accepted given the one before.

        A position without evidence follows the position before it.
        """
        evidence = self.shared.get((proposer, tier))
        return (
            _chain(evidence.drafted if evidence else [], PRIOR_DRAFTED, gamma),
            _chain(evidence.accepted if evidence else [], PRIOR_ACCEPTANCE, gamma),
        )


@dataclass(frozen=True, slots=True)
class Chances:
    """One request's chances by position: everyone's means, moved by its own counts as `own + share * mean`."""

    means: tuple[list[float], list[float]]
    drafted: tuple[tuple[float, float], tuple[float, float]]
    accepted: tuple[tuple[float, float], tuple[float, float]]

    def at(self, position: int) -> tuple[float, float]:
        """Return the chances that the token at `position` is drafted, and accepted, given those before it."""
        side = 1 if position else 0
        own, share = self.drafted[side]
        drafted = own + share * self.means[0][position]
        own, share = self.accepted[side]
        return drafted, own + share * self.means[1][position]


def chances_of(means: tuple[list[float], list[float]], own: Evidence | None, round_number: int) -> Chances:
    """Return one request's chances: its own counts, fading while it does not draft, shrunk towards everyone's."""
    if own is None:
        return Chances(means, (_UNMOVED, _UNMOVED), (_UNMOVED, _UNMOVED))
    fade = _IDLE_DECAY ** max(round_number - own.last_round, 0)
    return Chances(means, _moved(own.drafted, fade), _moved(own.accepted, fade))


def survival(chances: Chances, gamma: int) -> Survival:
    """Return the survival of the first gamma draft tokens: products of the chances."""
    arrived = survived = 1.0
    drafted, accepted = [], []
    for position in range(gamma):
        more, right = chances.at(position)
        arrived *= more
        survived *= more * right
        drafted.append(arrived)
        accepted.append(survived)
    return Survival(tuple(drafted), tuple(accepted))


def _moved(cells: list[Cell], fade: float) -> tuple[tuple[float, float], tuple[float, float]]:
    moved = [_UNMOVED, _UNMOVED]
    for side, cell in enumerate(cells[:2]):
        weight = cell.total * fade + _OWN_WEIGHT
        moved[side] = (cell.yes * fade / weight, _OWN_WEIGHT / weight)
    return moved[0], moved[1]


def _chain(cells: list[Cell], prior: float, gamma: int) -> list[float]:
    mean, means = prior, []
    for position in range(gamma):
        if position < len(cells):
            mean = cells[position].mean(mean, _PRIOR_WEIGHT)
        means.append(mean)
    return means
