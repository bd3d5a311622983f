"""One run of open-loop traffic: what every request got, tier by tier and second by second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
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
    """What a tier got. `within` is the share of requests whose time per token met the objective."""

    tier: str
    num_requests: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    objective_ms: float
    within: float


@dataclass(frozen=True, slots=True)
class Second:
    """One second of a run: requests that came in it, their average gamma and time per token, requests unfinished."""

    at_s: int
    num_arrived: int
    draft_tokens_per_round: float | None
    tpot_ms: float | None
    num_unfinished: int


@dataclass(frozen=True, slots=True)
class Replay:
    """One mode's run over the whole traffic."""

    mode: str
    tokens_per_s: float
    seconds: float
    tiers: tuple[TierFigures, ...]
    trace: tuple[Second, ...]

    def within(self, tier: str) -> float | None:
        """Return the share of the tier's requests that met its objective; None when it had none."""
        return next((one.within for one in self.tiers if one.tier == tier), None)


def replayed(mode: str, served: Sequence[Served], objectives_ms: Mapping[str, float]) -> Replay:
    """Return the figures of one run. Tokens per second are all tokens over the time to the last answer's end."""
    ends = [one.arrival.at_s + one.sample.end_s for one in served]
    seconds = max(ends)
    tiers = sorted({one.arrival.tier for one in served})
    return Replay(
        mode,
        sum(one.sample.num_tokens for one in served) / seconds,
        seconds,
        tuple(_tier([one for one in served if one.arrival.tier == tier], tier, objectives_ms[tier]) for tier in tiers),
        tuple(_second(at_s, served) for at_s in range(int(seconds) + 1)),
    )


def missed(runs: Sequence[Replay], tier: str = "priority") -> list[str]:
    """Return a sentence for each promise that `adaptive` breaks beside the other modes of the same traffic."""
    adaptive = next((run for run in runs if run.mode == "adaptive"), None)
    others = [run for run in runs if run.mode != "adaptive"]
    if adaptive is None or not others:
        return []
    sentences = []
    best = max(others, key=lambda run: run.tokens_per_s)
    if adaptive.tokens_per_s < 0.98 * best.tokens_per_s:
        ratio = adaptive.tokens_per_s / best.tokens_per_s
        sentences.append(f"adaptive gave {ratio:.3f} of the tokens of {best.mode}; the budget is 0.98.")
    kept = adaptive.within(tier)
    fixed = [share for run in others if run.mode.startswith("fixed:") and (share := run.within(tier)) is not None]
    if kept is not None and fixed and kept < max(fixed):
        sentences.append(
            f"adaptive kept {tier}'s objective for {kept:.1%} of requests, a fixed gamma {max(fixed):.1%}."
        )
    return sentences


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


def _tier(served: Sequence[Served], tier: str, objective_ms: float) -> TierFigures:
    ttft = [one.sample.ttft_s for one in served]
    tpot = [one.sample.tpot_s for one in served if one.sample.tpot_s is not None]
    within = mean(spent * 1e3 <= objective_ms for spent in tpot) if tpot else 1.0
    shares: dict[str, Any] = {
        "ttft_ms_p50": _ms(percentile(ttft, 0.5)),
        "ttft_ms_p95": _ms(percentile(ttft, 0.95)),
        "tpot_ms_p50": _ms(percentile(tpot, 0.5)),
        "tpot_ms_p95": _ms(percentile(tpot, 0.95)),
    }
    return TierFigures(tier, len(served), objective_ms=objective_ms, within=within, **shares)


def _second(at_s: int, served: Sequence[Served]) -> Second:
    here = [one for one in served if at_s <= one.arrival.at_s < at_s + 1]
    tpot = [one.sample.tpot_s for one in here if one.sample.tpot_s is not None]
    unfinished = sum(one.arrival.at_s <= at_s < one.arrival.at_s + one.sample.end_s for one in served)
    gammas = [one.draft_tokens_per_round for one in here]
    return Second(at_s, len(here), mean(gammas) if gammas else None, _ms(mean(tpot) if tpot else None), unfinished)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
