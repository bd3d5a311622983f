"""One HTTP exchange, recorded as it arrives and read afterwards.

The load generator shares the machine with the server, so while a pass runs it only notes when which bytes came; what
they say is worked out after the clock has stopped. A connection serves one request: `Connection: close` makes the end
of the answer the end of the connection.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from .errors import LoadError

Piece = tuple[float, bytes]
"""Bytes and when they came, in seconds after the request was started."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server listens."""

    host: str
    port: int
    encrypted: bool
    prefix: str

    @property
    def url(self) -> str:
        """The address as people write it."""
        return f"{'https' if self.encrypted else 'http'}://{self.host}:{self.port}{self.prefix}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and the pieces of the body."""

    status: int
    pieces: tuple[Piece, ...]

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(data for _, data in self.pieces)


def parse_url(url: str) -> Origin:
    """Return the origin that `url` names. Raises LoadError when it names none."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise LoadError(f"A server's address looks like http://127.0.0.1:8000, not {url!r}.")
    encrypted = parts.scheme == "https"
    return Origin(parts.hostname, port or (443 if encrypted else 80), encrypted, parts.path.rstrip("/"))


class _Recorder(asyncio.Protocol):
    """Sends one request and notes what comes back until the connection ends."""

    def __init__(self, request: bytes, started: float) -> None:
        self._request = request
        self._started = started
        self.received: list[Piece] = []
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received.append((time.perf_counter() - self._started, data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)


async def exchange(origin: Origin, request: bytes, timeout_s: float) -> list[Piece]:
    """Return what came back for `request`, byte for byte.

    Raises: LoadError when there is no connection, it breaks, or nothing ends within `timeout_s`.
    """
    started = time.perf_counter()
    recorder = _Recorder(request, started)
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: recorder, origin.host, origin.port, ssl=True if origin.encrypted else None
            )
            try:
                broken = await recorder.closed
            finally:
                transport.abort()
    except TimeoutError as error:
        raise LoadError(f"The server at {origin.url} took longer than {timeout_s:.0f} s to answer.") from error
    except OSError as error:
        raise LoadError(f"No server answers at {origin.url} ({error}).") from error
    if broken is not None:
        raise LoadError(f"The connection to {origin.url} broke ({broken!r}).")
    return recorder.received


def request_bytes(origin: Origin, method: str, path: str, body: bytes = b"") -> bytes:
    """Return an HTTP/1.1 request with a JSON body."""
    head = (
        f"{method} {origin.prefix}{path} HTTP/1.1",
        f"Host: {origin.host}:{origin.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join((*head, "", "")).encode() + body


def read_answer(received: Sequence[Piece]) -> Answer:
    """Return the answer in what was received. Raises LoadError when it is none."""
    head = b""
    for place, (at_s, data) in enumerate(received):
        head, found, rest = (head + data).partition(b"\r\n\r\n")
        if found:
            pieces = ((at_s, rest), *received[place + 1 :])
            fields = head.lower()
            chunked = b"\r\ntransfer-encoding: chunked" in fields
            try:
                status = int(fields.split(b" ", 2)[1])
                return Answer(status, tuple(_unchunked(pieces) if chunked else pieces))
            except (IndexError, ValueError) as error:
                raise LoadError(f"The server does not speak HTTP; it sent {head[:80]!r}.") from error
    raise LoadError("The server closed the connection without an answer.")


def _unchunked(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Undo chunked transfer encoding. The empty line after a chunk's data reads as a size line and is skipped."""
    buffer, left = b"", 0
    for at_s, data in pieces:
        buffer += data
        while buffer:
            if left:
                yield at_s, buffer[:left]
                left, buffer = max(0, left - len(buffer)), buffer[left:]
                continue
            line, found, rest = buffer.partition(b"\r\n")
            if not found:
                break
            buffer = rest
            if line:
                left = int(line.split(b";")[0], 16)
                if left == 0:
                    return


def lines(pieces: Iterable[Piece]) -> Iterator[tuple[float, bytes]]:
    """Yield each whole line and when its end came."""
    buffer = b""
    for at_s, data in pieces:
        *whole, buffer = (buffer + data).split(b"\n")
        for line in whole:
            yield at_s, line.rstrip(b"\r")
    if buffer:
        yield at_s, buffer
