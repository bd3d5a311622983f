"""The arithmetic of the bench: from what a client saw to the figures of a cell."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median, stdev
from typing import Any

FEWEST_REPEATS = 3
"""Repeats below which there is no standard error."""
_MEDIAN_LOSS = math.sqrt(math.pi / 2.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One streamed request as its client saw it; `arrivals_s` are the times of chunks with text, after the start.

    `num_accepted` and `num_drafted` count draft tokens and are None when the server does not say.
    """

    arrivals_s: tuple[float, ...]
    end_s: float
    num_tokens: int
    num_accepted: int | None
    num_drafted: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    text: str = ""

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
class Pass:
    """One pass over a workload: its requests in the prompts' order and how long all of them took together.

    `client_cpu_s` is processor time of the load generator itself, taken from the server where both share a machine;
    `others_cpu_share` is how many cores strangers to the bench had meanwhile.
    """

    samples: tuple[Sample, ...]
    wall_s: float
    client_cpu_s: float = 0.0
    rss_mb: float | None = None
    others_cpu_share: float | None = None


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
    rss_mb: float | None
    num_drafted: float | None
    num_accepted: float | None
    draft_efficiency: float | None
    cached_prompt_tokens: float
    client_cpu_share: float
    others_cpu_share: float | None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the `share` quantile with linear interpolation; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def figures(done: Pass) -> Figures:
    """Return the figures of one pass; every request that finished counts as good.

    Tokens per second are all output tokens over the pass's wall time, prompt processing included.
    """
    samples, wall_s = done.samples, done.wall_s
    ttft = [sample.ttft_s for sample in samples]
    itl = [gap for sample in samples for gap in sample.itl_s]
    tpot = [sample.tpot_s for sample in samples if sample.tpot_s is not None]
    counted = [(sample.num_tokens, sample.num_rounds) for sample in samples if sample.num_rounds is not None]
    num_rounds = sum(rounds for _, rounds in counted)
    drafted = _total([sample.num_drafted for sample in samples])
    accepted = _total([sample.num_accepted for sample in samples])
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
        rss_mb=done.rss_mb,
        num_drafted=drafted,
        num_accepted=accepted,
        draft_efficiency=accepted / drafted if drafted and accepted is not None else None,
        cached_prompt_tokens=sum(sample.num_cached_tokens for sample in samples),
        client_cpu_share=done.client_cpu_s / wall_s,
        others_cpu_share=done.others_cpu_share,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def medians(passes: Sequence[Figures]) -> Figures:
    """Return the median of each figure over repeated passes, of those passes where it is known."""
    found: dict[str, Any] = {}
    for field in fields(Figures):
        known = [value for one in passes if (value := getattr(one, field.name)) is not None]
        found[field.name] = median(known) if known else None
    return Figures(**found)


@dataclass(frozen=True, slots=True)
class Ratios:
    """A cell's throughput over another's of the same run, workload and concurrency; None if that was not run.

    `to_transformers` compares plain decoding with transformers' plain one, batched to the same concurrency. A mode that
    speculates is compared with the fastest setting that transformers has there: at concurrency 1 that may be one of
    its own ways to speculate, above 1 it has none. Errors are standard errors of the ratios; None of fewer than three
    repeats.
    """

    to_plain: float | None = None
    to_best_fixed: float | None = None
    to_transformers: float | None = None
    to_plain_error: float | None = None
    to_best_fixed_error: float | None = None


def ratios(
    by_mode: Mapping[str, Sequence[float]], against: Mapping[str, Sequence[float]] | None = None
) -> dict[str, Ratios]:
    """Return each mode's ratios from the tokens per second of each repeat, by mode and by transformers' setting."""
    plain = by_mode.get("plain")
    fixed = max((one for mode, one in by_mode.items() if mode.startswith("fixed:")), key=median, default=None)
    their_plain = (against or {}).get("plain")
    their_best = max((against or {}).values(), key=median, default=None)
    return {
        mode: Ratios(
            _over(one, plain),
            _over(one, fixed),
            _over(one, their_plain if mode == "plain" else their_best),
            ratio_error(one, plain),
            ratio_error(one, fixed),
        )
        for mode, one in by_mode.items()
    }


def ratio_error(ours: Sequence[float], theirs: Sequence[float] | None) -> float | None:
    """Return the standard error of the ratio of the medians, from how the ratio differs between repeats.

    Repeats are interleaved, so what slows the machine for a while slows both. The median of normally distributed values
    is known 1.253 times less well than their mean. None of fewer than three repeats.
    """
    if theirs is None or min(len(ours), len(theirs)) < FEWEST_REPEATS:
        return None
    apart = [math.log(one / other) for one, other in zip(ours, theirs, strict=False) if one > 0.0 and other > 0.0]
    if len(apart) < FEWEST_REPEATS:
        return None
    return median(ours) / median(theirs) * _MEDIAN_LOSS * stdev(apart) / math.sqrt(len(apart))


def _over(ours: Sequence[float], theirs: Sequence[float] | None) -> float | None:
    return median(ours) / median(theirs) if theirs and median(theirs) else None


def num_differing(passes: Sequence[Pass], reference: Pass) -> int:
    """Return how many prompts have, in any of `passes`, another text than in `reference`."""
    return sum(
        any(done.samples[place].text != wanted.text for done in passes)
        for place, wanted in enumerate(reference.samples)
    )
