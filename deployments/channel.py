"""The round channel: calls and answers multiplexed over one authenticated TCP connection between two processes.

Both sides prove that they know the cluster's secret before anything else is read (HMAC-SHA256 over nonces of both).
That keeps strangers out; it neither encrypts nor signs the frames after it, so the network must be trusted not to
alter them. A frame is, big-endian: 4 bytes length of the rest, 8 call id, 1 kind, 1 name length, name, body.
"""

import asyncio
import enum
import hashlib
import hmac
import itertools
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from specserve.service import errors
from specserve.service.errors import ChannelError, EngineStoppedError, SpecserveError

Handler = Callable[[bytes], Awaitable[bytes]]

MAX_FRAME_BYTES = 64 * 2**20
HANDSHAKE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)
_PROTOCOL = b"specserve-channel-1"
_NONCE_BYTES = 32
_MAX_HANDSHAKE_BYTES = 256
_LENGTH = struct.Struct("!I")
_HEADER = struct.Struct("!IQBB")
_HEADER_REST_BYTES = _HEADER.size - _LENGTH.size


class _Kind(enum.IntEnum):
    HELLO = 0  # client: its nonce
    CHALLENGE = 1  # server: its nonce and its proof
    PROOF = 2  # client: its proof
    CALL = 3  # name is the method
    REPLY = 4
    ERROR = 5  # name is the exception's class, body its message


def _prove(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """The proof that `role` knows the secret; the role is part of it, so that a proof cannot be sent back."""
    return hmac.digest(secret, _PROTOCOL + role + client_nonce + server_nonce, hashlib.sha256)


class _Connection(asyncio.Protocol):
    """One side of a connection: cuts bytes into frames, hands them to `on_frame`, and tells `on_closed` of the end.

    An asyncio.Protocol, not streams: as fast (see channelbench), and without a reader task to lose or to leak.
    """

    def __init__(
        self,
        on_open: Callable[["_Connection"], None],
        on_frame: Callable[["_Connection", int, _Kind, str, bytes], None],
        on_closed: Callable[["_Connection", ChannelError], None],
    ) -> None:
        self.authenticated = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.client_nonce = b""
        self.server_nonce = b""
        self._on_open = on_open
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._failure: ChannelError | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are none of asyncio's classes
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._received.clear()
        failure = self._failure or ChannelError(f"the peer closed the connection{f': {exc}' if exc else ''}")
        self.closed.set_result(None)
        self._on_closed(self, failure)

    def data_received(self, data: bytes) -> None:
        if self._received:
            self._received += data
            used = self._cut(self._received)
            if self._received:
                del self._received[:used]
        else:  # the common case: whole frames, each copied once
            used = self._cut(data)
            if self.is_open and used < len(data):
                self._received += data[used:]

    def _cut(self, data: bytes | bytearray) -> int:
        """The number of bytes of `data` that were whole frames, all of them handed on."""
        start = 0
        view = memoryview(data)
        with view:
            while self.is_open and len(data) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(data, start)
                limit = MAX_FRAME_BYTES if self.authenticated else _MAX_HANDSHAKE_BYTES
                if not _HEADER_REST_BYTES <= length <= limit:
                    self.abort(f"a frame of {length} bytes, outside {_HEADER_REST_BYTES} to {limit}")
                    break
                end = start + _LENGTH.size + length
                if len(data) < end:
                    break
                _, call_id, kind, name_length = _HEADER.unpack_from(data, start)
                body_start = start + _HEADER.size + name_length
                if body_start > end:
                    self.abort("a frame shorter than its name")
                    break
                try:
                    name = str(view[start + _HEADER.size : body_start], "utf-8")
                    frame_kind = _Kind(kind)
                except ValueError:
                    self.abort("a frame of unknown kind or name")
                    break
                self._on_frame(self, call_id, frame_kind, name, bytes(view[body_start:end]))
                start = end
        return start

    def send(self, call_id: int, kind: _Kind, name: str, body: bytes) -> None:
        """Queues one frame, or drops it when the connection is gone. Raises: ChannelError when it is too big."""
        encoded_name = name.encode()
        length = _HEADER_REST_BYTES + len(encoded_name) + len(body)
        if length > MAX_FRAME_BYTES or len(encoded_name) > 255:
            raise ChannelError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines((_HEADER.pack(length, call_id, kind, len(encoded_name)) + encoded_name, body))

    def abort(self, reason: str) -> None:
        """Closes at once; `on_closed` gets a ChannelError of the first `reason`."""
        self._failure = self._failure or ChannelError(reason)
        if self._transport is not None:
            self._transport.abort()


class ChannelServer:
    """Answers calls by name. Every call is a task of its own, so a slow one delays no other.

    A call whose client is gone runs on and its answer is dropped; `stop` cancels what still runs.
    """

    def __init__(self, handlers: Mapping[str, Handler], secret: bytes) -> None:
        if not secret:
            raise ValueError("the channel needs a secret")
        self._handlers = dict(handlers)
        self._secret = secret
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def num_clients(self) -> int:
        """Clients that are connected and authenticated."""
        return sum(connection.authenticated for connection in self._connections)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """The address listened on; port 0 takes a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self._opened, self._received, self._lost), host, port
        )
        address = self._server.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def stop(self) -> None:
        """Returns when the port, every connection and every call are gone."""
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.abort("the server stopped")
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for connection in connections:
            await connection.closed
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    def _opened(self, connection: _Connection) -> None:
        self._connections.add(connection)
        timer = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._expire, connection)
        connection.closed.add_done_callback(lambda _: timer.cancel())

    def _expire(self, connection: _Connection) -> None:
        if not connection.authenticated:
            connection.abort("the handshake took too long")

    def _lost(self, connection: _Connection, failure: ChannelError) -> None:
        self._connections.discard(connection)
        if not connection.authenticated:
            _log.warning("channel: a client left before it was authenticated: %s", failure.message)

    def _received(self, connection: _Connection, call_id: int, kind: _Kind, name: str, body: bytes) -> None:
        if connection.authenticated:
            if kind is _Kind.CALL:
                call = asyncio.get_running_loop().create_task(self._answer(connection, call_id, name, body))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            else:
                connection.abort(f"an unexpected {kind.name}")
        elif kind is _Kind.HELLO and len(body) == _NONCE_BYTES and not connection.client_nonce:
            connection.client_nonce = body
            connection.server_nonce = os.urandom(_NONCE_BYTES)
            proof = _prove(self._secret, b"server", body, connection.server_nonce)
            connection.send(0, _Kind.CHALLENGE, "", connection.server_nonce + proof)
        elif kind is _Kind.PROOF and connection.client_nonce:
            expected = _prove(self._secret, b"client", connection.client_nonce, connection.server_nonce)
            if hmac.compare_digest(expected, body):
                connection.authenticated = True
            else:
                connection.abort("the client does not know the secret")
        else:
            connection.abort("no handshake")

    async def _answer(self, connection: _Connection, call_id: int, method: str, body: bytes) -> None:
        try:
            handler = self._handlers.get(method)
            if handler is None:
                raise ChannelError(f"no method {method!r}")
            connection.send(call_id, _Kind.REPLY, "", await handler(body))
        except asyncio.CancelledError:
            connection.send(call_id, _Kind.ERROR, EngineStoppedError.__name__, b"the call was cancelled")
            raise
        except Exception as error:  # the process's edge: the caller learns of it, the connection stays
            if not isinstance(error, SpecserveError):
                _log.exception("channel: %s failed", method)
            message = str(error.message if isinstance(error, SpecserveError) else error)
            connection.send(call_id, _Kind.ERROR, type(error).__name__[:60], message[:4096].encode(errors="replace"))


class ChannelClient:
    """Calls methods of one ChannelServer over one connection. After a loss, `connect` may be called again.

    `on_lost` is told of a connection that ended by anything but `close`.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, on_lost: Callable[[ChannelError], None] | None = None
    ) -> None:
        if not secret:
            raise ValueError("the channel needs a secret")
        self._address = (host, port)
        self._secret = secret
        self._on_lost = on_lost
        self._connection: _Connection | None = None
        self._ready: asyncio.Future[None] | None = None
        self._call_ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[bytes]] = {}

    @property
    def connected(self) -> bool:
        """Whether a call could be sent now."""
        return self._connection is not None and self._connection.authenticated and self._connection.is_open

    async def connect(self, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
        """Returns when both sides have proved the secret. Raises: ChannelError when they cannot, in time."""
        if self._connection is not None:
            await self.close()
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(self._open, *self._address)
                await self._ready
        except OSError as error:  # a TimeoutError is one too, and has no text
            await self.close()
            reason = str(error) or "timed out"
            raise ChannelError(f"cannot reach {self._address[0]}:{self._address[1]}: {reason}") from error
        except BaseException:
            await self.close()
            raise

    async def call(self, method: str, body: bytes, timeout_s: float) -> bytes:
        """The answer to `method(body)`.

        Raises: TimeoutError after `timeout_s` (an answer that comes later is dropped); ChannelError when the
        connection is or gets lost, or the frame is too big; what the handler raised, if it is of
        `service.errors`, else a SpecserveError that names it.
        """
        connection = self._connection
        if connection is None or not self.connected:
            raise ChannelError("not connected")
        call_id = next(self._call_ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = answer
        try:
            connection.send(call_id, _Kind.CALL, method, body)
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._pending.pop(call_id, None)

    async def close(self) -> None:
        """Fails what is pending and returns when the socket is gone; `on_lost` is not called."""
        connection, self._connection = self._connection, None
        self._fail_pending(ChannelError("the channel was closed"))
        if connection is not None:
            connection.abort("closed")
            await connection.closed

    def _open(self) -> _Connection:
        return _Connection(self._opened, self._received, self._lost)

    def _opened(self, connection: _Connection) -> None:
        self._connection = connection
        connection.client_nonce = os.urandom(_NONCE_BYTES)
        connection.send(0, _Kind.HELLO, "", connection.client_nonce)

    def _received(self, connection: _Connection, call_id: int, kind: _Kind, name: str, body: bytes) -> None:
        if connection.authenticated:
            answer = self._pending.get(call_id)
            if kind not in (_Kind.REPLY, _Kind.ERROR):
                connection.abort(f"an unexpected {kind.name}")
            elif answer is None or answer.done():
                pass  # a late answer: its caller has given up
            elif kind is _Kind.REPLY:
                answer.set_result(body)
            else:
                answer.set_exception(_remote_error(name, body.decode(errors="replace")))
            return
        if kind is not _Kind.CHALLENGE:
            connection.abort("no handshake")
            return
        server_nonce, proof = body[:_NONCE_BYTES], body[_NONCE_BYTES:]
        if not hmac.compare_digest(_prove(self._secret, b"server", connection.client_nonce, server_nonce), proof):
            connection.abort("the server does not know the secret")
            return
        connection.send(0, _Kind.PROOF, "", _prove(self._secret, b"client", connection.client_nonce, server_nonce))
        connection.authenticated = True
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _lost(self, connection: _Connection, failure: ChannelError) -> None:
        if self._connection is not connection:
            return  # closed by us
        self._connection = None
        self._fail_pending(failure)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(failure)
        elif self._on_lost is not None:
            self._on_lost(failure)

    def _fail_pending(self, failure: ChannelError) -> None:
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(ChannelError(failure.message))


def _remote_error(name: str, message: str) -> SpecserveError:
    """The exception an error frame stands for: of our tree by name, else the tree's root naming it."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, SpecserveError):
        return kind(message)
    return SpecserveError(f"{name}: {message}")
