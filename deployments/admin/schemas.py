"""What operators send. Every change says why."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from ..rollout import Canary, Guard

MAX_ROUNDS = 5000
MAX_NUMBER = 2**62
"""Larger numbers than the store gives; it has 63 bits for one."""
_LONGEST_TTL_S = 30 * 86_400
Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=1000)]
TierName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
PolicySent = dict[str, Any] | str


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Reasoned(_Body):
    """A change without details."""

    reason: Reason


class PolicyChange(Reasoned):
    """A new version: a document, or `off`, `fixed:N`, `adaptive`. It is active at once unless `activate` is false."""

    policy: PolicySent
    activate: bool = True


class PolicyQuestion(_Body):
    """A policy to look at."""

    policy: PolicySent


class DryRun(_Body):
    """A policy, or the number of a stored one, to try on the last recorded rounds."""

    policy: PolicySent | None = None
    version: int | None = Field(None, ge=1, le=MAX_NUMBER)
    rounds: int = Field(500, ge=1, le=MAX_ROUNDS)

    @model_validator(mode="after")
    def _one_of_both(self) -> "DryRun":
        if (self.policy is None) == (self.version is None):
            raise ValueError("either policy or version must be given")
        return self


class GuardSent(_Body):
    """See `rollout.Guard`; null switches a part off."""

    tpot_p95_ms: float | None = Field(None, gt=0)
    tpot_p95_ratio: float | None = Field(Guard().tpot_p95_ratio, gt=0)
    error_rate: float | None = Field(Guard().error_rate, ge=0, le=1)
    acceptance_floor: float | None = Field(None, ge=0, le=1)
    min_requests: int = Field(Guard().min_requests, ge=1)


class CanarySent(_Body):
    """The share of requests that the version is tried on."""

    percent: float = Field(gt=0, le=100)
    tiers: tuple[TierName, ...] = ()
    guard: GuardSent = GuardSent()

    def of(self, version: int) -> Canary:
        """Return the canary of a version."""
        return Canary(version, self.percent, self.tiers, Guard(**self.guard.model_dump()))


class Activation(Reasoned):
    """A stored version takes over: wholly, as a canary, or as a shadow, which is evaluated and never acts."""

    canary: CanarySent | None = None
    shadow: bool = False

    @model_validator(mode="after")
    def _not_both(self) -> "Activation":
        if self.canary is not None and self.shadow:
            raise ValueError("a version is a canary or a shadow, not both")
        return self


class Stop(Reasoned):
    """The canary or the shadow ends."""

    role: Literal["canary", "shadow"]


class OverrideSent(Reasoned):
    """Speculation off, everywhere or in one tier; without `ttl_s` until it is removed."""

    speculation: Literal["off"]
    tier: TierName | None = None
    ttl_s: float | None = Field(None, gt=0, le=_LONGEST_TTL_S)
