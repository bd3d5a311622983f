"""Carries outputs from the backend's streams to the client, and cancels them when the client is gone."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from specserve.service.errors import EngineStoppedError, PromptTooLongError
from specserve.service.requests import GenerationRequest, StepOutput

from .backend import Backend, RequestStream
from .errors import describe
from .reply import Reply

SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEP_ALIVE = ": keep-alive\n\n"
CLIENT_GONE = 499
_log = logging.getLogger(__name__)


def submit_all(backend: Backend, requests: Sequence[GenerationRequest], param: str) -> list[RequestStream]:
    """Return the streams of all requests, or of none: when one is refused, those before it are cancelled."""
    streams: list[RequestStream] = []
    try:
        for request in requests:
            streams.append(backend.submit(request))
    except PromptTooLongError as error:
        _cancel(streams)
        raise PromptTooLongError(error.message, param, error.code) from error
    except Exception:
        _cancel(streams)
        raise
    return streams


async def answer_whole(
    request: Request, reply: Reply, streams: Sequence[RequestStream], on_end: Callable[[], None]
) -> Response:
    """Return the finished response; when the client leaves before, its requests are cancelled at once."""
    work = asyncio.create_task(_collect(reply, streams))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=CLIENT_GONE)
        await work
        return JSONResponse(reply.whole())
    finally:
        _cancel_unfinished(reply, streams)
        on_end()
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events of one reply. However the response ends, unfinished requests are cancelled then.

    An error before the first byte is raised, and so answered with its status; later it becomes the last event, and
    there is no `[DONE]` after it.
    """

    def __init__(
        self, reply: Reply, streams: Sequence[RequestStream], keep_alive_s: float, on_end: Callable[[], None]
    ) -> None:
        self._on_end = on_end
        self._reply = reply
        self._streams = streams
        self._keep_alive_s = keep_alive_s
        self._frames = frames(reply, streams)
        super().__init__(self._frames, headers=SSE_HEADERS, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, whether the client stays or not."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel_unfinished(self._reply, self._streams)
            self._on_end()
            await self._frames.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send the events, and a comment line whenever there was none for a while."""
        line = _Line(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keeping = asyncio.create_task(line.keep_alive(self._keep_alive_s))
        try:
            async for frame in self._frames:
                await line.send(frame)
        except Exception as error:
            if not line.started:
                raise
            status, body = describe(error)
            _log.error("stream %s failed with status %d", self._reply.response_id, status, exc_info=error)
            await line.send(_frame(body))
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Line:
    """The way to one client: the response starts with the first thing said."""

    def __init__(self, send: Send, head: Message) -> None:
        self._send = send
        self._head = head
        self._said_s = asyncio.get_running_loop().time()
        self.started = False

    async def send(self, text: str) -> None:
        """Send one frame."""
        self._said_s = asyncio.get_running_loop().time()
        if not self.started:
            self.started = True
            await self._send(self._head)
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def keep_alive(self, silence_s: float) -> None:
        """Send a comment line after every `silence_s` seconds in which nothing was sent, for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            left_s = self._said_s + silence_s - clock()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self.send(KEEP_ALIVE)


async def frames(reply: Reply, streams: Sequence[RequestStream]) -> AsyncGenerator[str]:
    """Yield the frames of a reply: one for every round of a choice that shows something, the usage, the end."""
    async with aclosing(merged(streams)) as outputs:
        async for index, output in outputs:
            chunk = reply.chunk(index, output)
            if chunk is not None:
                yield _frame(chunk)
    if reply.include_usage:
        yield _frame(reply.usage_chunk())
    yield "data: [DONE]\n\n"


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, StepOutput]]:
    """Yield the outputs of all streams as they come, each with its stream's index, until all are finished."""
    arrived: asyncio.Queue[tuple[int, StepOutput | Exception]] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(index, stream, arrived)) for index, stream in enumerate(streams)]
    unfinished = len(streams)
    try:
        while unfinished:
            index, output = await arrived.get()
            if isinstance(output, Exception):
                raise output
            unfinished -= output.finish_reason is not None
            yield index, output
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, stream: RequestStream, arrived: asyncio.Queue[tuple[int, StepOutput | Exception]]) -> None:
    try:
        async for output in stream:
            arrived.put_nowait((index, output))
            if output.finish_reason is not None:
                return
    except Exception as error:
        arrived.put_nowait((index, error))
        return
    arrived.put_nowait((index, EngineStoppedError("the engine ended the request without a finish reason")))


async def _collect(reply: Reply, streams: Sequence[RequestStream]) -> None:
    async with aclosing(merged(streams)) as outputs:
        async for index, output in outputs:
            reply.add(index, output)


async def _disconnected(request: Request) -> None:
    """Return when the client has gone; the body is read already, so nothing else can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cancel_unfinished(reply: Reply, streams: Sequence[RequestStream]) -> None:
    _cancel([s for s, choice in zip(streams, reply.choices, strict=True) if choice.finish_reason is None])


def _cancel(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.cancel()


def _frame(body: dict[str, object]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"
