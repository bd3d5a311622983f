"""The policy document: what operators may ask for, as plain frozen data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

Law = Literal["off", "fixed", "schedule", "adaptive"]

MAX_GAMMA = 64
MAX_FORECAST_S = 10.0
DEFAULT_TIER = "default"
DRAFTERS = (
    "prediction",
    "prompt_lookup",
    "suffix",
    "draft",
    "eagle",
    "eagle3",
    "medusa",
    "mtp",
    "layer_skip",
    "early_exit",
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """An open interval; a missing end does not bind."""

    above: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether the value lies strictly between the ends."""
        return (self.above is None or value > self.above) and (self.below is None or value < self.below)


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the schedule law: `gamma` applies when all its bounds hold."""

    gamma: int
    qps: Bounds = Bounds()
    batch: Bounds = Bounds()
    acceptance: Bounds = Bounds()


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """How one latency tier speculates. `gamma` serves the law fixed; `rules` and `otherwise` the law schedule."""

    law: Law = "adaptive"
    gamma: int = 4
    max_gamma: int = 8
    tpot_slo_ms: float | None = None
    weight: float = 1.0
    rules: tuple[Rule, ...] = ()
    otherwise: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps and margins that hold for the whole engine. `forecast_s` is how far ahead load is looked for; 0 is not."""

    draft_tokens_per_round: int = 256
    probe_duty: float = 0.05
    min_gain: float = 0.02
    min_dwell_rounds: int = 16
    forecast_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Policy:
    """One whole policy. A tier that is not listed follows the tier `default`."""

    name: str = "default"
    tiers: tuple[tuple[str, TierPolicy], ...] = ((DEFAULT_TIER, TierPolicy()),)
    proposers: tuple[str, ...] = DRAFTERS
    limits: Limits = Limits()

    def tier(self, name: str) -> TierPolicy:
        """Return the tier's policy, the one of `default` when the tier is not listed."""
        fallback = TierPolicy()
        for key, value in self.tiers:
            if key == name:
                return value
            if key == DEFAULT_TIER:
                fallback = value
        return fallback


def policy_from_dict(data: object) -> Policy:
    """Return the policy a parsed document describes, defaults filled in.

    Raises ValueError naming the path of the first bad field; unknown keys are refused.
    """
    fields = _mapping(data, "policy", {"name", "tiers", "proposers", "limits"})
    blank = Policy()
    name = fields.get("name", blank.name)
    if not isinstance(name, str) or not name:
        raise ValueError("name: must be a non-empty string")
    tiers = blank.tiers
    if "tiers" in fields:
        listed = _mapping(fields["tiers"], "tiers", None)
        tiers = tuple((key, _tier(value, f"tiers.{key}")) for key, value in listed.items())
        if not any(key == DEFAULT_TIER for key, _ in tiers):
            tiers += ((DEFAULT_TIER, TierPolicy()),)
    proposers = blank.proposers
    if "proposers" in fields:
        items = _list(fields["proposers"], "proposers")
        for i, item in enumerate(items):
            if not isinstance(item, str) or not item:
                raise ValueError(f"proposers[{i}]: must be a non-empty string")
        proposers = tuple(cast(list[str], items))
        if len(set(proposers)) != len(proposers):
            raise ValueError("proposers: must not repeat a name")
    return Policy(name, tiers, proposers, _limits(fields.get("limits", {})))


def policy_to_dict(policy: Policy) -> dict[str, object]:
    """Return the document of a policy; `policy_from_dict` gives the same policy back."""
    limits = policy.limits
    return {
        "name": policy.name,
        "tiers": {name: _tier_to_dict(tier) for name, tier in policy.tiers},
        "proposers": list(policy.proposers),
        "limits": {
            "draft_tokens_per_round": limits.draft_tokens_per_round,
            "probe_duty": limits.probe_duty,
            "min_gain": limits.min_gain,
            "min_dwell_rounds": limits.min_dwell_rounds,
            "forecast_s": limits.forecast_s,
        },
    }


def simple_policy(text: str) -> Policy:
    """Return the one-tier policy named by `off`, `fixed:N` or `adaptive`. Raises ValueError otherwise."""
    if text in ("off", "adaptive"):
        return Policy(text, ((DEFAULT_TIER, TierPolicy(law=cast(Law, text))),))
    kind, _, number = text.partition(":")
    if kind == "fixed" and number.isascii() and number.isdigit() and int(number) <= MAX_GAMMA:
        gamma = int(number)
        tier = TierPolicy(law="fixed", gamma=gamma, max_gamma=max(gamma, TierPolicy().max_gamma))
        return Policy(text, ((DEFAULT_TIER, tier),))
    raise ValueError(f"policy: must be off, adaptive or fixed:N with N at most {MAX_GAMMA}, not {text!r}")


def _tier(data: object, path: str) -> TierPolicy:
    known = {"law", "gamma", "max_gamma", "tpot_slo_ms", "weight", "rules", "otherwise"}
    fields = _mapping(data, path, known)
    blank = TierPolicy()
    law = fields.get("law", blank.law)
    if law is False:  # YAML 1.1 reads a bare `off` as false
        law = "off"
    if law not in get_args(Law):
        raise ValueError(f"{path}.law: must be one of {', '.join(get_args(Law))}, not {law!r}")
    slo = fields.get("tpot_slo_ms")
    rules = _list(fields.get("rules", []), f"{path}.rules")
    gamma = _integer(fields.get("gamma", blank.gamma), f"{path}.gamma", MAX_GAMMA)
    max_gamma = fields.get("max_gamma", max(blank.max_gamma, gamma))
    return TierPolicy(
        law=cast(Law, law),
        gamma=gamma,
        max_gamma=_integer(max_gamma, f"{path}.max_gamma", MAX_GAMMA),
        tpot_slo_ms=None if slo is None else _number(slo, f"{path}.tpot_slo_ms", positive=True),
        weight=_number(fields.get("weight", blank.weight), f"{path}.weight", positive=True),
        rules=tuple(_rule(rule, f"{path}.rules[{i}]") for i, rule in enumerate(rules)),
        otherwise=_integer(fields.get("otherwise", blank.otherwise), f"{path}.otherwise", MAX_GAMMA),
    )


def _rule(data: object, path: str) -> Rule:
    fields = _mapping(data, path, {"qps", "batch", "acceptance", "gamma"})
    if "gamma" not in fields:
        raise ValueError(f"{path}.gamma: is missing")
    return Rule(
        gamma=_integer(fields["gamma"], f"{path}.gamma", MAX_GAMMA),
        qps=_bounds(fields.get("qps", {}), f"{path}.qps"),
        batch=_bounds(fields.get("batch", {}), f"{path}.batch"),
        acceptance=_bounds(fields.get("acceptance", {}), f"{path}.acceptance"),
    )


def _bounds(data: object, path: str) -> Bounds:
    fields = _mapping(data, path, {"above", "below"})
    ends = {key: _number(value, f"{path}.{key}") for key, value in fields.items()}
    return Bounds(ends.get("above"), ends.get("below"))


def _limits(data: object) -> Limits:
    blank = Limits()
    known = {"draft_tokens_per_round", "probe_duty", "min_gain", "min_dwell_rounds", "forecast_s"}
    fields = _mapping(data, "limits", known)
    duty = _number(fields.get("probe_duty", blank.probe_duty), "limits.probe_duty")
    if duty > 1.0:
        raise ValueError("limits.probe_duty: must be at most 1")
    tokens = fields.get("draft_tokens_per_round", blank.draft_tokens_per_round)
    dwell = fields.get("min_dwell_rounds", blank.min_dwell_rounds)
    forecast_s = _number(fields.get("forecast_s", blank.forecast_s), "limits.forecast_s")
    if forecast_s > MAX_FORECAST_S:
        raise ValueError(f"limits.forecast_s: must be at most {MAX_FORECAST_S:g}")
    return Limits(
        draft_tokens_per_round=_integer(tokens, "limits.draft_tokens_per_round", 1_000_000),
        probe_duty=duty,
        min_gain=_number(fields.get("min_gain", blank.min_gain), "limits.min_gain"),
        min_dwell_rounds=_integer(dwell, "limits.min_dwell_rounds", 1_000_000),
        forecast_s=forecast_s,
    )


def _mapping(data: object, path: str, known: set[str] | None) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: must be a mapping")
    for key in data:
        if not isinstance(key, str) or not key:
            raise ValueError(f"{path}: keys must be non-empty strings, not {key!r}")
        if known is not None and key not in known:
            where = key if path == "policy" else f"{path}.{key}"
            raise ValueError(f"{where}: unknown key; known are {', '.join(sorted(known))}")
    return data


def _list(data: object, path: str) -> list[object]:
    if not isinstance(data, list | tuple):
        raise ValueError(f"{path}: must be a list")
    return list(data)


def _integer(value: object, path: str, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise ValueError(f"{path}: must be an integer from 0 to {limit}, not {value!r}")
    return value


def _number(value: object, path: str, positive: bool = False) -> float:
    try:
        finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError(f"{path}: must be a number, not {value!r}")
    assert isinstance(value, int | float)
    if value < 0 or (positive and value == 0):
        raise ValueError(f"{path}: must be {'positive' if positive else 'at least 0'}, not {value!r}")
    return float(value)


def _tier_to_dict(tier: TierPolicy) -> dict[str, object]:
    return {
        "law": tier.law,
        "gamma": tier.gamma,
        "max_gamma": tier.max_gamma,
        "tpot_slo_ms": tier.tpot_slo_ms,
        "weight": tier.weight,
        "rules": [
            {
                "qps": _bounds_to_dict(rule.qps),
                "batch": _bounds_to_dict(rule.batch),
                "acceptance": _bounds_to_dict(rule.acceptance),
                "gamma": rule.gamma,
            }
            for rule in tier.rules
        ],
        "otherwise": tier.otherwise,
    }


def _bounds_to_dict(bounds: Bounds) -> dict[str, float]:
    return {key: end for key, end in (("above", bounds.above), ("below", bounds.below)) if end is not None}
