"""Who comes in, in which tier, and within which limits: everything is decided here before the engine hears of it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specserve.deployments.credentials import Credentials, Principal, Tier
from specserve.deployments.quotas import Lease, Quotas
from specserve.deployments.usage import KeyUse
from specserve.service.errors import ForbiddenError, OverloadedError, PromptTooLongError, QuotaExceededError
from specserve.service.requests import GenerationRequest

from .backend import Load
from .limits import RequestLimits
from .schemas import ServiceTier

ASSUMED_OUTPUT_TOKENS = 256
"""Held of a minute's tokens for a choice whose output limit the client left open, until its real length is known."""

RETRY_OVERLOADED_S = 1.0
RETRY_FLEX_S = 10.0
RETRY_PRIORITY_S = 10.0
_NAMES: dict[ServiceTier, Tier] = {
    "default": "default",
    "scale": "default",
    "flex": "flex",
    "priority": "priority",
    "fast": "priority",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for: `num_choices` requests for each prompt, which it sent in the field `param`.

    `open_ended`: it named no limit of the output.
    """

    requests: Sequence[GenerationRequest]
    tier: ServiceTier | None
    num_choices: int
    open_ended: bool
    param: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """Requests that may go to the engine. `downgrade` says why they are served as default instead of priority."""

    requests: list[GenerationRequest]
    lease: Lease
    downgrade: str | None


class Gatekeeper(Protocol):
    """What the app asks."""

    @property
    def limits(self) -> RequestLimits: ...

    def enter(self, method: str, authorization: str | None) -> Principal:
        """Return who calls. Raises UnauthenticatedError, ForbiddenError."""
        ...

    def count(self, method: str, principal: Principal) -> None:
        """Count the request. Raises QuotaExceededError."""
        ...

    def headers(self, principal: Principal) -> dict[str, str]:
        """Return the headers that tell a caller of its limits."""
        ...

    def check_queue(self, load: Load, num_more: int = 1) -> None:
        """Raise OverloadedError when there is no room for `num_more` requests to wait."""
        ...

    def admit(self, principal: Principal, asked: Asked, load: Load) -> Admitted:
        """Return the requests as they are to be served. Raises what refuses them; nothing is held then."""
        ...

    def settle(self, lease: Lease, tokens: int) -> None:
        """End a lease with the tokens really used."""
        ...


class Gate:
    """The gate of one process."""

    def __init__(
        self,
        credentials: Credentials | None = None,
        limits: RequestLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._credentials = credentials or Credentials()
        self._quotas = Quotas()
        self._clock = clock
        self.limits = limits or RequestLimits()

    def enter(self, method: str, authorization: str | None) -> Principal:
        """Return who calls: clients may do everything, viewers and operators may look."""
        principal = self._credentials.authenticate(authorization)
        if not principal.may_generate and method not in ("GET", "HEAD"):
            raise ForbiddenError("this key is for the admin API only", None, "wrong_role")
        return principal

    def count(self, method: str, principal: Principal) -> None:
        """Count a POST; looking costs nothing."""
        if method == "POST":
            self._quotas.count_request(principal, self._clock())

    def headers(self, principal: Principal) -> dict[str, str]:
        """Return the `x-ratelimit-*` headers as of now."""
        return self._quotas.headers(principal, self._clock())

    def check_queue(self, load: Load, num_more: int = 1) -> None:
        """Raise OverloadedError when too many would wait; an idle cell takes any request."""
        waiting = load.unfinished + num_more - load.places
        if load.unfinished and waiting > self.limits.max_waiting:
            raise OverloadedError(f"{load.num_waiting} requests wait already", RETRY_OVERLOADED_S)

    def admit(self, principal: Principal, asked: Asked, load: Load) -> Admitted:
        """Return the requests with their tier and salt, and hold what they need of the key's limits."""
        now_s, quotas, num = self._clock(), self._quotas, len(asked.requests)
        self.check_queue(load, num)
        self._check_requests(principal, asked)
        tokens = tokens_held(asked)
        tier, downgrade = served_tier(asked.tier, principal)
        if tier == "priority" and not quotas.leaves_priority(principal, tokens, num, now_s):
            if "default" not in principal.tiers:
                raise QuotaExceededError("this key's share of priority is used up", RETRY_PRIORITY_S)
            tier, downgrade = "default", "over_quota"
        if tier == "flex" and load.num_waiting > self.limits.flex_max_waiting:
            message = f"flex is not served while {load.num_waiting} requests wait"
            raise QuotaExceededError(message, RETRY_FLEX_S, "resource_unavailable")
        lease = quotas.lease(principal, tier, tokens, num, now_s)
        served = [replace(each, tier=tier, cache_salt=salt(principal, each.cache_salt)) for each in asked.requests]
        return Admitted(served, lease, downgrade)

    def settle(self, lease: Lease, tokens: int) -> None:
        """End a lease with the tokens really used."""
        lease.settle(tokens, self._clock())

    def share(self, others: Mapping[str, KeyUse]) -> None:
        """Count what the other cells use."""
        self._quotas.hear(others)

    def used(self) -> dict[str, KeyUse]:
        """Return what each key uses here."""
        return self._quotas.report(self._clock())

    def _check_requests(self, principal: Principal, asked: Asked) -> None:
        most, least = self.limits.max_prompt_tokens, principal.min_priority
        for each in asked.requests:
            length = len(each.prompt_token_ids)
            if most is not None and length > most:
                message = f"a prompt may have {most} tokens; this one has {length}"
                raise PromptTooLongError(message, asked.param, "context_length_exceeded")
            if least is not None and each.priority < least:
                raise ForbiddenError(f"this key may not ask for a priority below {least}", "priority")


def served_tier(asked: ServiceTier | None, principal: Principal) -> tuple[Tier, str | None]:
    """Return the tier that serves who asks for `asked`, and why it is a lower one. Raises ForbiddenError."""
    tier = principal.default_tier if asked in (None, "auto") else _NAMES[asked]
    if tier in principal.tiers:
        return tier, None
    if tier == "priority" and "default" in principal.tiers:
        return "default", "not_allowed"
    raise ForbiddenError(f"this key may not use the service tier {tier}", "service_tier", "tier_not_allowed")


def tokens_held(asked: Asked) -> int:
    """Return the tokens that a request may use: each prompt once, and every choice's output at its longest."""
    prompts = sum(len(each.prompt_token_ids) for each in asked.requests[:: asked.num_choices])
    most = ASSUMED_OUTPUT_TOKENS if asked.open_ended else math.inf
    return prompts + sum(int(min(each.max_tokens, most)) for each in asked.requests)


def salt(principal: Principal, asked: str) -> str:
    """Return the cache salt of a tenant's request; a tenant's name has no `/`, so no two pairs give the same one."""
    return f"{principal.tenant}/{asked}" if principal.tenant else asked
