"""The arithmetic of the bench: from what a client saw to the figures of a cell."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

PLAIN_BUDGET = 0.98
"""The least share of plain decoding's throughput that the adaptive mode may have."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One streamed request as its client saw it; `arrivals_s` are the times of chunks with text, after the start."""

    arrivals_s: tuple[float, ...]
    end_s: float
    num_tokens: int
    num_accepted: int | None

    @property
    def num_rounds(self) -> int | None:
        """Rounds the request took, speculating or not; None when the server does not say.

        Each round emits one token besides those it accepts, so rounds = tokens - accepted; a last round cut by the
        length limit or a stop can make it one too few, never below 1.
        """
        return None if self.num_accepted is None else max(1, self.num_tokens - self.num_accepted)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first text."""
        return self.arrivals_s[0] if self.arrivals_s else self.end_s

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Seconds between consecutive chunks; a chunk carries all tokens of one round."""
        return tuple(later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False))

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None with fewer than two tokens."""
        if self.num_tokens < 2 or not self.arrivals_s:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Figures:
    """One pass over a workload in one mode, or the medians of several; None is unknown."""

    tokens_per_s: float
    tokens_per_round: float | None
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    itl_ms_p50: float | None
    itl_ms_p95: float | None
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    e2e_ms_p50: float | None
    goodput_rps: float


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the `share` quantile with linear interpolation; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def figures(samples: Sequence[Sample], wall_s: float) -> Figures:
    """Return the figures of one pass that took `wall_s`; every request that finished counts as good."""
    ttft = [sample.ttft_s for sample in samples]
    itl = [gap for sample in samples for gap in sample.itl_s]
    tpot = [sample.tpot_s for sample in samples if sample.tpot_s is not None]
    counted = [(sample.num_tokens, sample.num_rounds) for sample in samples if sample.num_rounds is not None]
    num_rounds = sum(rounds for _, rounds in counted)
    return Figures(
        tokens_per_s=sum(sample.num_tokens for sample in samples) / wall_s,
        tokens_per_round=sum(emitted for emitted, _ in counted) / num_rounds if num_rounds else None,
        ttft_ms_p50=_ms(percentile(ttft, 0.5)),
        ttft_ms_p95=_ms(percentile(ttft, 0.95)),
        itl_ms_p50=_ms(percentile(itl, 0.5)),
        itl_ms_p95=_ms(percentile(itl, 0.95)),
        tpot_ms_p50=_ms(percentile(tpot, 0.5)),
        tpot_ms_p95=_ms(percentile(tpot, 0.95)),
        e2e_ms_p50=_ms(percentile([sample.end_s for sample in samples], 0.5)),
        goodput_rps=len(samples) / wall_s,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def medians(passes: Sequence[Figures]) -> Figures:
    """Return the median of each figure over repeated passes."""

    def known(values: Sequence[float | None]) -> float | None:
        found = [value for value in values if value is not None]
        return median(found) if found else None

    return Figures(
        tokens_per_s=median([one.tokens_per_s for one in passes]),
        tokens_per_round=known([one.tokens_per_round for one in passes]),
        ttft_ms_p50=known([one.ttft_ms_p50 for one in passes]),
        ttft_ms_p95=known([one.ttft_ms_p95 for one in passes]),
        itl_ms_p50=known([one.itl_ms_p50 for one in passes]),
        itl_ms_p95=known([one.itl_ms_p95 for one in passes]),
        tpot_ms_p50=known([one.tpot_ms_p50 for one in passes]),
        tpot_ms_p95=known([one.tpot_ms_p95 for one in passes]),
        e2e_ms_p50=known([one.e2e_ms_p50 for one in passes]),
        goodput_rps=median([one.goodput_rps for one in passes]),
    )


@dataclass(frozen=True, slots=True)
class Ratios:
    """A cell's throughput over plain decoding's and over the best fixed gamma's, of the same run; None if not run."""

    to_plain: float | None
    to_best_fixed: float | None


def ratios(by_mode: dict[str, Figures]) -> dict[str, Ratios]:
    """Return each mode's ratios within one workload at one concurrency."""
    plain = by_mode["plain"].tokens_per_s if "plain" in by_mode else None
    fixed = max((one.tokens_per_s for mode, one in by_mode.items() if mode.startswith("fixed:")), default=None)
    return {
        mode: Ratios(
            one.tokens_per_s / plain if plain else None,
            one.tokens_per_s / fixed if fixed else None,
        )
        for mode, one in by_mode.items()
    }
