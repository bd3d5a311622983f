"""Uniform numbers that branch: a comparison with one splits the run in two, each weighted by its share of the interval.

Any rule that compares its numbers, scaled or not, is enumerated exactly this way, right or wrong, without being told
where its breakpoints lie.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class Run:
    """One run through the tree of branches: follows `script`, then takes first branches; `weight` is its chance."""

    script: list[int]
    weight: float = 1.0
    taken: list[tuple[int, int]] = field(default_factory=list)

    def choose(self, weights: list[float]) -> int:
        """Return the index of a branch."""
        place = len(self.taken)
        index = self.script[place] if place < len(self.script) else 0
        self.taken.append((index, len(weights)))
        self.weight *= weights[index]
        return index

    def next_script(self) -> list[int] | None:
        for place in reversed(range(len(self.taken))):
            index, count = self.taken[place]
            if index + 1 < count:
                return [taken for taken, _ in self.taken[:place]] + [index + 1]
        return None


@dataclass
class Coin:
    """A number uniform in [0, 1), known to lie in [low, high); `u * 0.5 < x` and `u < x` decide, and narrow it."""

    run: Run
    low: float = 0.0
    high: float = 1.0
    at_zero: bool = False

    def __mul__(self, factor: float) -> "Scaled":
        return Scaled(self, factor)

    def __lt__(self, bound: float) -> bool:
        return bound > 0.0 if self.at_zero else self._below(bound)

    def __le__(self, bound: float) -> bool:
        if self.at_zero:
            return bound >= 0.0
        if self.low == 0.0 and bound == 0.0:
            # u = 0 has no weight, but generators do return it.
            self.at_zero = bool(self.run.choose([1.0, 0.0]))
            return self.at_zero
        return self._below(bound)

    def _below(self, bound: float) -> bool:
        edge = min(max(bound, self.low), self.high)
        options = [(low, high, below) for low, high, below in self._parts(edge) if high > low]
        width = self.high - self.low
        index = self.run.choose([(high - low) / width for low, high, _ in options])
        self.low, self.high, below = options[index]
        return below

    def _parts(self, edge: float) -> Iterator[tuple[float, float, bool]]:
        yield self.low, edge, True
        yield edge, self.high, False


@dataclass
class Scaled:
    """A coin times a number."""

    coin: Coin
    factor: float

    def __lt__(self, bound: float) -> bool:
        return self.coin < bound / self.factor if self.factor > 0.0 else bound > 0.0

    def __le__(self, bound: float) -> bool:
        return self.coin <= bound / self.factor if self.factor > 0.0 else bound >= 0.0


@dataclass
class Coins:
    """As many coins as are asked for, by position; the same position gives the same coin."""

    run: Run
    made: dict[int, Coin] = field(default_factory=dict)

    def __getitem__(self, place: int) -> Coin:
        return self.made.setdefault(place, Coin(self.run))


def runs(once: Callable[[Run], None]) -> None:
    """Call `once` for every branch."""
    script: list[int] | None = []
    while script is not None:
        run = Run(script)
        once(run)
        script = run.next_script()


def drawn_token(probs: torch.Tensor, run: Run) -> int:
    """Return a token of `probs` [vocab], every one with its weight: stands in for the inverse CDF."""
    total = float(probs.sum())
    tokens = [token for token, prob in enumerate(probs.tolist()) if prob > 0.0]
    return tokens[run.choose([float(probs[token]) / total for token in tokens])]


@dataclass(frozen=True)
class Draws:
    """Residual numbers for `drawn_token`."""

    run: Run

    def __getitem__(self, place: int) -> Run:
        return self.run
