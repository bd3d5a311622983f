"""What adaptive speculation must keep under open-loop traffic, and the sentences that say where it did not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import stdev

from .budgets import SURE_ERRORS
from .figures import FEWEST_REPEATS, ratio_error
from .replay import Replay

TOKENS_BUDGET = 0.98
"""The least share of the best other mode's throughput that the adaptive mode may have."""


@dataclass(frozen=True, slots=True)
class _Promise:
    """How far adaptive is above what it must reach; `error` is the standard error, None of few repeats."""

    margin: float
    error: float | None
    sentence: str

    @property
    def broken(self) -> bool:
        return self.margin < 0.0 and not self.doubtful

    @property
    def doubtful(self) -> bool:
        return self.error is not None and self.margin < 0.0 <= self.margin + SURE_ERRORS * self.error


def missed(runs: Sequence[Replay], tier: str = "priority") -> list[str]:
    """Return a sentence for each promise that `adaptive` breaks beside the other modes by more than passes differ."""
    return [one.sentence for one in _promises(runs, tier) if one.broken]


def doubts(runs: Sequence[Replay], tier: str = "priority") -> list[str]:
    """Return a sentence for each promise that seems broken, by less than passes differ."""
    return [f"{one.sentence} Whether that is so takes more repeats." for one in _promises(runs, tier) if one.doubtful]


def _promises(runs: Sequence[Replay], tier: str) -> Iterator[_Promise]:
    adaptive = next((run for run in runs if run.mode == "adaptive"), None)
    others = [run for run in runs if run.mode != "adaptive"]
    if adaptive is None or not others:
        return
    best = max(others, key=lambda run: run.tokens_per_s)
    ratio = adaptive.tokens_per_s / best.tokens_per_s
    error = ratio_error(adaptive.tokens_per_s_by_pass, best.tokens_per_s_by_pass)
    yield _Promise(
        ratio - TOKENS_BUDGET,
        error,
        f"adaptive gave {ratio:.3f}{_beside(error, '.3f')} of the tokens of {best.mode}; "
        f"the budget is {TOKENS_BUDGET}.",
    )
    ours = adaptive.tier(tier)
    fixed = [(run.mode, theirs) for run in others if run.mode.startswith("fixed:") and (theirs := run.tier(tier))]
    if ours is None or not fixed:
        return
    mode, theirs = max(fixed, key=lambda one: one[1].within)
    error = _difference_error(ours.within_by_pass, theirs.within_by_pass)
    yield _Promise(
        ours.within - theirs.within,
        error,
        f"adaptive kept {tier}'s objective for {ours.within:.1%}{_beside(error, '.1%')} of requests, "
        f"{mode} for {theirs.within:.1%}.",
    )


def _difference_error(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the standard error of the mean difference of passes taken in turns; None of fewer than three."""
    apart = [one - other for one, other in zip(ours, theirs, strict=True)]
    return stdev(apart) / len(apart) ** 0.5 if len(apart) >= FEWEST_REPEATS else None


def _beside(error: float | None, spec: str) -> str:
    return "" if error is None else f" ± {error:{spec}}"
