# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of the strict store emulators: plain or TLS, with one thread for each connection.

It reads requests piece by piece, so that :mod:`testkit.emulators.store_control` can limit the rate.
"""

from __future__ import annotations

import argparse
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, cast

from testkit.emulators.process import announce
from testkit.emulators.store_control import Call, StoreControl, StoreResponse
from testkit.emulators.tls import server_context

_PIECE_BYTES = 2**16
_RECEIVE_BUFFER_BYTES = 2**18
"""Small: a sender notices that the server stopped reading before a whole part is in flight."""


class _Broken(Exception):
    """Ends the connection."""


class Pace:
    """A rate limit that is read for each piece."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_mono_s = 0.0

    def pass_bytes(self, count: int, bytes_per_s: float, over: threading.Event) -> None:
        if not bytes_per_s:
            return
        with self._lock:
            begin_mono_s = max(self._free_mono_s, time.monotonic())
            self._free_mono_s = begin_mono_s + count / bytes_per_s
            wait_s = self._free_mono_s - time.monotonic()
        over.wait(max(0.0, wait_s))


class _Handler(socketserver.BaseRequestHandler):
    server: StoreServer
    request: socket.socket

    def handle(self) -> None:
        if self.server.context is not None:
            # In this thread: a stalled handshake must not delay other connections.
            self.request = self.server.context.wrap_socket(self.request, server_side=True)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._control = self.server.control
        self._pace = Pace()
        self._reader = cast("BinaryIO", self.request.makefile("rb", _PIECE_BYTES))
        try:
            while self._exchange():
                pass
        except _Broken:
            pass
        finally:
            self._reader.close()
            if isinstance(self.request, ssl.SSLSocket):
                self.request.close()  # the wrapped socket has the descriptor now

    def _exchange(self) -> bool:
        """Serve one request; returns False when the connection ends."""
        line = self._line()
        if not line:
            return False
        method, target, _ = line.split(" ", 2)
        headers: dict[str, str] = {}
        while text := self._line(is_in_request=True):
            name, _, value = text.partition(":")
            headers[name.strip().lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = b"".join(self._body(headers))
        if body and self._control.next_flip(method, target):
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        path, _, query = target.partition("?")
        scheme = "https" if self.server.context else "http"
        call = Call(method, path, query, headers, body, scheme)
        response = self._control.handle(call)
        self._control.over.wait(self._control.latency_s)
        if self._control.next_stall(method, target):
            self._control.over.wait()
            raise _Broken
        return self._send(call, response)

    def _line(self, *, is_in_request: bool = False) -> str:
        """A line of the head; raises _Broken if the connection ends within a request."""
        line = self._reader.readline(65537)
        if is_in_request and not line.endswith(b"\n"):
            raise _Broken
        return line.decode("latin-1").strip()

    def _body(self, headers: dict[str, str]) -> Iterator[bytes]:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while count := int(self._reader.readline(1024).partition(b";")[0], 16):
                yield self._reader.read(count)
                self._reader.readline(16)
            while self._reader.readline(65537).strip():
                pass
            return
        left = int(headers.get("content-length", 0))
        while left:
            count = min(left, _PIECE_BYTES)
            piece = self._reader.read(count)
            if len(piece) < count:
                raise _Broken
            left -= count
            self._passed(count)
            yield piece

    def _passed(self, count: int) -> None:
        control = self._control
        self._pace.pass_bytes(count, control.connection_bytes_per_s, control.over)
        self.server.pace.pass_bytes(count, control.total_bytes_per_s, control.over)

    def _send(self, call: Call, response: StoreResponse) -> bool:
        headers = {"Date": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())}
        headers.update(response.headers)
        is_chunked = headers.get("Transfer-Encoding") == "chunked"
        if response.status not in (204, 304) and not is_chunked and not response.ends:
            headers.setdefault("Content-Length", str(len(response.body)))
        ends = response.ends or call.headers.get("connection", "").lower() == "close"
        if ends:
            headers["Connection"] = "close"
        is_known = response.status in set(HTTPStatus)
        phrase = HTTPStatus(response.status).phrase if is_known else "Unknown"
        lines = [f"HTTP/1.1 {response.status} {phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        body = b"" if call.method == "HEAD" else response.body
        if is_chunked:
            # As a store that sends spaces while it works, after the XML declaration.
            declaration, mark, rest = body.partition(b"?>")
            pieces = (declaration + mark, b" ", b"\n ", rest)
            body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece)
            body += b"0\r\n\r\n"
        if len(body) <= _PIECE_BYTES:
            # In one piece, else there is a delayed acknowledgement.
            self.request.sendall(head + body)
            self._passed(len(body))
            return not ends
        self.request.sendall(head)
        view = memoryview(body)
        while view:
            self.request.sendall(view[:_PIECE_BYTES])
            self._passed(min(len(view), _PIECE_BYTES))
            view = view[_PIECE_BYTES:]
        return not ends


class StoreServer(socketserver.ThreadingTCPServer):
    """Serves ``control`` on loopback; with ``pem`` over TLS."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(
        self, address: tuple[str, int], control: StoreControl, pem: Path | None = None
    ) -> None:
        self.control = control
        control.reads_pieces = True
        self.context = server_context(pem) if pem else None
        self.pace = Pace()
        super().__init__(address, _Handler)
        scheme = "https" if pem else "http"
        self.url = f"{scheme}://{address[0]}:{self.server_address[1]}"

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (OSError, ValueError)):  # clients may close at any time
            super().handle_error(request, client_address)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of the store emulators."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", action="append", default=[])
    parser.add_argument("--tls", type=Path, help="key and certificate, in one PEM file")


def serve(options: argparse.Namespace, control: StoreControl) -> None:
    """Serve until killed; with TLS also over plain HTTP, for control commands."""
    with StoreServer((options.host, options.port), control) as plain:
        url = plain.url
        if options.tls:
            tls = StoreServer((options.host, 0), control, options.tls)
            threading.Thread(target=tls.serve_forever, daemon=True).start()
            url = tls.url
        announce(url, control=plain.url, buckets=options.bucket)
        plain.serve_forever()
