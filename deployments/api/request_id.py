"""The name of each HTTP request, which its answer carries."""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestIdMiddleware:
    """Gives every answer an `x-request-id`: the client's own when it sent a printable one, else a new one.

    Behind Ray Serve, which adds the header to answers by itself, the name is only noted (`named_in_front`).
    """

    def __init__(self, app: ASGIApp, named_in_front: bool = False) -> None:
        self._app = app
        self._named_in_front = named_in_front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; see the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        usable = 0 < len(asked) <= 128 and asked.isascii() and asked.isprintable()
        request_id = asked if usable else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send if self._named_in_front else send_with_id)
