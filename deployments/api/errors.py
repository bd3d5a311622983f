"""The one place where an exception becomes an HTTP status and an OpenAI error body."""

import logging
import math
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specserve.service.errors import (
    BadRequestError,
    ChannelError,
    EngineStoppedError,
    ForbiddenError,
    ModelNotFoundError,
    OverloadedError,
    PromptTooLongError,
    ProposerUnavailableError,
    QuotaExceededError,
    RoundLostError,
    StoreUnavailableError,
    UnauthenticatedError,
    VersionConflictError,
)

Body = dict[str, Any]
_UNAVAILABLE: dict[type[Exception], str] = {
    EngineStoppedError: "engine_stopped",
    RoundLostError: "round_lost",
    ProposerUnavailableError: "proposer_unavailable",
    ChannelError: "channel_lost",
    StoreUnavailableError: "store_unavailable",
}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 503: "not_ready"}
_log = logging.getLogger(__name__)


def describe(error: Exception) -> tuple[int, Body]:
    """Return the HTTP status and the error body of any exception; an unforeseen one tells the client nothing."""
    if isinstance(error, ModelNotFoundError):
        return 404, error_body(error.message, "invalid_request_error", error.param, error.code or "model_not_found")
    if isinstance(error, PromptTooLongError):
        too_long = error.code or "context_length_exceeded"
        return 400, error_body(error.message, "invalid_request_error", error.param, too_long)
    if isinstance(error, VersionConflictError):
        return 412, error_body(error.message, "invalid_request_error", "If-Match", "version_conflict")
    if isinstance(error, BadRequestError) and (error.code or "").endswith("_not_found"):
        return 404, error_body(error.message, "invalid_request_error", error.param, error.code)
    if isinstance(error, BadRequestError):
        return 400, error_body(error.message, "invalid_request_error", error.param, error.code)
    if isinstance(error, RequestValidationError):
        return 400, _invalid(error)
    if isinstance(error, UnauthenticatedError):
        return 401, error_body(error.message, "invalid_request_error", None, error.code)
    if isinstance(error, ForbiddenError):
        return 403, error_body(error.message, "permission_error", error.param, error.code)
    if isinstance(error, QuotaExceededError):
        return 429, error_body(error.message, "rate_limit_error", None, error.code)
    if isinstance(error, OverloadedError):
        return 503, error_body(error.message, "server_error", None, "overloaded")
    if isinstance(error, HTTPException):
        code = _HTTP_CODES.get(error.status_code)
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return error.status_code, error_body(str(error.detail), kind, None, code)
    for unavailable, reason in _UNAVAILABLE.items():
        if isinstance(error, unavailable):
            return 503, error_body(str(error.args[0]), "server_error", None, reason)
    return 500, error_body("the server failed on this request", "server_error", None, "internal_error")


def error_body(message: str, kind: str, param: str | None, code: str | None) -> Body:
    """Return OpenAI's error object; all four keys are always there. What a client sent may be no text."""
    field = None if param is None else _sayable(param)
    return {"error": {"message": _sayable(message), "type": kind, "param": field, "code": code}}


def _sayable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Answer any exception that ends a request before its first byte.

    An unforeseen one is answered outside of our middleware, so what that adds to answers is added here.
    """
    response = refusal(error)
    if response.status_code == 500:
        _log.error("request failed", exc_info=error)
        response.headers["x-request-id"] = getattr(request.state, "request_id", "unknown")
        response.headers.update(getattr(request.state, "limit_headers", dict)())
    return response


def refusal(error: Exception) -> JSONResponse:
    """Return the answer to a request that `error` ends, with what tells a client whether and when to try again."""
    status, body = describe(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, UnauthenticatedError):
        known = ', error="invalid_token"' if error.code != "missing_api_key" else ""
        headers["WWW-Authenticate"] = f'Bearer realm="specserve"{known}'
    if status == 500 or (isinstance(error, QuotaExceededError) and error.retry_after_s is None):
        headers["x-should-retry"] = "false"  # or the openai client runs into the same refusal twice more
    elif status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(getattr(error, "retry_after_s", 1))))
    return JSONResponse(body, status, headers)


def _invalid(error: RequestValidationError) -> Body:
    """Name the first field at fault; of the complaints of a union's branches the one that got furthest."""
    first, *others = error.errors()
    if first["type"] == "json_invalid":
        return error_body("the body is not valid JSON", "invalid_request_error", None, "invalid_json")
    rivals = [other for other in others if other["loc"][:2] == first["loc"][:2]]
    first = max([first, *rivals], key=lambda complaint: len(complaint["loc"]))
    param = field_name(first["loc"][1:], error.body, first["type"] == "missing")
    message = str(first["msg"]).removeprefix("Value error, ")
    return error_body(f"{param or 'body'}: {message}", "invalid_request_error", param, None)


def field_name(location: Sequence[int | str], body: object, missing: bool) -> str | None:
    """Return the dotted name of a field from pydantic's location, without the names of union branches in it."""
    names: list[str] = []
    for place, key in enumerate(location):
        there = key in body if isinstance(body, dict) else isinstance(body, list) and isinstance(key, int)
        if there or (missing and place == len(location) - 1):
            names.append(str(key))
        if there:
            body = body[key]  # type: ignore[index]
    return ".".join(names) or None
