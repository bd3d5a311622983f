"""Counting answers on their way out."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .backend import Backend

UNMATCHED = "unmatched"


class CountingMiddleware:
    """Counts every answer by its route's template, so that no client can make new labels.

    Ray makes the application before there is a backend; what is answered until then is not counted.
    """

    def __init__(self, app: ASGIApp, backend: Backend) -> None:
        self._app = app
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; see the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                http = getattr(self._backend, "http", None)
                if http is not None:
                    http.responses[_route(scope), message["status"]] += 1
                    why = scope.get("state", {}).get("downgrade")
                    http.downgrades.update([] if why is None else [why])
            await send(message)

        await self._app(scope, receive, send_counted)


def _route(scope: Scope) -> str:
    """Return the template of the route; a request that was refused before it was routed has one if its path is one."""
    if "route" in scope:
        return str(scope["route"].path)
    path = scope["path"]
    return path if any(path == getattr(route, "path", None) for route in scope["app"].routes) else UNMATCHED
