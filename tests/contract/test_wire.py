# SPDX-License-Identifier: Apache-2.0
"""The wire with socket servers: its requests, its responses, and its errors."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from swansong_bucket.errors import Permanent, Transient
from swansong_bucket.stores.base import WINDOW_BYTES, Body
from swansong_bucket.stores.http import pool
from swansong_bucket.stores.http.client import Response, Wire

from testkit.bodies import CountedSink, torn
from testkit.forked import peak_bytes
from testkit.raw_server import Peer, RawServer, Request, Script, answering, certificate
from testkit.waiting import Clock, until

CONTENT = os.urandom(2 * WINDOW_BYTES + 12_345)
Fails = pytest.raises(Transient)


class Endless(Body):
    """A large body in the memory of one window."""

    def __init__(self) -> None:
        super().__init__(bytes(WINDOW_BYTES))
        self.size_bytes = 2**40

    def next_window(self) -> memoryview:
        return self.data


class Place:
    """Starts servers and wires of one kind, and stops them at the end."""

    def __init__(self, stack: ExitStack, pem: Path | None) -> None:
        self.pem = pem
        self._stack = stack

    def server(self, script: Script) -> RawServer:
        return self._stack.enter_context(RawServer(script, self.pem))

    def wire(self, server: RawServer, **options: Any) -> Wire:
        options = {"connections": 8, "stall_s": 5.0, **options}
        wire = Wire(server.url, ca_bundle=str(self.pem) if self.pem else None, **options)
        self._stack.callback(wire.close)
        return wire

    def both(self, script: Script, **options: Any) -> tuple[RawServer, Wire]:
        server = self.server(script)
        return server, self.wire(server, **options)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def plain() -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(stack, None)


@pytest.fixture(params=["plain", "tls"])
def place(request: pytest.FixtureRequest, pem: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(stack, pem if request.param == "tls" else None)


def saying(raw: bytes, *, waits: bool = False) -> Script:
    """Send these bytes to one request, then close, or wait until the client does."""

    def script(peer: Peer) -> None:
        if peer.request() is not None:
            peer.send(raw)
            if waits:
                peer.wait_for_end()

    return script


def put(wire: Wire, content: bytes = CONTENT, **options: Any) -> Response:
    return wire.request("PUT", "/bucket/key", {}, body=Body(content), **options)


def get(wire: Wire, sink: Any = None, **headers: str) -> Response:
    return wire.request("GET", "/bucket/key", headers, sink=sink)


class Running:
    """A request in a thread; ``error`` is its exception."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize("size_bytes", [0, 1, WINDOW_BYTES, WINDOW_BYTES + 1, len(CONTENT)])
def test_a_body_arrives_as_it_is(place: Place, size_bytes: int) -> None:
    """The server gets exactly the body with its length."""
    seen: list[Request] = []
    _, wire = place.both(answering(200, b"", "ETag: mine", seen=seen))
    content = CONTENT[:size_bytes]
    answer = put(wire, content)
    assert (answer.status, answer.body, answer.headers["etag"]) == (200, b"", "mine")
    (request,) = seen
    assert request.line == "PUT /bucket/key HTTP/1.1"
    assert request.header("content-length") == str(size_bytes)
    assert request.header("host") == wire.host
    assert request.body == content


@pytest.mark.parametrize(
    ("size_bytes", "is_joined"), [(0, True), (2**16, True), (2**16 + 1, False)]
)
def test_a_small_body_is_sent_with_its_head(
    plain: Place, monkeypatch: pytest.MonkeyPatch, size_bytes: int, is_joined: bool
) -> None:
    """A small body and its head are one write; a large body is sent from the caller's memory."""
    sent: list[bytes | memoryview] = []
    send, here = pool.HttpConnection.send, threading.get_ident()

    def recorded(connection: pool.HttpConnection, data: bytes | memoryview) -> None:
        if threading.get_ident() == here:  # and not a thread that an earlier test has left
            sent.append(data)
        send(connection, data)

    monkeypatch.setattr(pool.HttpConnection, "send", recorded)
    _, wire = plain.both(answering(200))
    content = CONTENT[:size_bytes]
    put(wire, content)
    if is_joined:
        (only,) = sent
        assert bytes(only).endswith(b"\r\n\r\n" + content)
    else:
        _, *windows = sent
        assert b"".join(windows) == content
        assert all(isinstance(one, memoryview) and one.obj is content for one in windows)


def test_no_line_break_gets_into_a_head(plain: Place) -> None:
    """A header or a target cannot inject another header."""
    server, wire = plain.both(answering(200))
    for target, value in (("/a\r\nX: 1", "y"), ("/a", "y\r\nX: 1"), ("/a", "y\nX: 1")):
        with pytest.raises(ValueError, match="line break"):
            wire.request("GET", target, {"x": value})
    with pytest.raises(Permanent):
        wire.request("GET", "/a", {"x": "y" * 2**15})
    assert server.accepted == 0


# ---------------------------------------------------------------- what is received


def test_a_range_goes_to_the_sink(place: Place) -> None:
    """A 206 with exactly the requested range goes to the sink, in windows, after a rewind."""
    sink = CountedSink()
    server, wire = place.both(
        answering(206, CONTENT, f"Content-Range: bytes 5-{len(CONTENT) + 4}/9999999")
    )
    for _ in range(2):
        answer = get(wire, sink, Range=f"bytes=5-{len(CONTENT) + 4}")
        assert (answer.status, answer.body) == (206, b"")
        assert sink.data == CONTENT
    assert sink.passes == 2
    assert server.accepted == 1


@pytest.mark.parametrize(
    "answer",
    [
        (200, CONTENT),
        (206, CONTENT),
        (206, CONTENT, "Content-Range: bytes 0-9/100"),
        (206, CONTENT, "Content-Range: bytes 1-100/200"),
        (206, b"", "Content-Range: bytes 0-9/100"),
    ],
)
def test_no_other_bytes_get_to_the_sink(plain: Place, answer: tuple[Any, ...]) -> None:
    """A response with another range does not reach the sink, and its connection is closed."""
    sink = CountedSink()
    server, wire = plain.both(answering(*answer))
    assert get(wire, sink, Range="bytes=0-99").body == b""
    assert (sink.data, sink.passes) == (b"", 0)
    server.script = answering(200, b"fine")
    assert get(wire).body == b"fine"
    assert server.accepted == 2


@pytest.mark.fault("O01")
@pytest.mark.parametrize("size_bytes", [0, 9, 11, 3 * WINDOW_BYTES])
def test_a_range_of_another_length(plain: Place, size_bytes: int) -> None:
    """A body of another length than its Content-Range is Transient, and the sink never gets too much."""
    sink = CountedSink()
    server, wire = plain.both(answering(206, bytes(size_bytes), "Content-Range: bytes 0-9/10"))
    with Fails:
        get(wire, sink, Range="bytes=0-9")
    assert len(sink.data) <= 10
    server.script = answering(200, b"0123456789", "Content-Range: bytes 0-9/10")
    get(wire, sink, Range="bytes=0-9")
    assert sink.data == b"0123456789"


def test_an_error_comes_back_whole(place: Place) -> None:
    """Error responses are returned with their bodies, and the connection is reused."""
    sink = CountedSink()
    server, wire = place.both(answering(404, b"<Code>NoSuchKey</Code>", "Retry-After: 3"))
    for _ in range(3):
        answer = get(wire, sink, Range="bytes=0-9")
        assert (answer.status, answer.body) == (404, b"<Code>NoSuchKey</Code>")
        assert answer.headers["retry-after"] == "3"
    assert sink.passes == 0
    assert server.accepted == 1


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine"


@pytest.mark.parametrize(
    "raw",
    [
        CHUNKED + b"2\r\nfi\r\n2;x=y\r\nne\r\n0\r\n\r\n",
        CHUNKED + b"4 \r\nfine\r\n0\r\nSome-Trailer: 1\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + FINE,
        b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nfine",
        b"HTTP/1.1 200 \r\ncontent-length:4\r\nX: a\r\nx: b\r\n\r\nfine",
        b"HTTP/1.1 200\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfine",
    ],
)
def test_forms_of_responses(place: Place, raw: bytes) -> None:
    """Chunks, interim responses, a short status line: the same body, with and without a sink."""
    server = place.server(saying(raw))
    assert get(place.wire(server)).body == b"fine"
    sink = CountedSink()
    assert get(place.wire(server), sink).body == b""
    assert sink.data == b"fine"


@pytest.mark.parametrize(
    ("method", "status"), [("HEAD", 200), ("HEAD", 404), ("DELETE", 204), ("GET", 304)]
)
def test_responses_without_a_body(place: Place, method: str, status: int) -> None:
    """The length in the response to a HEAD is that of a body that is not sent; the connection is reused."""
    raw = f"HTTP/1.1 {status} X\r\nContent-Length: 1000\r\n\r\n".encode()

    def script(peer: Peer) -> None:
        while peer.request() is not None:
            peer.send(raw)

    server, wire = place.both(script)
    for _ in range(3):
        answer = wire.request(method, "/", {})
        assert (answer.status, answer.body) == (status, b"")
    assert server.accepted == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 999 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n" + FINE,
        b"HTTP/1.1 200 OK\r\nContent-Length: 4",
        b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\nfine",
        b"HTTP/1.1 200 OK\r\nContent-Length: four\r\n\r\nfine",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nfine!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\nfine",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nfine",
        b"HTTP/1.1 200 OK\r\nContent-Length : 4\r\n\r\nfine",
        b"HTTP/1.1 200 OK\r\n folded\r\nContent-Length: 4\r\n\r\nfine",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfine",
        CHUNKED + b"fine\r\n",
        CHUNKED + b"4\r\nfine0\r\n\r\n",
        CHUNKED + b"4\r\nfi",
        CHUNKED + b"4\r\nfine\r\n",
        CHUNKED + b"fffffffffffffffff\r\n",
    ],
)
def test_garbage(plain: Place, raw: bytes) -> None:
    """An invalid response is Transient, and does not affect later requests."""
    server, wire = plain.both(saying(raw))
    with Fails:
        get(wire)
    server.script = answering(200, b"fine")
    assert get(wire).body == b"fine"


# ---------------------------------------------------------------- connections


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfine",
        FINE + FINE,
        b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nfine",
    ],
)
def test_a_connection_that_must_not_be_used_again(place: Place, raw: bytes) -> None:
    """After a close, an older protocol or unexpected bytes, the next request opens a connection."""
    server, wire = place.both(saying(raw, waits=True))
    assert [get(wire).body for _ in range(3)] == [b"fine"] * 3
    assert server.accepted == 3


def test_the_server_closes_an_idle_connection(place: Place) -> None:
    """The next request uses a new connection, without an error."""
    closed = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.answer(200, b"fine")
        with suppress(OSError):
            peer.sock.shutdown(socket.SHUT_RDWR)
        closed.set()

    server, wire = place.both(script)
    for number in range(1, 4):
        closed.clear()
        assert get(wire).body == b"fine"
        assert closed.wait(60)
        assert server.accepted == number


def test_many_share_few_connections(plain: Place) -> None:
    """No more connections are opened than allowed; a request waits for a free one, for a limited time."""
    gate = threading.Event()

    def script(peer: Peer) -> None:
        while peer.request() is not None:
            gate.wait(60)
            peer.answer(200, b"fine")

    server, wire = plain.both(script, connections=2)
    running = [Running(lambda: get(wire)) for _ in range(8)]
    until(lambda: server.accepted == 2, what="both connections")
    gate.set()
    until(lambda: all(one.is_over for one in running), what="all eight")
    assert [one.error for one in running] == [None] * 8
    assert server.accepted == 2

    gate.clear()
    short = plain.wire(server, connections=1, first_byte_s=0.3, stall_s=0.3)
    first = Running(lambda: get(short))
    until(lambda: server.accepted == 3, what="the only connection")
    with Fails:
        get(short)
    gate.set()
    until(lambda: first.is_over)


def test_idle_connections_are_closed(plain: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """In time, and the watchdog ends with the last one."""
    monkeypatch.setattr(pool, "IDLE_S_MAX", 0.2)
    ended = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.answer(200)
        peer.wait_for_end()
        ended.set()

    _, wire = plain.both(script, stall_s=0.2)
    before = set(threading.enumerate())
    get(wire)
    assert ended.wait(60)
    until(lambda: set(threading.enumerate()) <= before, what="the end of the watching thread")
    ended.clear()
    get(wire)
    assert ended.wait(60)


def test_no_server(plain: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection and an unknown host name are Transient."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Fails:
        get(Wire(f"http://127.0.0.1:{port}", connections=1))

    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with Fails:
        get(Wire("http://store.invalid", connections=1))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOBUFS])
def test_a_lack_of_descriptors_or_buffers_is_transient(
    plain: Place, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """No connection can be opened for a moment.  The wire works afterwards, with all its connections."""
    _, wire = plain.both(answering(200), connections=1)

    def refused(*_args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as lack, Fails:
        lack.setattr(socket, "socket", refused)
        get(wire)
    assert get(wire).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_addresses_without_a_server_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """The name of the store has forty addresses, of both families, and a server at the last one."""
    with RawServer(answering(200), host=host) as server:
        port = int(server.url.rpartition(":")[2])
        places = [*((f"127.0.0.{n}", port) for n in range(2, 40)), ("::1", 9), (host, port)]

        def known(*_args: Any, **_kwargs: Any) -> Any:
            families = {True: socket.AF_INET6, False: socket.AF_INET}
            return [(families[":" in at[0]], socket.SOCK_STREAM, 6, "", at) for at in places]

        monkeypatch.setattr(socket, "getaddrinfo", known)
        assert get(Wire(f"http://store.example:{port}", connections=1)).status == 200


def test_a_silent_address_delays_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that drops packets is tried after the others from then on."""
    silent, tried = ("127.0.0.9", 9), list[object]()
    connect = socket.socket.connect

    def counted(sock: socket.socket, place: Any) -> None:
        tried.append(place)
        if place == silent:
            raise TimeoutError("timed out")
        connect(sock, place)

    with RawServer(saying(b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nfine")) as server:
        served = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", at) for at in (silent, served)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)
        monkeypatch.setattr(socket.socket, "connect", counted)
        wire = Wire("http://store.example", connections=1)
        assert [get(wire).body for _ in range(3)] == [b"fine"] * 3
    assert tried == [silent, served, served, served]


@pytest.mark.fault("O07")
def test_an_untrusted_certificate(pem: Path) -> None:
    """Permanent with a hint; so is a certificate of another host."""
    with RawServer(answering(200), pem) as server:
        with pytest.raises(Permanent) as caught:
            get(Wire(server.url, connections=1))
        assert "certificate" in caught.value.hint
        other = server.url.replace("127.0.0.1", "localhost")
        with pytest.raises(Permanent):
            get(Wire(other, connections=1, ca_bundle=str(pem)))


def test_through_a_proxy(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS uses a tunnel, plain requests have the whole URL; both authenticate."""
    seen: list[Request] = []
    server = place.server(answering(200, b"fine", seen=seen))
    asked: list[Request] = []

    def script(peer: Peer) -> None:
        request = peer.request()
        assert request is not None
        asked.append(request)
        if not request.line.startswith("CONNECT"):
            peer.answer(200, b"fine")
            return
        peer.send(b"HTTP/1.1 200 Connected\r\n\r\n")
        host, _, port = request.line.split()[1].partition(":")
        with socket.create_connection((host, int(port))) as beyond:
            back = threading.Thread(target=_pump, args=(beyond, peer.sock), daemon=True)
            back.start()
            _pump(peer.sock, beyond)
            back.join(timeout=60)

    with RawServer(script) as proxy:
        where = proxy.url.replace("http://", "http://me:pass%20word@")
        monkeypatch.setenv("http_proxy", where)
        monkeypatch.setenv("https_proxy", where)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        wire = place.wire(server)
        assert get(wire).body == b"fine"
        wire.close()
    host = server.url.partition("://")[2]
    target = f"CONNECT {host}" if place.pem else f"GET {server.url}/bucket/key"
    assert asked[0].line == f"{target} HTTP/1.1"
    assert asked[0].header("proxy-authorization") == "Basic bWU6cGFzcyB3b3Jk"
    assert [request.header("proxy-authorization") for request in seen] == [None] * len(seen)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


# ---------------------------------------------------------------- trouble on the way


@pytest.mark.fault("O01")
@pytest.mark.parametrize(
    "offset",
    [0, 1, 20, 300, 3000, WINDOW_BYTES, WINDOW_BYTES + 77, len(CONTENT) - 1, len(CONTENT)],
)
def test_a_reset_while_sending(place: Place, offset: int) -> None:
    """A reset at any byte of the request is Transient, and the same body can be sent again."""

    def script(peer: Peer) -> None:
        peer.body(offset)
        peer.reset()

    server, wire = place.both(script)
    moved: list[int] = []
    body = Body(CONTENT, moved.append)
    with Fails:
        wire.request("PUT", "/", {}, body=body)
    seen: list[Request] = []
    server.script = answering(200, seen=seen)
    wire.request("PUT", "/", {}, body=body)
    assert seen[0].body == CONTENT
    assert sum(moved) == len(CONTENT)


@pytest.mark.fault("O01")
@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("offset", [0, 1, 12, 30, 60, 5000, WINDOW_BYTES + 500, len(CONTENT)])
def test_an_end_within_the_response(place: Place, offset: int, how: str) -> None:
    """A truncated response is Transient at any byte, and the next attempt starts again."""
    raw = f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\n\r\n".encode() + CONTENT

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(raw[:offset])
        if how == "reset":
            peer.reset()

    server, wire = place.both(script)
    sink = CountedSink()
    with Fails:
        get(wire, sink)
    server.script = answering(200, CONTENT)
    get(wire, sink)
    assert sink.data == CONTENT


@pytest.mark.fault("O01")
def test_a_reset_of_a_reused_connection(place: Place) -> None:
    """A reused connection that breaks during a request is Transient."""

    def script(peer: Peer) -> None:
        peer.request()
        peer.answer(200)
        peer.body(50)
        peer.reset()

    server, wire = place.both(script)
    put(wire, b"first")
    with Fails:
        put(wire)
    assert server.accepted == 1


@pytest.mark.fault("O04")
@pytest.mark.parametrize("read_bytes", [0, 1, WINDOW_BYTES + 5])
def test_a_refusal_before_the_end_of_the_body(place: Place, read_bytes: int) -> None:
    """The caller gets the store's 503, although the body was not sent completely."""

    def script(peer: Peer) -> None:
        peer.head()
        peer.body(read_bytes)
        peer.answer(503, b"<Code>SlowDown</Code>", "Retry-After: 2", "Connection: close")
        peer.sock.shutdown(socket.SHUT_WR) if place.pem is None else None
        refused.set()
        gone.wait(60)

    refused, gone = threading.Event(), threading.Event()
    server, wire = place.both(script, stall_s=0.4)
    answer = wire.request("PUT", "/", {}, body=Endless())
    gone.set()
    assert refused.is_set()
    assert (answer.status, answer.body) == (503, b"<Code>SlowDown</Code>")
    assert answer.headers["retry-after"] == "2"
    server.script = answering(200)
    assert put(wire).status == 200


@pytest.mark.fault("O04")
def test_a_refusal_and_a_reset(plain: Place) -> None:
    """The error response is read, also if the store resets the connection after it."""

    def script(peer: Peer) -> None:
        peer.head()
        peer.answer(503, b"busy", "Connection: close")

    _, wire = plain.both(script)
    assert wire.request("PUT", "/", {}, body=Endless()).status == 503


# ---------------------------------------------------------------- what hangs


def stalling(sent: bytes | None, gate: threading.Event) -> Script:
    """A server that stalls after these bytes of its response; with None, after a kilobyte of the request."""

    def script(peer: Peer) -> None:
        if sent is None:
            peer.body(1000)
        else:
            peer.request()
            peer.send(sent)
        gate.wait(60)

    return script


@pytest.mark.fault("O02")
@pytest.mark.parametrize(
    "sent",
    [None, b"", FINE[:20], FINE[:-2]],
    ids=["body", "no response", "head of the response", "body of the response"],
)
def test_a_stalled_request_is_freed(place: Place, sent: bytes | None) -> None:
    """A stall of the server at any point ends with its reason, and the wire works."""
    gate = threading.Event()
    server, wire = place.both(stalling(sent, gate), stall_s=0.4, first_byte_s=0.4)
    body = Endless() if sent is None else Body(CONTENT)
    with pytest.raises(Transient, match="nothing moved"):
        wire.request("PUT", "/", {}, body=body)
    assert not gate.is_set()
    server.script = answering(200)
    wire._pool.stall_s = wire._pool.first_byte_s = 60.0  # a slow machine may need more than 0.4 s
    assert put(wire).status == 200
    gate.set()


@pytest.mark.fault("O02")
def test_few_bytes_that_a_store_does_not_take_count_as_sent(place: Place) -> None:
    """A flush that looks faster than its link opens connections, and forecasts a commit that is too early."""
    gate = threading.Event()
    _, wire = place.both(stalling(None, gate), stall_s=0.4)
    moved: list[int] = []
    with Fails:
        wire.request("PUT", "/", {}, body=Body(bytes(16 * WINDOW_BYTES), moved.append))
    gate.set()
    assert WINDOW_BYTES <= sum(moved) <= 2 * WINDOW_BYTES


@pytest.mark.fault("O02")
def test_a_response_may_take_longer_than_a_stall(place: Place) -> None:
    """The limit of the wait for a response is ``first_byte_s``, not ``stall_s``."""
    paused = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        paused.wait(1.0)
        peer.answer(200, b"fine")

    _, wire = place.both(script, stall_s=0.2, first_byte_s=15)
    assert put(wire).body == b"fine"


@pytest.mark.fault("O03")
def test_slow_is_not_stalled(plain: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow transfers, a slow ``moved`` and slow sinks are not cut."""
    clock = Clock()
    monkeypatch.setattr(pool, "time", clock)

    def slowly(seconds: float, act: Callable[[], object] = lambda: None) -> None:
        """Do this after this time, and let the watchdog see it."""
        clock.advance(seconds)
        act()
        (connection,) = wire._pool._in_use
        until(
            lambda: connection.cut or connection.moved_mono_s == clock.now,
            what="a check of the watchdog",
        )

    def think(*_: object) -> None:
        """The second check finds no byte that has moved since the first."""
        slowly(0.8)
        slowly(0.8)

    class Slow(CountedSink):
        def write(self, window: memoryview) -> None:
            think()
            super().write(window)

    def script(peer: Peer) -> None:
        peer.request()
        raw = b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n" + b"x" * 20
        *pieces, last = (raw[at : at + 4] for at in range(0, len(raw), 4))
        for piece in pieces:
            slowly(0.1, lambda piece=piece: peer.send(piece))
        peer.send(last)

    _, wire = plain.both(script, stall_s=0.4, first_byte_s=0.4)
    slow = Slow()
    wire.request("PUT", "/", {}, body=Body(b"0123456789", think), sink=slow)
    assert slow.data == b"x" * 20


@pytest.mark.fault("O02")
def test_an_outlier_gets_a_second_attempt(plain: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request far slower than the others is sent once more; the second attempt is not cut."""
    monkeypatch.setattr(pool, "_OUTLIER_AFTER_S", 0.3)
    done = threading.Event()
    begun: list[str] = []

    def script(peer: Peer) -> None:
        name = str(peer.head()).split("/")[1]
        begun.append(name)
        pause_s, piece = (0.05, 2**12) if "slow" in name else (0.005, 2**20)
        if "slow" in name:
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        while not done.wait(pause_s) and peer.body(piece):
            pass

    _, wire = plain.both(script, connections=8)

    def sending(name: str) -> Running:
        return Running(lambda: wire.request("PUT", f"/{name}/", {}, body=Endless()))

    def is_sent_twice(name: str) -> bool:
        return begun.count(name) == 2

    running = [sending(f"fast{number}") for number in range(4)]
    for name in ("slow-one", "slow-other"):
        running.append(sending(name))
        until(lambda name=name: is_sent_twice(name), what="the second attempt")
    assert len(begun) == 8
    assert not any(one.is_over for one in running)
    done.set()
    until(lambda: all(one.is_over for one in running), what="the end")


@pytest.mark.fault("O02")
def test_a_small_request_without_an_answer_gets_a_second_attempt(
    plain: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same request.  A large request and the second attempt get the whole time for a response."""
    monkeypatch.setattr(pool, "_LATE_SHARE", 0.01)
    answers = threading.Event()
    begun: list[tuple[str, bytes]] = []

    def script(peer: Peer) -> None:
        request = peer.request()
        assert request is not None
        begun.append((str(request.head).split()[1], request.body))
        answers.wait(60)
        peer.answer(200, b"fine")

    _, wire = plain.both(script, first_byte_s=20)

    def sending(path: str, body: bytes) -> Running:
        return Running(lambda: wire.request("PUT", path, {}, body=Body(body)))

    small, large = (b"small", bytes(2**20))
    running = [sending("/a", small), sending("/b", large)]
    until(lambda: begun.count(("/a", small)) == 2, what="the second attempt")
    running.append(sending("/c", small))
    until(lambda: begun.count(("/c", small)) == 2, what="a later second attempt")
    assert sorted(begun) == sorted([*2 * [("/a", small)], ("/b", large), *2 * [("/c", small)]])
    answers.set()
    until(lambda: all(one.is_over for one in running), what="the answers")
    assert [one.error for one in running] == 3 * [None]


# ---------------------------------------------------------------- bodies and sinks


class _Trouble(OSError):
    pass


@pytest.mark.parametrize(
    ("size_bytes", "windows"), [(1000, 0), (len(CONTENT), 0), (len(CONTENT), 1)]
)
def test_an_exception_of_moved_passes_unchanged(
    place: Place, size_bytes: int, windows: int
) -> None:
    """The window is not sent, the connection of the unfinished request is closed, and the wire works."""
    got: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.head()
        got.append(peer.body(len(CONTENT)))

    server, wire = place.both(script)
    body = Body(CONTENT[:size_bytes], torn(_Trouble("unwanted"), windows))
    with pytest.raises(_Trouble):
        wire.request("PUT", "/", {}, body=body)
    until(lambda: got, what="the end of the connection", timeout_s=5)
    assert CONTENT[: windows * WINDOW_BYTES].startswith(got[0])
    server.script = answering(200)
    assert put(wire).status == 200


def test_an_exception_of_a_sink_passes_unchanged(place: Place) -> None:
    """The rest of the response does not affect other requests."""

    class Full(CountedSink):
        def write(self, window: memoryview) -> None:
            raise _Trouble("no space")

    server, wire = place.both(answering(200, CONTENT))
    with pytest.raises(_Trouble):
        get(wire, Full())
    sink = CountedSink()
    get(wire, sink)
    assert sink.data == CONTENT
    assert server.accepted == 2


@pytest.mark.fault("H07")
def test_memory_is_bounded(plain: Place) -> None:
    """One window for each connection, for bodies and responses of any size; no body is copied."""
    total_bytes = 48 * 2**20
    content = bytes(total_bytes)

    class Discarding(CountedSink):
        received_bytes = 0

        def write(self, window: memoryview) -> None:
            self.received_bytes += window.nbytes

    piece = bytes(2**18)

    def script(peer: Peer) -> None:
        window = memoryview(bytearray(2**16))
        while peer.head() is not None:
            left = total_bytes - len(peer.held())
            while left and (count := peer.sock.recv_into(window[: min(left, window.nbytes)])):
                left -= count
            peer.send(f"HTTP/1.1 200 OK\r\nContent-Length: {total_bytes}\r\n\r\n".encode())
            for _ in range(total_bytes // len(piece)):
                peer.send(piece)

    _, wire = plain.both(script, connections=2)

    def four_requests() -> None:
        sinks = [Discarding() for _ in range(4)]
        running = [
            Running(
                lambda sink=sink: wire.request(
                    "PUT", "/", {}, body=Body(memoryview(content)), sink=sink
                )
            )
            for sink in sinks
        ]
        until(lambda: all(one.is_over for one in running), what="four requests", timeout_s=50)
        assert [one.error for one in running] == [None] * 4
        assert [sink.received_bytes for sink in sinks] == [total_bytes] * 4

    assert peak_bytes(four_requests) < 2 * WINDOW_BYTES * 1.5 + 2**20
