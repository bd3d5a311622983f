"""Open-loop traffic in one mode: what every request got, tier by tier and second by second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from .figures import Sample, percentile
from .traffic import Arrival


@dataclass(frozen=True, slots=True)
class Served:
    """One request of a run: when it was due, and how it was answered."""

    arrival: Arrival
    sample: Sample

    @property
    def draft_tokens_per_round(self) -> float:
        """Draft tokens of an average round of the request: its gamma, 0 where nothing was drafted."""
        rounds = self.sample.num_rounds or 1
        return (self.sample.num_drafted or 0) / rounds


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What a tier got. `within` is the share of requests whose time per token met the objective, a mean over passes."""

    tier: str
    num_requests: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    objective_ms: float
    within: float
    within_by_pass: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Second:
    """One second of an average pass: requests that came, their gamma and time per token, requests unfinished."""

    at_s: int
    num_arrived: float
    draft_tokens_per_round: float | None
    tpot_ms: float | None
    num_unfinished: float


@dataclass(frozen=True, slots=True)
class Replay:
    """One mode's passes over the whole traffic; `tokens_per_s` and `seconds` are medians."""

    mode: str
    tokens_per_s: float
    tokens_per_s_by_pass: tuple[float, ...]
    seconds: float
    tiers: tuple[TierFigures, ...]
    trace: tuple[Second, ...]

    def tier(self, name: str) -> TierFigures | None:
        """Return what the tier got; None when no request of it came."""
        return next((one for one in self.tiers if one.tier == name), None)


def replayed(mode: str, passes: Sequence[Sequence[Served]], objectives_ms: Mapping[str, float]) -> Replay:
    """Return the figures of a mode. Tokens per second are all tokens over the time to the last answer's end."""
    seconds = [_seconds(served) for served in passes]
    speeds = [sum(one.sample.num_tokens for one in served) / _seconds(served) for served in passes]
    tiers = sorted({one.arrival.tier for one in passes[0]})
    return Replay(
        mode,
        median(speeds),
        tuple(speeds),
        median(seconds),
        tuple(_tier(passes, tier, objectives_ms[tier]) for tier in tiers),
        tuple(_second(at_s, passes) for at_s in range(int(max(seconds)) + 1)),
    )


def _seconds(served: Sequence[Served]) -> float:
    return max(one.arrival.at_s + one.sample.end_s for one in served)


def table(runs: Sequence[Replay]) -> str:
    """Return the runs as a markdown table, a line for each mode and tier."""
    head = (
        "mode",
        "tier",
        "requests",
        "tokens/s",
        "TTFT p50 ms",
        "p95",
        "TPOT p50 ms",
        "p95",
        "objective ms",
        "within",
    )
    rows = [
        (
            run.mode,
            tier.tier,
            str(tier.num_requests),
            f"{run.tokens_per_s:.1f}",
            *(_shown(value) for value in (tier.ttft_ms_p50, tier.ttft_ms_p95, tier.tpot_ms_p50, tier.tpot_ms_p95)),
            f"{tier.objective_ms:g}",
            f"{tier.within:.1%}",
        )
        for run in runs
        for tier in run.tiers
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, tuple("---" for _ in head), *rows))


def _tier(passes: Sequence[Sequence[Served]], tier: str, objective_ms: float) -> TierFigures:
    of_tier = [[one.sample for one in served if one.arrival.tier == tier] for served in passes]
    samples = [one for each in of_tier for one in each]
    ttft = [one.ttft_s for one in samples]
    tpot = [one.tpot_s for one in samples if one.tpot_s is not None]
    within = tuple(_within(each, objective_ms) for each in of_tier)
    shares: dict[str, Any] = {
        "ttft_ms_p50": _ms(percentile(ttft, 0.5)),
        "ttft_ms_p95": _ms(percentile(ttft, 0.95)),
        "tpot_ms_p50": _ms(percentile(tpot, 0.5)),
        "tpot_ms_p95": _ms(percentile(tpot, 0.95)),
    }
    return TierFigures(
        tier, len(samples), objective_ms=objective_ms, within=mean(within), within_by_pass=within, **shares
    )


def _within(samples: Sequence[Sample], objective_ms: float) -> float:
    known = [one.tpot_s for one in samples if one.tpot_s is not None]
    return mean(spent * 1e3 <= objective_ms for spent in known) if known else 1.0


def _second(at_s: int, passes: Sequence[Sequence[Served]]) -> Second:
    served = [one for each in passes for one in each]
    here = [one for one in served if at_s <= one.arrival.at_s < at_s + 1]
    tpot = [one.sample.tpot_s for one in here if one.sample.tpot_s is not None]
    unfinished = sum(one.arrival.at_s <= at_s < one.arrival.at_s + one.sample.end_s for one in served)
    return Second(
        at_s,
        len(here) / len(passes),
        mean([one.draft_tokens_per_round for one in here]) if here else None,
        _ms(mean(tpot) if tpot else None),
        unfinished / len(passes),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
