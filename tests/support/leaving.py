"""An HTTP client without a socket that goes away in the middle of an answer."""

import asyncio
import json
from typing import Any


class Leaving:
    """A raw ASGI client that leaves: once `after` has been answered so many `times`, or at once when it is None."""

    def __init__(self, body: dict[str, Any], after: str | None, times: int = 1) -> None:
        self._body = json.dumps(body).encode()
        self._after = after
        self._times = times
        self._said = asyncio.Condition()
        self.messages: list[Any] = []
        self._leave = asyncio.Event()
        self._asked = False
        if after is None:
            self._leave.set()

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        async with self._said:
            self._said.notify_all()
        if self._after is not None and self._heard(self._after) >= self._times:
            self._leave.set()

    def _heard(self, text: str) -> int:
        return sum(text.encode() in message.get("body", b"") for message in self.messages)

    async def seen(self, times: int, text: str | None = None) -> None:
        """Return once `text`, else what it waits for, was answered so many times."""
        wanted = text or self._after or ""
        async with self._said:
            await self._said.wait_for(lambda: self._heard(wanted) >= times)

    async def visit(self, app: Any) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
            "root_path": "", "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
        }  # fmt: skip
        await asyncio.wait_for(app(scope, self.receive, self.send), 20)
