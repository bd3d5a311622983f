"""What operators want of the cells: the active version, a canary, a shadow, and overrides with an end."""

from dataclasses import dataclass
from typing import Literal

Speculation = Literal["off"]


@dataclass(frozen=True, slots=True)
class Guard:
    """What ends a canary by itself; None does not bind. `tpot_p95_ratio` compares with the active version's requests.

    Nothing is judged before `min_requests` of the canary's requests ended.
    """

    tpot_p95_ms: float | None = None
    tpot_p95_ratio: float | None = 1.25
    error_rate: float | None = 0.05
    acceptance_floor: float | None = None
    min_requests: int = 20


@dataclass(frozen=True, slots=True)
class Canary:
    """A version tried on `percent` of the requests of some tiers (of all when there are none)."""

    version: int
    percent: float
    tiers: tuple[str, ...] = ()
    guard: Guard = Guard()


@dataclass(frozen=True, slots=True)
class Rollout:
    """Which versions act, and which is only watched."""

    active: int
    canary: Canary | None = None
    shadow: int | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that cells must know."""
        named = (self.active, self.canary.version if self.canary is not None else None, self.shadow)
        return tuple(dict.fromkeys(version for version in named if version is not None))


@dataclass(frozen=True, slots=True)
class Override:
    """Speculation off for a tier, or for all when `tier` is None, until `expires_s` (None: until it is removed)."""

    override_id: int
    tier: str | None
    created_s: float
    expires_s: float | None
    actor: str
    reason: str
    speculation: Speculation = "off"

    def in_force(self, now_s: float) -> bool:
        """Return whether it still binds; `now_s` is Unix time."""
        return self.expires_s is None or now_s < self.expires_s


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change or attempted change. `diff` leads from the old version's document to the new one's."""

    entry_id: int
    at_s: float
    actor: str
    source: str
    action: str
    reason: str
    old_version: int | None
    new_version: int | None
    diff: tuple[dict[str, object], ...]
    result: str
