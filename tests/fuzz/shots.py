"""Requests as bytes: any body, in any wrapping that a client, a proxy or an attacker may choose."""

from random import Random

from .bodies import encoded, spoilt_body, tokenizing_body, valid_body
from .visiting import Manner, Shot

ROUTES = {True: "/v1/chat/completions", False: "/v1/completions"}
_PATHS = (
    "/",
    "//",
    "/v1",
    "/v1/",
    "/v1/models",
    "/v1/models/",
    "/v1/models/specserve-embedded",
    "/v1/models/none",
    "/v1/models/%2e%2e/%2e%2e/etc",
    "/v1/models/%00",
    "/v1/models/%ff%fe",
    "/%ff",
    "/v1/completions/",
    "//v1/completions",
    "/V1/COMPLETIONS",
    "/v1/completions?a=b",
    "/v1/completions#x",
    "/v1/completions;x",
    "/%76%31/models",
    "/metrics",
    "/metrics?name[]=x",
    "/health",
    "/ready",
    "/version",
    "/tokenize",
    "/detokenize",
    "/docs",
    "/openapi.json",
    "/admin/v1/state",
    "/.git/config",
    "/v1/models/" + "a" * 4000,
    "/v1/chat/completions",
)
_METHODS = ("GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "POST")
_TYPES = (
    "application/json",
    "application/json; charset=utf-16",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "multipart/form-data",
    "application/octet-stream",
    "",
    "\xff",
    "application/xml",
)
_HEADERS = (
    "X-Request-Id: abc",
    "X-Request-Id: " + "a" * 500,
    "X-Request-Id: \xe9",
    "Authorization: Bearer x",
    "Authorization: \xff",
    "traceparent: 00-x-y-z",
    "Accept: text/event-stream",
    "Accept-Encoding: gzip, br",
    "Content-Encoding: gzip",
    "Expect: 100-continue",
    "X-Forwarded-For: 1.2.3.4",
    "Accept: \xff/\xff;q=x",
    "X: " + "y" * 9000,
    "Cookie: a=b",
    "Origin: http://a.example",
    "Range: bytes=0-1",
    "If-Match: \xb2",
)
_MALFORMED = (
    b"GET http://a.example/v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n{}",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT a.example:80 HTTP/1.1\r\nHost: a.example\r\n\r\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 3000 + b"\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: "
    b"dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
)


def request(
    method: str,
    path: str,
    body: bytes = b"",
    *headers: str,
    content_type: str = "application/json",
    connection: str = "close",
) -> bytes:
    """Return an HTTP/1.1 request; by default its answer ends the connection."""
    stated = [f"Content-Length: {len(body)}"] if body else []
    head = (
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Content-Type: {content_type}",
        f"Connection: {connection}",
        *stated,
        *headers,
    )
    return "\r\n".join((*head, "", "")).encode("latin-1") + body


def chunked(method: str, path: str, body: bytes, rng: Random) -> bytes:
    """Return the same in chunks of random sizes."""
    head = (
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        "Connection: close",
        "Transfer-Encoding: chunked",
    )
    sent = "\r\n".join((*head, "", "")).encode()
    while body:
        size = rng.choice((1, 3, 100, 5000))
        sent += f"{len(body[:size]):x}{rng.choice(('', ';x=y'))}\r\n".encode() + body[:size] + b"\r\n"
        body = body[size:]
    return sent + b"0\r\n\r\n"


def good_shot(rng: Random, manner: Manner = "stay") -> Shot:
    """Return a generation request that must be served, in full or as far as its client stays."""
    chat = rng.random() < 0.5
    body = encoded(valid_body(rng, chat))
    sent = chunked("POST", ROUTES[chat], body, rng) if rng.random() < 0.2 else request("POST", ROUTES[chat], body)
    leave_after = rng.choice((0, 0, 1, 200, 700, 2000, 6000)) if manner == "leave" else 0
    return Shot(f"valid, {manner}", sent, manner, leave_after, valid=True)


def any_shot(rng: Random) -> Shot:
    """Return a request of any kind."""
    draw = rng.random()
    if draw < 0.4:
        return good_shot(rng, rng.choice(("stay", "stay", "stay", "slow", "half_close", "leave", "leave", "leave")))
    if draw < 0.7:
        chat = rng.random() < 0.5
        return Shot("spoilt", request("POST", ROUTES[chat], encoded(spoilt_body(rng, chat))))
    if draw < 0.76:
        path, body = tokenizing_body(rng)
        return Shot("tokenize", request("POST", path, encoded(body)))
    if draw < 0.86:
        path, body_bytes = rng.choice(_PATHS), rng.choice((b"", b"", b"{}", b"x"))
        headers = rng.sample(_HEADERS, rng.randrange(3))
        return Shot("path", request(rng.choice(_METHODS), path, body_bytes, *headers))
    if draw < 0.9:
        return Shot("malformed", rng.choice(_MALFORMED), "half_close", malformed=True)
    return _wrapped(rng)


def _wrapped(rng: Random) -> Shot:
    """Return a valid request in a wrapping that may spoil it."""
    chat = rng.random() < 0.5
    path, text = ROUTES[chat], encoded(valid_body(rng, chat))
    draw = rng.randrange(7)
    if draw == 0:
        cut = rng.randrange(len(text))
        return Shot("truncated JSON", request("POST", path, text[:cut] or b" "))
    if draw == 1:
        whole = request("POST", path, text)
        return Shot("truncated body", whole[: -rng.randint(1, len(text))], "half_close", malformed=True)
    if draw == 2:
        return Shot("content type", request("POST", path, text, content_type=rng.choice(_TYPES)))
    if draw == 3:
        odd = (
            b"\xef\xbb\xbf" + text,
            text.decode().encode("utf-16"),
            text + b"\xff",
            text + b"}",
            b"\xff" * 20,
            b"[]",
            b'"x"',
            b"null",
            b"1",
            text.replace(b"{", b'{"model":1,', 1),
            b"[" * 200_000,
            b"{" * 5000,
        )
        return Shot("encoding", request("POST", path, rng.choice(odd)))
    if draw == 4:
        return Shot("headers", request("POST", path, text, *rng.sample(_HEADERS, rng.randint(1, 4))))
    if draw == 5:
        return Shot("in chunks", chunked("POST", path, text, rng), rng.choice(("stay", "slow")))
    large = (
        b'{"model": "specserve-embedded", "prompt": "' + b"x y" * rng.choice((100_000, 1_390_000, 1_500_000)) + b'"}'
    )
    return Shot("large", request("POST", path, large, connection="keep-alive"), keep_alive=True)
