"""Whether a cell wants a kind of proposer that costs memory while it is there, and time until it is there again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from .document import DEFAULT_TIER, Policy

_FIRST_PATIENCE_S, _MOST_PATIENCE_S = 60.0, 3600.0
_FRESH_S = 5.0
_SHORT_IDLE_S = 30.0
_NEVER = float("-inf")

Stance = Literal["never", "on_request", "may"]
"""Forbidden by an override everywhere, drafting only for requests that insist, or for policies to choose."""


class Asker(Protocol):
    """What of a running request matters here."""

    @property
    def tier(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def proposer(self) -> str | None: ...


def stance(name: str, policies: Sequence[Policy], silent: frozenset[str | None]) -> Stance:
    """Return what the policies in force say of a kind, where overrides silence some tiers (None: all)."""
    if None in silent:
        return "never"
    for policy in policies:
        tiers = {DEFAULT_TIER, *(tier for tier, _ in policy.tiers)} - silent
        if name in policy.proposers and any(policy.tier(tier).law != "off" for tier in tiers):
            return "may"
    return "on_request"


@dataclass(slots=True)
class Demand:
    """When one kind was last asked for, insisted on, chosen and reached; on the clock of the rounds.

    A kind that is not chosen for `idle_s` is let go. If requests came that could have had it, it was the policy that
    did without: then it is asked for again after a minute, and after twice as long each time, as it takes memory and
    a start to find out. Requests that name it do not wait.
    While KV pages are short it is let go sooner, and only requests that name it bring it back.
    """

    name: str
    idle_s: float
    asked_s: float = _NEVER
    insisted_s: float = _NEVER
    chosen_s: float = _NEVER
    reached_s: float | None = None
    again_s: float = _NEVER
    patience_s: float = _FIRST_PATIENCE_S

    def note(self, requests: Sequence[Asker], policies: Sequence[Policy], chosen: bool, now_s: float) -> None:
        """Take in a round: who runs, under which policies, and whether this kind drafts for anybody."""
        if chosen:
            self.chosen_s, self.patience_s = now_s, _FIRST_PATIENCE_S
        if any(self._insists(view, policies) for view in requests):
            self.insisted_s = self.asked_s = now_s
        elif any(self._may_have(view, policies) for view in requests):
            self.asked_s = now_s

    def wanted(self, now: Stance, reached: bool, now_s: float, memory_short: bool = False) -> bool:
        """Return whether the kind should be there, given whether it is."""
        idle_s = min(self.idle_s, _SHORT_IDLE_S) if memory_short else self.idle_s
        if not reached:
            self.reached_s = None
        elif self.reached_s is None:
            self.reached_s = now_s
        if now != "may":
            self.again_s, self.patience_s = _NEVER, _FIRST_PATIENCE_S
            return now == "on_request" and now_s - self.insisted_s <= (idle_s if reached else _FRESH_S)
        if self.reached_s is None:
            asked = now_s >= self.again_s and now_s - self.asked_s <= _FRESH_S
            return (asked and not memory_short) or now_s - self.insisted_s <= _FRESH_S
        used_s = max(self.reached_s, self.chosen_s)
        if now_s - used_s <= idle_s:
            return True
        if self.asked_s - used_s > idle_s / 2:
            self.again_s = now_s + self.patience_s
            self.patience_s = min(2 * self.patience_s, _MOST_PATIENCE_S)
        self.reached_s = None
        return False

    def _insists(self, view: Asker, policies: Sequence[Policy]) -> bool:
        if view.proposer is not None:
            return view.proposer == self.name and self._drafts(view, policies)
        return view.mode == "on" and any(self.name in policy.proposers for policy in policies)

    def _may_have(self, view: Asker, policies: Sequence[Policy]) -> bool:
        if view.proposer is not None or not self._drafts(view, policies):
            return False
        return any(self.name in policy.proposers for policy in policies)

    def _drafts(self, view: Asker, policies: Sequence[Policy]) -> bool:
        if view.mode != "auto":
            return view.mode == "on"
        return any(policy.tier(view.tier).law != "off" for policy in policies)
