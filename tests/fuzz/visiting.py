"""One raw HTTP exchange in a chosen manner: politely, slowly, half-closed, in chunks, or gone in the middle."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Literal

Manner = Literal["stay", "slow", "half_close", "leave"]
PATIENCE_S = 120.0
_SLOW_BYTES = 4096
_SLOW_S = 0.02


@dataclass(frozen=True, slots=True)
class Shot:
    """What is sent, and how. `kind` names what is tried; `valid` must not be refused as bad, `malformed` is no HTTP.

    `keep_alive`: the server leaves the connection open. `leave_after`: the bytes that a client hears before it leaves.
    """

    kind: str
    request: bytes
    manner: Manner = "stay"
    leave_after: int = 0
    keep_alive: bool = False
    valid: bool = False
    malformed: bool = False

    @property
    def is_head(self) -> bool:
        """True when the answer has no body."""
        return self.request.startswith(b"HEAD ")


@dataclass(frozen=True, slots=True)
class Heard:
    """What came back. `status` None is no answer; `ended`: the answer's own framing says that it is whole."""

    status: int | None
    headers: dict[str, str]
    body: bytes
    ended: bool
    timed_out: bool = False


async def visit(port: int, shot: Shot) -> Heard:
    """Return what the server on `port` of the loopback interface answers to `shot`."""
    received = bytearray()
    timed_out = False
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await _talk(reader, writer, shot, received)
            finally:
                writer.transport.abort()
    except TimeoutError:
        timed_out = True
    except (ConnectionError, OSError):
        pass
    return _parsed(bytes(received), shot.is_head, timed_out)


async def _talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shot: Shot, received: bytearray) -> None:
    writer.write(shot.request)
    with contextlib.suppress(ConnectionError):  # a refusal may come before the body was read
        await writer.drain()
    if shot.manner == "half_close":
        writer.write_eof()
    if shot.manner == "leave" and shot.leave_after == 0:
        return
    size = _SLOW_BYTES if shot.manner == "slow" else 2**16
    while data := await reader.read(size):
        received += data
        if shot.manner == "leave" and len(received) >= shot.leave_after:
            return
        if shot.keep_alive and _parsed(bytes(received), shot.is_head, False).ended:
            return
        if shot.manner == "slow":
            await asyncio.sleep(_SLOW_S)


def _parsed(received: bytes, is_head: bool, timed_out: bool) -> Heard:
    head, found, body = received.partition(b"\r\n\r\n")
    while found and head.startswith(b"HTTP/1.1 1"):  # 100 Continue
        head, found, body = body.partition(b"\r\n\r\n")
    status_line, *fields = head.decode("latin-1").split("\r\n")
    words = status_line.split(" ")
    if not found or len(words) < 2 or not words[1].isdecimal():
        return Heard(None, {}, received, False, timed_out)
    headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    if is_head:
        return Heard(int(words[1]), headers, body, True, timed_out)
    if headers.get("transfer-encoding") == "chunked":
        whole, ended = _unchunked(body)
    else:
        whole, ended = body, headers.get("content-length") in (None, str(len(body)))
    return Heard(int(words[1]), headers, whole, ended, timed_out)


def _unchunked(body: bytes) -> tuple[bytes, bool]:
    """Return the bytes of the chunks, and whether the last one is there."""
    whole = bytearray()
    while True:
        size, found, body = body.partition(b"\r\n")
        if not found:
            return bytes(whole), False
        length = int(size.split(b";")[0], 16)
        if length == 0:
            return bytes(whole), True
        whole += body[:length]
        body = body[length + 2 :]
