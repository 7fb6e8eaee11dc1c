# SPDX-License-Identifier: Apache-2.0
"""What both metadata emulators share: an HTTP server, faults on order, a count of what was asked.

Control, by POST with a JSON object unless said otherwise, below ``/_control/``::

    fault     {"path": "/latest/*", "kind": "status", "value": 503, "count": 3, "method": "GET"}
    clear     {}                 all faults end; who hangs in one is hung up on
    dead      {"after_s": 2}     from then on nothing is answered; {"after_s": null} ends that
    requests  (GET)              {"GET /path": {"total": 3, "200": 2, "reset": 1},
                                  "connections": {"total": 2}}
    scenarios (GET)              {"name": [[10, "order", {...}], ...]}: what ``--scenario`` can play

``path`` may hold ``*`` and ``?``, and is everything when left out; without ``count`` a fault stays.  Kinds:

    delay       answer after ``value`` seconds
    hang        read the request, never answer
    stall       answer with the headers and half of the body, then nothing
    slow        send the body byte by byte, ``value`` seconds apart
    truncate    announce the whole body, send half of it, hang up
    reset       hang up with a TCP reset
    status      answer with status ``value``, and with ``body`` if there is one
    body        answer 200 with ``value`` as the body
    redirect    answer 302 to ``value``
    bare        answer without any header of this cloud, and without Date
    refuse-put  never answer a PUT (a token that the hop limit swallows), serve the rest
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
from collections.abc import Iterable
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
    """An order on ``/_control/`` that cannot be carried out."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: Any
    """Case-insensitive."""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Reply:
    status: int
    body: str = ""
    headers: dict[str, str | None] = field(default_factory=dict)
    """None leaves a header out that is sent otherwise."""


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


Scenario = tuple[tuple[float, str, dict[str, Any]], ...]
"""Orders, each with the seconds after the start at which it is given."""


class Emulator(ABC):
    """Base of both.  ``respond`` runs in a thread per connection; ``changed`` guards all state."""

    headers: ClassVar[dict[str, str | None]] = {}
    """What this cloud puts on every answer."""
    scenarios: ClassVar[dict[str, Scenario]] = {}
    """What may befall a VM of this cloud, by name."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._faults: list[Fault] = []
        self._dead_mono_s: float | None = None
        self.revived = threading.Event()
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)

    @abstractmethod
    def respond(self, request: Request) -> Reply:
        """The answer of a metadata server in good health."""

    def order(self, name: str, body: dict[str, Any]) -> object:
        """Carry out one order; called with ``changed`` held, which is notified afterwards."""
        if name == "requests":
            return self._counts
        if name == "scenarios":
            return self.scenarios
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

    def play(self, name: str, *, speed: float = 1.0) -> None:
        """Give the orders of a scenario when they are due, in a thread of its own.

        Args:
            speed: 60 makes a minute of a scenario last a second; ``in_s`` of an order shrinks as well.
        """

        def give() -> None:
            began_mono_s = time.monotonic()
            for after_s, order, body in self.scenarios[name]:
                due_mono_s = began_mono_s + after_s / speed
                scaled = {key: v / speed if key == "in_s" else v for key, v in body.items()}
                with self.changed:
                    while (left_s := due_mono_s - time.monotonic()) > 0:
                        self.changed.wait(left_s)
                    self.order(order, scaled)
                    self.changed.notify_all()

        threading.Thread(target=give, daemon=True).start()

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


class _Handler(BaseHTTPRequestHandler):
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
        request = Request(self.command, url.path, query, self.headers)
        emulator = self.server.emulator
        emulator.count(str(request), "total")
        if not self._counted:  # a connection that only gives orders does not count
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
        if emulator.is_dead():  # it died while the request was held
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
        # In one piece: a head of its own would cost a delayed acknowledgement.
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
        super().__init__(address, _Handler)

    def shutdown_request(self, request: Any) -> None:
        # Without the orderly end that the base class sends first, which would hide a reset.
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients may leave at any time
            super().handle_error(request, client_address)


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in set(HTTPStatus) else "Unknown"


def add_arguments(parser: argparse.ArgumentParser, scenarios: Iterable[str]) -> None:
    """The command line that both emulators share."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--scenario", choices=sorted(scenarios), help="played from the start on")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than in life")


def serve(emulator: Emulator, host: str, port: int) -> None:
    """Serve for ever, on a free port if ``port`` is 0, having said so on standard output."""
    with _Server(emulator, (host, port)) as server:
        announce(f"http://{host}:{server.server_port}")
        server.serve_forever()
