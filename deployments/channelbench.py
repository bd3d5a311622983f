"""Compares round trips between two processes: this channel, asyncio streams with the same frames, and pyzmq.

`python -m specserve.deployments.channelbench [calls] [bytes]` prints a markdown table. All on the default event loop,
with TCP over loopback; one call at a time.
"""

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import zmq
import zmq.asyncio

from .channel import ChannelClient, ChannelServer

Call = Callable[[bytes], Awaitable[bytes]]

_SECRET = b"only for this benchmark"


async def _echo(body: bytes) -> bytes:
    return body


async def _serve_channel(pipe: Connection) -> None:
    server = ChannelServer({"echo": _echo}, _SECRET)
    pipe.send((await server.start())[1])
    await asyncio.to_thread(pipe.recv)
    await server.stop()


async def _serve_streams(pipe: Connection) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while header := await reader.read(4):
            body = await reader.readexactly(int.from_bytes(header, "big"))
            writer.writelines((header, body))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.to_thread(pipe.recv)
    server.close()


async def _serve_zmq(pipe: Connection) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))

        async def answer() -> None:
            while True:
                await router.send_multipart(await router.recv_multipart())

        answering = asyncio.create_task(answer())
        await asyncio.to_thread(pipe.recv)
        answering.cancel()
        await asyncio.wait([answering])


async def _call_channel(port: int, measure: Callable[[Call], Awaitable[list[float]]]) -> list[float]:
    client = ChannelClient("127.0.0.1", port, _SECRET)
    await client.connect()
    try:
        return await measure(lambda body: client.call("echo", body, 10.0))
    finally:
        await client.close()


async def _call_streams(port: int, measure: Callable[[Call], Awaitable[list[float]]]) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def call(body: bytes) -> bytes:
        writer.writelines((len(body).to_bytes(4, "big"), body))
        await writer.drain()
        return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))

    try:
        return await measure(call)
    finally:
        writer.close()
        await writer.wait_closed()


async def _call_zmq(port: int, measure: Callable[[Call], Awaitable[list[float]]]) -> list[float]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port}")

        async def call(body: bytes) -> bytes:
            await dealer.send(body)
            async with asyncio.timeout(10.0):
                answer: bytes = await dealer.recv()
                return answer

        return await measure(call)


_WAYS = {
    "this channel": (_serve_channel, _call_channel),
    "asyncio streams, bare": (_serve_streams, _call_streams),
    "pyzmq DEALER/ROUTER": (_serve_zmq, _call_zmq),
}


def _serve(way: str, pipe: Connection) -> None:
    asyncio.run(_WAYS[way][0](pipe))


def round_trips_s(way: str, num_calls: int, num_bytes: int) -> list[float]:
    """The sorted durations of `num_calls` echoes of `num_bytes`, after a warm-up. Units: seconds."""

    async def measure(call: Call) -> list[float]:
        body = bytes(num_bytes)
        durations = []
        for number in range(num_calls + 100):
            begin = time.perf_counter()
            answer = await call(body)
            durations.append(time.perf_counter() - begin)
            if len(answer) != num_bytes:
                raise RuntimeError(f"{way}: call {number} came back with {len(answer)} bytes")
        return sorted(durations[100:])

    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(way, theirs))
    process.start()
    try:
        return asyncio.run(_WAYS[way][1](ours.recv(), measure))
    finally:
        ours.send(None)
        process.join()


def main() -> None:
    """Prints the table."""
    num_calls, num_bytes = [int(argument) for argument in sys.argv[1:]] or [2000, 65536]
    print(f"| echo of {num_bytes} bytes, {num_calls} calls | p50 ms | p99 ms |\n|---|---|---|")
    for way in _WAYS:
        durations = round_trips_s(way, num_calls, num_bytes)
        p50, p99 = durations[len(durations) // 2] * 1e3, durations[len(durations) * 99 // 100] * 1e3
        print(f"| {way} | {p50:.3f} | {p99:.3f} |", flush=True)


if __name__ == "__main__":
    main()
