"""Any way to split a stream gives the same events, each with the time of the read that completed it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenno.load import sse
from fenno.load.sse import BadResponse, Response

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
LINES = st.sampled_from([b"data: one", b"data:two", b"data: {}", b"data", b": comment", b"event: error", b"id: 7", b"data: 0"])
BLOCKS = st.lists(st.lists(LINES, min_size=0, max_size=4), max_size=8)


def expected(blocks: list[list[bytes]]) -> list[tuple[bytes, bytes]]:
    """Names and data by the standard, a line at a time: written apart from the parser."""
    found = []
    for block in blocks:
        name, data = b"", []
        for line in block:
            if line.startswith(b"event:"):
                name = line[6:].lstrip()
            elif line.startswith(b"data"):
                value = line[5:]
                data.append(value[1:] if value.startswith(b" ") else value)
        if data:
            found.append((name, b"\n".join(data)))
    return found


def chunked(body: bytes, cuts: list[int]) -> bytes:
    places = sorted({c % (len(body) + 1) for c in cuts} | {0, len(body)})
    parts = [body[a:b] for a, b in itertools.pairwise(places)]
    return b"".join(b"%x;note=1\r\n%s\r\n" % (len(p), p) for p in parts if p) + b"0\r\nTrailer: x\r\n\r\n"


def feed(wire: bytes, cuts: list[int]) -> tuple[Response, list[int]]:
    """A response fed in pieces; the time of a piece is the offset of its end in the wire."""
    response = Response()
    places = sorted({c % (len(wire) + 1) for c in cuts} | {0, len(wire)})
    for start, end in itertools.pairwise(places):
        assert not response.complete, "complete before its last byte"
        response.feed(float(end), wire[start:end])
    return response, places


@settings(max_examples=120)
@given(
    BLOCKS,
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.booleans(),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.lists(st.integers(0, 10_000), max_size=30),
)
def test_any_split_gives_the_same_events(
    blocks: list[list[bytes]], end: bytes, bom: bool, chunk_cuts: list[int], cuts: list[int]
) -> None:
    body = (b"\xef\xbb\xbf" if bom else b"") + b"".join(b"".join(line + end for line in block) + end for block in blocks)
    for head, wire in (
        (b"Transfer-Encoding: chunked\r\n\r\n", chunked(body, chunk_cuts)),
        (b"Content-Length: %d\r\n\r\n" % len(body), body),
    ):
        response, _ = feed(HEAD + head + wire, cuts)
        assert response.complete
        assert response.reusable
        assert response.status == 200
        assert [(event.name, event.data) for event in sse.events(response.body)] == expected(blocks)


@settings(max_examples=80)
@given(st.lists(st.binary(min_size=0, max_size=30).map(lambda b: b.hex().encode()), min_size=1, max_size=10), st.data())
def test_an_event_has_the_time_of_the_read_that_completed_it(payloads: list[bytes], data: st.DataObject) -> None:
    wire, ends = HEAD + b"Transfer-Encoding: chunked\r\n\r\n", []
    for payload in payloads:
        event = b"data: " + payload + b"\n\n"
        wire += b"%x\r\n" % len(event) + event
        ends.append(len(wire))  # the offset just behind the event's last byte
        wire += b"\r\n"
    wire += b"0\r\n\r\n"
    response, places = feed(wire, data.draw(st.lists(st.integers(0, len(wire)), max_size=30)))
    right = [min(place for place in places if place >= end) for end in ends]
    assert [event.time for event in sse.events(response.body)] == right
    assert [event.data for event in sse.events(response.body)] == payloads


def test_two_responses_on_one_connection_are_told_apart_to_the_byte() -> None:
    first = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b"data: a\n\n", [])
    response = Response()
    assert response.feed(1.0, first + b"HTTP/1.1 500")
    assert response.surplus == b"HTTP/1.1 500"
    assert not response.reusable


def test_a_payload_that_looks_like_the_end_is_no_end() -> None:
    body = b"data: x\r\n0\r\n\r\n"
    response = Response()
    wire = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % len(body) + body
    assert not response.feed(1.0, wire)
    assert response.feed(2.0, b"\r\n0\r\n\r\n")


def test_a_body_without_length_ends_with_the_connection() -> None:
    response = Response()
    assert not response.feed(1.0, HEAD + b"\r\ndata: a\n\n")
    assert response.closed()
    assert not response.reusable
    assert [event.data for event in sse.events(response.body)] == [b"a"]


def test_a_chunked_body_does_not_end_with_the_connection() -> None:
    response = Response()
    response.feed(1.0, HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata")
    assert not response.closed()


def test_an_interim_response_is_passed_over() -> None:
    response = Response()
    assert response.feed(1.0, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n")
    assert response.status == 204


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "not an HTTP/1.1 response"),
        (b"<html>", "not an HTTP/1.1 response"),
        (b"HTTP/1.1 abc\r\n\r\n", "not an HTTP/1.1 response"),
        (b"HTTP/1.1 200 OK\r\nbroken\r\n\r\n", "is no header"),
        (HEAD + b"Content-Length: ten\r\n\r\n", "Content-Length is 'ten'"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "is no chunk size"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", "is no chunk size"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n", "longer than its size"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, "longer than 64 KiB"),
    ],
)
def test_what_is_no_response_is_named(wire: bytes, words: str) -> None:
    with pytest.raises(BadResponse, match=words):
        Response().feed(1.0, wire)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"data: a\rdata: b\n\n", [b"a\nb"]),
        (b"data: a\n\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\n\ndata: unfinished\n", [b"a"]),
        (b"data:  two spaces\n\n", [b" two spaces"]),
        (b"retry: 10\n\n", []),
        (b"", []),
    ],
)
def test_corners_of_the_standard(body: bytes, found: list[bytes]) -> None:
    assert [event.data for event in sse.events([(1.0, body)])] == found
