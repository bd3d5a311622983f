"""The channel answers strangers nothing, friends by call id, and everybody who waits when the peer is gone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from specserve.deployments import channel
from specserve.deployments.channel import ChannelClient, ChannelServer
from specserve.service.errors import BadRequestError, ChannelError, SpecserveError

SECRET = b"a secret of this cluster"


def run(body: Coroutine[Any, Any, None]) -> None:
    """Runs `body` and fails it for every task it leaves and every error nobody looked at."""
    unseen: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        async with asyncio.timeout(30):
            await body
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert unseen == []


@dataclass
class Peer:
    """A handler set whose `wait` answers when `release` is set, and counts itself in `entered`."""

    release: asyncio.Event = field(default_factory=asyncio.Event)
    entered: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    num_cancelled: int = 0
    num_calls: int = 0

    async def echo(self, body: bytes) -> bytes:
        self.num_calls += 1
        return body

    async def wait(self, body: bytes) -> bytes:
        self.entered.release()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return body

    async def reverse(self, body: bytes) -> bytes:
        """Answers call 0 last: every call waits for the ones after it."""
        for _ in range(200 - int(body)):
            await asyncio.sleep(0)
        return body

    async def bad_request(self, body: bytes) -> bytes:
        raise BadRequestError("no such field")

    async def bug(self, body: bytes) -> bytes:
        raise KeyError("lost")

    @property
    def handlers(self) -> Mapping[str, Callable[[bytes], Awaitable[bytes]]]:
        names = ("echo", "wait", "reverse", "bad_request", "bug")
        return {name: getattr(self, name) for name in names}


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Peer, ChannelServer, ChannelClient]]:
    peer = Peer()
    server = ChannelServer(peer.handlers, SECRET)
    client = ChannelClient(*await server.start(), SECRET)
    try:
        await client.connect()
        yield peer, server, client
    finally:
        await client.close()
        await server.stop()


def test_a_call_is_answered_with_its_bytes() -> None:
    async def body() -> None:
        async with connected() as (_, _, client):
            assert client.connected
            assert await client.call("echo", b"hello", 5) == b"hello"
            assert await client.call("echo", b"", 5) == b""
        assert not client.connected

    run(body())


def test_a_client_with_another_secret_is_refused() -> None:
    async def body() -> None:
        peer = Peer()
        server = ChannelServer(peer.handlers, SECRET)
        client = ChannelClient(*await server.start(), b"a guess")
        with pytest.raises(ChannelError, match="does not know the secret"):
            await client.connect()
        assert not client.connected
        with pytest.raises(ChannelError, match="not connected"):
            await client.call("echo", b"", 5)
        await server.stop()

    run(body())


def frame(kind: int, body: bytes, name: bytes = b"", call_id: int = 1) -> bytes:
    return channel._HEADER.pack(10 + len(name) + len(body), call_id, kind, len(name)) + name + body


@pytest.mark.parametrize(
    "sent",
    [
        frame(3, b"body", b"echo"),
        frame(0, b"n" * 32) + frame(3, b"body", b"echo"),
        frame(0, b"n" * 32) + frame(2, b"p" * 32) + frame(3, b"body", b"echo"),
        frame(0, b"n" * 32) + frame(0, b"n" * 32),
        frame(2, b"p" * 32),
        frame(0, b"short"),
        frame(99, b""),
        frame(0, b"n" * 32, b"\xff"),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x01",
    ],
)
def test_a_stranger_is_closed_and_nothing_is_handled(sent: bytes) -> None:
    async def body() -> None:
        peer = Peer()
        server = ChannelServer(peer.handlers, SECRET)
        reader, writer = await asyncio.open_connection(*await server.start())
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            challenge = await reader.read()  # to the end: the server closed
            assert len(challenge) in (0, 14 + 64)
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
        await server.stop()
        assert peer.num_calls == 0

    run(body())


def test_a_client_does_not_trust_a_server_that_sends_its_proof_back() -> None:
    async def body() -> None:
        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            hello = await reader.readexactly(14 + 32)
            writer.write(frame(1, hello[14:] + channel._prove(b"a guess", b"server", hello[14:], hello[14:])))
            assert await reader.read() == b""
            writer.close()
            done.set()

        done = asyncio.Event()
        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        client = ChannelClient("127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
        with pytest.raises(ChannelError, match="does not know the secret"):
            await client.connect()
        await done.wait()
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0)

    run(body())


def test_a_silent_stranger_is_closed_after_the_handshake_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        server = ChannelServer({}, SECRET)
        reader, writer = await asyncio.open_connection(*await server.start())
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        await server.stop()

    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.01)
    run(body())


def test_a_server_that_says_nothing_is_a_channel_error_after_the_deadline() -> None:
    async def body() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            done.set()

        done = asyncio.Event()
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        client = ChannelClient("127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
        with pytest.raises(ChannelError, match="timed out"):
            await client.connect(timeout_s=0.01)
        await done.wait()
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0)

    run(body())


def test_a_port_nobody_listens_on_is_a_channel_error() -> None:
    async def body() -> None:
        server = ChannelServer({}, SECRET)
        address = await server.start()
        await server.stop()
        with pytest.raises(ChannelError, match="cannot reach"):
            await ChannelClient(*address, SECRET).connect()

    run(body())


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a secret"):
        ChannelServer({}, b"")
    with pytest.raises(ValueError, match="needs a secret"):
        ChannelClient("127.0.0.1", 1, b"")


def test_a_late_answer_is_dropped_and_the_connection_goes_on() -> None:
    async def body() -> None:
        async with connected() as (peer, _, client):
            with pytest.raises(TimeoutError):
                await client.call("wait", b"late", 0.01)
            await peer.entered.acquire()
            peer.release.set()
            assert await client.call("wait", b"in time", 5) == b"in time"  # answered after the late one
            assert client._pending == {}

    run(body())


def test_an_end_of_file_fails_every_pending_call_at_once() -> None:
    async def body() -> None:
        lost: list[ChannelError] = []
        peer = Peer()
        server = ChannelServer(peer.handlers, SECRET)
        client = ChannelClient(*await server.start(), SECRET, on_lost=lost.append)
        await client.connect()
        calls = [asyncio.ensure_future(client.call("wait", b"", 1000)) for _ in range(20)]
        for _ in calls:
            await peer.entered.acquire()
        await server.stop()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answer, SpecserveError) for answer in answers)
        assert peer.num_cancelled == 20
        with pytest.raises(ChannelError, match="not connected"):
            await client.call("echo", b"", 5)
        assert len(lost) == 1
        assert not client.connected
        await client.close()

    run(body())


def test_closing_the_client_fails_its_calls_without_telling_on_lost() -> None:
    async def body() -> None:
        async with connected() as (peer, _, client):
            lost: list[ChannelError] = []
            client._on_lost = lost.append
            call = asyncio.ensure_future(client.call("wait", b"", 1000))
            await peer.entered.acquire()
            await client.close()
            with pytest.raises(ChannelError, match="closed"):
                await call
            assert lost == []

    run(body())


def test_a_client_connects_again_after_a_loss() -> None:
    async def body() -> None:
        lost = asyncio.Event()
        peer = Peer()
        server = ChannelServer(peer.handlers, SECRET)
        host, port = await server.start()
        client = ChannelClient(host, port, SECRET, on_lost=lambda _: lost.set())
        await client.connect()
        await server.stop()
        await lost.wait()
        await server.start(host, port)
        await client.connect()
        assert await client.call("echo", b"again", 5) == b"again"
        await client.close()
        await server.stop()

    run(body())


@pytest.mark.parametrize("num_bytes", [65_536, 1_000_003, channel.MAX_FRAME_BYTES - 10 - len("echo")])
def test_a_big_body_arrives_whole(num_bytes: int) -> None:
    async def body() -> None:
        async with connected() as (_, _, client):
            sent = bytes(range(256)) * (num_bytes // 256) + b"x" * (num_bytes % 256)
            assert await client.call("echo", sent, 30) == sent

    run(body())


def test_a_body_over_the_limit_is_refused_on_both_sides_and_the_connection_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async def grow(sent: bytes) -> bytes:
            return sent * 2

        server = ChannelServer({"grow": grow}, SECRET)
        client = ChannelClient(*await server.start(), SECRET)
        await client.connect()
        with pytest.raises(ChannelError, match="over the limit"):
            await client.call("grow", b"x" * 1001, 5)
        with pytest.raises(ChannelError, match="over the limit"):
            await client.call("grow", b"x" * 600, 5)
        assert await client.call("grow", b"x", 5) == b"xx"
        await client.close()
        await server.stop()

    monkeypatch.setattr(channel, "MAX_FRAME_BYTES", 1000)
    run(body())


def test_a_length_over_the_limit_closes_the_connection() -> None:
    async def body() -> None:
        async with connected() as (peer, _, client):
            call = asyncio.ensure_future(client.call("wait", b"", 1000))
            await peer.entered.acquire()
            assert client._connection is not None
            assert client._connection._transport is not None
            client._connection._transport.write((channel.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
            with pytest.raises(ChannelError):
                await call
            peer.release.set()

    run(body())


def test_a_handlers_error_comes_back_by_name_and_the_connection_stays() -> None:
    async def body() -> None:
        async with connected() as (_, _, client):
            with pytest.raises(BadRequestError, match="no such field"):
                await client.call("bad_request", b"", 5)
            with pytest.raises(SpecserveError, match="KeyError: 'lost'"):
                await client.call("bug", b"", 5)
            with pytest.raises(ChannelError, match="no method 'absent'"):
                await client.call("absent", b"", 5)
            assert await client.call("echo", b"still here", 5) == b"still here"

    run(body())


def test_two_hundred_calls_at_once_get_their_own_answers_in_any_order() -> None:
    async def body() -> None:
        async with connected() as (_, _, client):
            answered: list[int] = []

            async def one(number: int) -> None:
                assert await client.call("reverse", str(number).encode(), 30) == str(number).encode()
                answered.append(number)

            await asyncio.gather(*(one(number) for number in range(200)))
            assert sorted(answered) == list(range(200))
            assert answered != sorted(answered)

    run(body())


class OpenTransport(asyncio.Transport):
    """A transport that takes nothing and never closes."""

    def is_closing(self) -> bool:
        return False


def test_frames_cut_at_every_byte_are_put_together() -> None:
    async def body() -> None:
        seen: list[tuple[int, str, bytes]] = []
        connection = channel._Connection(
            lambda _: None, lambda _, call_id, __, name, body: seen.append((call_id, name, body)), lambda *_: None
        )
        connection.connection_made(OpenTransport())
        connection.authenticated = True
        sent = b"".join(frame(3, b"b" * size, b"echo", size) for size in (0, 1, 20))
        for step in range(1, len(sent) + 1):
            seen.clear()
            for start in range(0, len(sent), step):
                connection.data_received(sent[start : start + step])
            assert seen == [(size, "echo", b"b" * size) for size in (0, 1, 20)]

    run(body())
