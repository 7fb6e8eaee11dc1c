# SPDX-License-Identifier: Apache-2.0
"""The base of the metadata emulators: an HTTP server, faults on order, and counts of requests.

Control, by POST with a JSON object unless said otherwise, below ``/_control/``::

    fault     {"path": "/latest/*", "kind": "status", "value": 503, "count": 3, "method": "GET"}
    clear     {}                 end all faults; close the connections that hang in one
    dead      {"after_s": 2}     after this time no request gets a response; {"after_s": null} ends that
    requests  (GET)              {"GET /path": {"total": 3, "200": 2, "reset": 1},
                                  "connections": {"total": 2}}

``path`` may contain ``*`` and ``?``; the default is every path.  Without ``count`` a fault is permanent.
Kinds:

    delay       respond after ``value`` seconds
    hang        read the request, never respond
    stall       send the headers and half of the body, then nothing
    slow        send the body byte by byte, ``value`` seconds apart
    truncate    announce the whole body, send half of it, close
    reset       close with a TCP reset
    status      respond with status ``value``, and with ``body`` if given
    body        respond with status 200 and the body ``value``
    redirect    redirect with status 302 to ``value``
    bare        respond without the headers of this cloud, and without Date
    refuse-put  never respond to a PUT (as with a hop limit that is too low), serve other requests
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from email.utils import formatdate
from fnmatch import fnmatchcase
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from testkit.emulators.process import announce

KINDS = (
    "delay", "hang", "stall", "slow", "truncate", "reset", "status", "body", "redirect", "bare",
    "refuse-put",
)  # fmt: skip


class ControlError(Exception):
    """A command on ``/_control/`` that cannot be executed."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: Any
    """Case-insensitive."""
    body: bytes = b""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Reply:
    status: int
    body: str = ""
    headers: dict[str, str | None] = field(default_factory=dict)
    """None omits a default header."""


@dataclass
class Fault:
    kind: str
    value: Any = None
    path: str = "*"
    method: str = "*"
    count: int | None = None
    body: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def matches(self, request: Request) -> bool:
        method = "PUT" if self.kind == "refuse-put" else self.method
        return fnmatchcase(request.path, self.path) and fnmatchcase(request.method, method)


class Emulator(ABC):
    """Base of all.  ``respond`` runs in a thread per connection; ``changed`` guards all state."""

    headers: ClassVar[dict[str, str | None]] = {}
    """Headers of every response of this cloud."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._faults: list[Fault] = []
        self._dead_mono_s: float | None = None
        self.revived = threading.Event()
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)

    @abstractmethod
    def respond(self, request: Request) -> Reply:
        """The response of a metadata server without faults."""

    def order(self, name: str, body: dict[str, Any]) -> object:
        """Execute one command; called with ``changed`` held, which is notified afterwards."""
        if name == "requests":
            return self._counts
        if name == "fault":
            fault = Fault(**body)
            if fault.kind not in KINDS:
                raise ControlError(f"no such fault: {fault.kind}")
            self._faults.append(fault)
        elif name == "clear":
            for fault in self._faults:
                fault.over.set()
            self._faults.clear()
        elif name == "dead":
            after_s = body["after_s"]
            self._dead_mono_s = None if after_s is None else time.monotonic() + after_s
            self.revived.set()
            self.revived = threading.Event()
        else:
            raise ControlError(f"no such order: {name}")
        return {}

    def is_dead(self) -> bool:
        return self._dead_mono_s is not None and time.monotonic() >= self._dead_mono_s

    def count(self, what: str, outcome: str) -> None:
        with self.changed:
            self._counts[what][outcome] += 1

    def next_fault(self, request: Request) -> Fault | None:
        with self.changed:
            for fault in self._faults:
                if fault.matches(request):
                    if fault.count is not None:
                        fault.count -= 1
                        if fault.count <= 0:
                            self._faults.remove(fault)
                    return fault
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    _counted = False

    def _serve(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        if url.path.startswith("/_control/"):
            self._control(url.path.removeprefix("/_control/"), content)
            return
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        request = Request(self.command, url.path, query, self.headers, content)
        emulator = self.server.emulator
        emulator.count(str(request), "total")
        if not self._counted:  # a control connection does not count
            self._counted = True
            emulator.count("connections", "total")
        if emulator.is_dead():
            self._hang(request, None)
            return
        fault = emulator.next_fault(request)
        if fault is not None:
            self._spoil(request, fault)
            return
        reply = emulator.respond(request)
        if emulator.is_dead():  # it stopped responding while the request was pending
            self._hang(request, None)
            return
        self._send(request, reply)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _spoil(self, request: Request, fault: Fault) -> None:
        respond, headers = self.server.emulator.respond, self.server.emulator.headers
        match fault.kind:
            case "delay":
                fault.over.wait(fault.value)
                self._send(request, respond(request))
            case "hang" | "refuse-put":
                self._hang(request, fault)
            case "reset":
                self.server.emulator.count(str(request), "reset")
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                self.close_connection = True
            case "status":
                self._send(request, Reply(fault.value, fault.body, headers))
            case "body":
                self._send(request, Reply(200, fault.value, headers))
            case "redirect":
                self._send(request, Reply(302, "", {**headers, "Location": fault.value}))
            case "bare":
                reply = respond(request)
                self._send(request, Reply(reply.status, reply.body, {"Date": None}))
            case "stall" | "truncate" | "slow":
                self._dribble(request, respond(request), fault)

    def _hang(self, request: Request, fault: Fault | None) -> None:
        self.server.emulator.count(str(request), "hang")
        (fault.over if fault else self.server.emulator.revived).wait()
        self.close_connection = True

    def _dribble(self, request: Request, reply: Reply, fault: Fault) -> None:
        self.server.emulator.count(str(request), fault.kind)
        self.close_connection = True
        body = reply.body.encode()
        half = len(body) // 2
        self.wfile.write(self._head(reply, len(body)))
        if fault.kind != "slow":
            self.wfile.write(body[:half])
            if fault.kind == "stall":
                fault.over.wait()
            return
        for byte in body:
            self.wfile.write(bytes([byte]))
            fault.over.wait(fault.value)

    def _send(self, request: Request, reply: Reply) -> None:
        self.server.emulator.count(str(request), str(reply.status))
        body = reply.body.encode()
        # In one piece: a separate head would cost a delayed acknowledgement.
        self.wfile.write(self._head(reply, len(body)) + (body if request.method != "HEAD" else b""))

    def _head(self, reply: Reply, size_bytes: int) -> bytes:
        headers = {
            "Date": formatdate(usegmt=True),
            "Content-Length": str(size_bytes),
            **reply.headers,
        }
        if self.close_connection:
            headers["Connection"] = "close"
        status = f"HTTP/1.1 {reply.status} {_phrase(reply.status)}"
        fields = [f"{name}: {value}" for name, value in headers.items() if value is not None]
        lines = [status, *fields, "", ""]
        return "\r\n".join(lines).encode("latin-1")

    def _control(self, name: str, content: bytes) -> None:
        emulator = self.server.emulator
        status = 200
        try:
            body = json.loads(content or b"{}")
            with emulator.changed:
                answer = json.dumps(emulator.order(name, body))
                emulator.changed.notify_all()
        except (ControlError, ValueError, TypeError, KeyError) as error:
            status, answer = 400, json.dumps({"error": f"{type(error).__name__}: {error}"})
        reply = Reply(status, answer, {"Content-Type": "application/json"})
        self.wfile.write(self._head(reply, len(answer.encode())) + answer.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, emulator: Emulator, address: tuple[str, int]) -> None:
        self.emulator = emulator
        super().__init__(address, Handler)

    def shutdown_request(self, request: Any) -> None:
        # Without the shutdown of the base class, which would hide a reset.
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients may close at any time
            super().handle_error(request, client_address)


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in set(HTTPStatus) else "Unknown"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line that the emulators share."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")


def serve(emulator: Emulator, host: str, port: int) -> None:
    """Announce the address on standard output, and serve until killed; port 0 is a free port."""
    with _Server(emulator, (host, port)) as server:
        announce(f"http://{host}:{server.server_port}")
        server.serve_forever()
