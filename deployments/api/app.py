"""The OpenAI surface of one model. It knows a `Backend` and HTTP, and no Ray."""

import logging
import secrets
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from specserve.service.errors import ModelNotFoundError, SpecserveError
from specserve.service.requests import GenerationRequest

from .access import AccessMiddleware
from .answering import EventStream, answer_whole, submit_all
from .backend import Backend
from .counting import CountingMiddleware
from .errors import answer_error
from .exposition import Exposition
from .gate import Asked, Gate, Gatekeeper
from .limits import check_body, num_chars
from .reading import read
from .reply import VERSION, Reply
from .request_id import RequestIdMiddleware
from .schemas import ChatCompletionRequest, CommonRequest, CompletionRequest
from .structured import held_to, response_schema, schema_grammar
from .tokenizing import add_tokenizing
from .translate import asked_tools, chat_requests, completion_echoes, completion_requests
from .watching import begin_watch, watched

MAX_WARNED_NAMES = 1000
_log = logging.getLogger(__name__)


def build_api(backend: Backend, gate: Gatekeeper | None = None, *, named_in_front: bool = False) -> FastAPI:
    """Return the app that serves `backend` to those whom `gate` lets in: everyone, when there is none.

    `named_in_front`: whoever stands before the app puts `x-request-id` on its answers.
    """
    gate = gate if gate is not None else Gate()
    app = FastAPI(title="specserve", version=VERSION, docs_url=None, redoc_url=None, strict_content_type=False)
    app.add_middleware(AccessMiddleware, gate=gate)
    app.add_middleware(CountingMiddleware, backend=backend)
    app.add_middleware(RequestIdMiddleware, named_in_front=named_in_front)
    for kind in (RequestValidationError, HTTPException, SpecserveError, Exception):
        app.add_exception_handler(kind, answer_error)
    _add_generation(app, backend, gate)
    _add_facts(app, backend)
    _add_metrics(app, backend)
    add_tokenizing(app, backend)
    return app


def _add_generation(app: FastAPI, backend: Backend, gate: Gatekeeper) -> None:
    warned: set[str] = set()

    async def answer(
        request: Request,
        body: CommonRequest,
        reply: Reply,
        requests: list[GenerationRequest],
        echoes: Sequence[str] = (),
    ) -> Response:
        schema = response_schema(body.response_format)
        if schema is not None:
            requests = await held_to(partial(schema_grammar, schema), "response_format", backend, requests)
        param = "messages" if reply.chat else "prompt"
        open_ended = body.max_tokens is None and body.max_completion_tokens is None
        asked = Asked(requests, body.service_tier, reply.num_choices, open_ended, param)
        admitted = gate.admit(request.state.principal, asked, backend.load)
        request.state.downgrade = admitted.downgrade
        reply.expect(admitted.requests, echoes)
        watch = begin_watch(request.headers, reply, admitted.requests, backend.observers)
        try:
            streams = watched(submit_all(backend, admitted.requests, param), watch)
        except Exception:
            gate.settle(admitted.lease, 0)
            raise

        def settle() -> None:
            gate.settle(admitted.lease, reply.num_tokens)

        if body.stream:
            return EventStream(reply, streams, backend.style.keep_alive_s, settle)
        return await answer_whole(request, reply, streams, settle)

    def begin(body: CommonRequest, prefix: str) -> Reply:
        if not backend.ready:
            raise HTTPException(503, "the model is not ready")
        gate.check_queue(backend.load)
        check_body(body, gate.limits, backend.max_model_len)
        _warn_unknown(body, warned)
        options = body.stream_options
        return Reply(
            chat=isinstance(body, ChatCompletionRequest),
            response_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=backend.model_id,
            tokenizer=backend.tokenizer,
            num_choices=body.n or 1,
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            count_rejected_predictions=backend.style.count_rejected_predictions,
        )

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        reply = begin(body, "cmpl")
        work = partial(completion_requests, body, backend, reply.response_id, secrets.randbits(63))
        requests = await read(num_chars(body), work)
        return await answer(request, body, reply, requests, completion_echoes(body, backend))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
        reply = begin(body, "chatcmpl")
        work = partial(chat_requests, body, backend, reply.response_id, secrets.randbits(63))
        requests = await read(num_chars(body), work)
        box = asked_tools(body, backend)
        reply.reads_calls = box is not None
        if box is not None and box.demanded:
            requests = await held_to(box.grammar, "tools", backend, requests)
        return await answer(request, body, reply, requests)


def _add_facts(app: FastAPI, backend: Backend) -> None:
    def card() -> dict[str, Any]:
        return {
            "id": backend.model_id,
            "object": "model",
            "created": backend.created,
            "owned_by": "specserve",
            "root": backend.model_id,
            "parent": None,
            "max_model_len": backend.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        if model_id != backend.model_id:
            raise ModelNotFoundError(f"the model {model_id!r} is not served here", "model", "model_not_found")
        return card()

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> dict[str, str]:
        if not backend.ready:
            raise HTTPException(503, "the model is not ready")
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str | None]:
        about = {name: getattr(backend, name, None) for name in ("dtype", "placement")}
        return {"version": VERSION, "model": getattr(backend, "model_id", None), **about}


def _add_metrics(app: FastAPI, backend: Backend) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        known = getattr(backend, "cells", None)
        exposition = Exposition([] if known is None else await known())
        body, content_type = exposition.encoded(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


def _warn_unknown(body: CommonRequest, warned: set[str]) -> None:
    for name in sorted(body.model_extra or {}):
        if name not in warned and len(warned) < MAX_WARNED_NAMES:
            warned.add(name)
            _log.warning("ignoring the unknown request field %.80r", name)
