"""Who may look and who may change."""

from collections.abc import Awaitable, Callable

from fastapi import Request

from specserve.service.errors import ForbiddenError

from ..credentials import Credentials, Principal
from ..policystore import Note

_NOBODY_IN_PARTICULAR = "anyone"
Access = Callable[[Request], Awaitable[Principal]]


def reading(credentials: Credentials) -> Access:
    """Return a check that lets viewers and operators pass."""

    async def check(request: Request) -> Principal:
        principal = credentials.authenticate(request.headers.get("authorization"))
        if not principal.may_read:
            raise ForbiddenError("this key may not use the admin API")
        return principal

    return check


def writing(credentials: Credentials) -> Access:
    """Return a check that lets operators pass."""

    async def check(request: Request) -> Principal:
        principal = credentials.authenticate(request.headers.get("authorization"))
        if not principal.may_write:
            raise ForbiddenError("this key may look, not change; that takes the role operator")
        return principal

    return check


def note(request: Request, principal: Principal, now_s: float, reason: str) -> Note:
    """Return who changes something, when, from where and why."""
    source = request.client.host if request.client is not None else ""
    return Note(now_s, principal.key_id or _NOBODY_IN_PARTICULAR, reason, source)
