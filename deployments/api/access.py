"""Deny by default: nothing but the probes is reached without a key, where keys are configured; no body is endless."""

from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.service.errors import SpecserveError

from .errors import refusal
from .gate import Gatekeeper

OPEN_PATHS = frozenset({"/health", "/ready"})


class AccessMiddleware:
    """Lets a request in with its `principal` in the state, and tells keyed callers of their limits in every answer."""

    def __init__(self, app: ASGIApp, gate: Gatekeeper) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer why not."""
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        gate, headers = self._gate, Headers(scope=scope)
        state = scope.setdefault("state", {})

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and "principal" in state:
                sent = MutableHeaders(scope=message)
                sent.update(state["limit_headers"]())
                if state.get("downgrade"):
                    sent["x-service-tier-downgrade"] = state["downgrade"]
            await send(message)

        try:
            principal = gate.enter(scope["method"], headers.get("authorization"))
            state |= {"principal": principal, "limit_headers": partial(gate.headers, principal)}
            gate.count(scope["method"], principal)
            bounded = _bounded(receive, headers, gate.limits.max_body_bytes)
        except (SpecserveError, HTTPException) as error:
            await refusal(error)(scope, receive, send_with_limits)
            return
        await self._app(scope, bounded, send_with_limits)


def _bounded(receive: Receive, headers: Headers, most: int) -> Receive:
    """Return `receive` for a body of `most` bytes. Raises HTTPException: now by its stated length, or once it is past.

    FastAPI hands an HTTPException on that comes up while it reads the body.
    """
    error = HTTPException(413, f"a body may have {most} bytes")
    stated = headers.get("content-length", "")
    if stated.isdecimal() and (len(stated) > 18 or int(stated) > most):
        raise error
    received = 0

    async def receive_bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > most:
            raise error
        return message

    return receive_bounded
