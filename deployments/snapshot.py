"""What a cell is told to do: plain frozen data, made anew by the controller whenever it changes."""

import zlib
from dataclasses import dataclass

from specserve.policies.document import Policy

Revision = tuple[int, tuple[int, ...]]
"""The number of the rollout and the overrides in force; equal revisions say the same."""
_SHARES = 10_000


@dataclass(frozen=True, slots=True)
class Governing:
    """A version and its policy."""

    version: int
    policy: Policy


@dataclass(frozen=True, slots=True)
class CanaryShare:
    """A version that governs some of the requests: `percent` of those in `tiers`, of all when there are none."""

    governing: Governing
    percent: float
    tiers: tuple[str, ...] = ()

    def covers(self, request_id: str, tier: str) -> bool:
        """Return whether the request is among them: always the same answer, in every cell."""
        if self.tiers and tier not in self.tiers:
            return False
        return zlib.crc32(request_id.encode()) % _SHARES < self.percent * (_SHARES / 100)


@dataclass(frozen=True, slots=True)
class Silence:
    """Speculation off in a tier (None: in all) for `remaining_s` more seconds (None: until told otherwise)."""

    tier: str | None
    remaining_s: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that governs a cell. Size: the policies named, about 1 kB each."""

    revision: Revision
    active: Governing
    canary: CanaryShare | None = None
    shadow: Governing | None = None
    silences: tuple[Silence, ...] = ()
