"""Recorded exchanges: what a server sent is read the same however the network cut it up."""

import asyncio

import pytest

from specserve.load.errors import LoadError
from specserve.load.stream import event_text, parse_event, read_sample
from specserve.load.wire import Piece, exchange, lines, parse_url, read_answer, request_bytes

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = HEAD + b"4\r\nda\nt\r\n5;note=1\r\na\r\nb\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(CHUNKED)])
def test_chunks_are_undone_however_they_arrive(size: int) -> None:
    received = [(float(start), CHUNKED[start : start + size]) for start in range(0, len(CHUNKED), size)]
    answer = read_answer(received)
    assert (answer.status, answer.body) == (200, b"da\nta\r\nb\n")
    assert [line for _, line in lines(answer.pieces)] == [b"da", b"ta", b"b"]


def test_a_line_has_the_time_of_its_end() -> None:
    pieces: list[Piece] = [(1.0, b"a"), (2.0, b"b\nc"), (3.0, b"\n"), (4.0, b"rest")]
    assert list(lines(pieces)) == [(2.0, b"ab"), (3.0, b"c"), (4.0, b"rest")]


def test_an_unchunked_body_is_taken_as_it_is() -> None:
    assert read_answer([(0.0, b"HTTP/1.0 404 No\r\n\r\n{}")]).body == b"{}"


@pytest.mark.parametrize("received", [[], [(0.0, b"HTTP/1.1 200")], [(0.0, b"SSH-2.0\r\n\r\n")]])
def test_what_is_no_answer_is_said_so(received: list[Piece]) -> None:
    with pytest.raises(LoadError):
        read_answer(received)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(LoadError, match="looks like"):
        parse_url(url)


def test_an_address_may_have_a_path_and_no_port() -> None:
    origin = parse_url("https://host/base/")
    assert (origin.port, origin.encrypted, origin.url) == (443, True, "https://host:443/base")
    assert request_bytes(origin, "GET", "/v1/models").startswith(b"GET /base/v1/models HTTP/1.1\r\nHost: host:443")


def test_no_server_is_said_plainly() -> None:
    with pytest.raises(LoadError, match="No server answers"):
        asyncio.run(exchange(parse_url("http://127.0.0.1:9"), b"", 5.0))


def test_events_are_read_and_everything_else_is_skipped() -> None:
    assert parse_event(b"") is None
    assert parse_event(b": keep-alive") is None
    assert parse_event(b"data: [DONE]") is None
    assert parse_event(b'data: {"choices": []}') == {"choices": []}
    with pytest.raises(LoadError, match="lost"):
        parse_event(b'data: {"error": {"message": "lost"}}')
    with pytest.raises(LoadError, match="middle of an event"):
        parse_event(b'data: {"choi')


def test_text_is_found_in_chunks_of_both_endpoints() -> None:
    assert event_text({"choices": [{"delta": {"content": "a"}}]}) == "a"
    assert event_text({"choices": [{"text": "b"}]}) == "b"
    assert event_text({"choices": [{"delta": {"content": None}}]}) == ""
    assert event_text({"choices": []}) == ""


def test_a_stream_without_usage_cannot_be_counted() -> None:
    with pytest.raises(LoadError, match="usage"):
        read_sample([(0.1, b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\n')])
