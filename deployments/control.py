"""From what is stored to what cells are told, at a given time. Pure: no Ray, no HTTP, no clock."""

from specserve.policies.document import policy_from_dict

from .policystore import Desired
from .rollout import Override
from .snapshot import CanaryShare, Governing, Silence, Snapshot


def overrides_in_force(desired: Desired, now_s: float) -> tuple[Override, ...]:
    """Return the overrides that bind at Unix time `now_s`."""
    return tuple(one for one in desired.overrides if one.in_force(now_s))


def snapshot_of(desired: Desired, now_s: float) -> Snapshot:
    """Return what governs cells at Unix time `now_s`. Raises ValueError when a stored policy is none."""
    rollout, binding = desired.rollout, overrides_in_force(desired, now_s)
    known = {version: Governing(version, policy_from_dict(text)) for version, text in desired.documents.items()}
    canary = rollout.canary
    return Snapshot(
        revision=(desired.revision, tuple(one.override_id for one in binding)),
        active=known[rollout.active],
        canary=None if canary is None else CanaryShare(known[canary.version], canary.percent, canary.tiers),
        shadow=None if rollout.shadow is None else known[rollout.shadow],
        silences=tuple(Silence(one.tier, None if one.expires_s is None else one.expires_s - now_s) for one in binding),
    )
