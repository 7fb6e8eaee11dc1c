# SPDX-License-Identifier: Apache-2.0
"""Control of the store emulators: faults on order, and a record of requests.

Commands below ``/_control/``, by POST with a query, except for the last one::

    outage?seconds=3&retry_after_s=1
                                every request fails with 503 SlowDown
    answer?status=409&code=OperationAborted&method=PUT&match=/commits/&times=1&carry_out=1
                                the next requests whose target contains ``match`` get this error;
                                with ``carry_out`` after they took effect (a lost reply).  ``times``
                                defaults to 1; ``status=200`` is an error in a 200 response;
                                ``retry_after_s`` adds that header
    say?body=TEXT&method=PUT&match=/data/&times=1
                                the next requests get the body TEXT and have no effect; ``status``
                                defaults to 200
    preconditions?honour=0      ignore create-if-absent, as some stores do
    page?size=2                 limit the size of pages of listings
    listing?reversed=1&duplicates=1&loop=1
                                sort listings by reversed keys; repeat keys of earlier pages; let the
                                last page lead back to the first one
    spoil?how=empty&method=GET&match=list-type&times=1
                                damage the next responses to such requests, after they took effect;
                                ``how`` is one of SPOILS, or ``without`` with ``field=NAME``: omit that
                                XML element, JSON key and header
    clear                       end all faults, and empty the record
    requests  (GET)             [["PUT", "/bucket/key"], ...]

and, with :mod:`testkit.emulators.store_server`::

    stall?method=PUT&match=/data/&times=1&skip=0
                                the next requests take effect and get no response; their connections
                                are closed at the next ``clear``; the first ``skip`` of these requests
                                pass
    hits                        number of requests that have stalled since the last ``clear``
    flip?match=/data/&times=1
                                flip one bit of the body before the store reads it
    pace?connection_bytes_per_s=1000000&total_bytes_per_s=4000000&latency_s=0.03
                                limit the rate of bodies and responses, and wait before each response;
                                0 is no limit

A store can have further commands.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

SPOILS = ("empty", "cut", "half", "half a body", "foreign")
"""No body; no body and no length; half of the document with its length; half of the body without a length; an
HTML page.  The status is that of the undamaged response."""


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    """As sent, percent-encoded."""
    query: str
    headers: Mapping[str, str]
    """By name in lower case."""
    body: bytes
    scheme: str = "http"

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path

    def parameter(self, name: str, default: str | None = None) -> str | None:
        return parse_qs(self.query, keep_blank_values=True).get(name, [default])[0]


@dataclass(frozen=True)
class StoreResponse:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    ends: bool = False
    """The response has no length; the end of the connection ends the body."""


@dataclass(frozen=True)
class ListingMode:
    """Properties of listings that clients of AWS do not expect."""

    is_reversed: bool = False
    has_duplicates: bool = False
    is_loop: bool = False

    @classmethod
    def ordered(cls, call: Call) -> Self:
        """The mode of a command."""
        return cls(
            is_reversed=call.parameter("reversed") == "1",
            has_duplicates=call.parameter("duplicates") == "1",
            is_loop=call.parameter("loop") == "1",
        )

    def page(self, names: list[str], after: str | None, limit: int) -> tuple[list[str], str | None]:
        """The names of a page ``after`` a name, and the last name if there are more pages."""

        def place(name: str) -> str:
            return name[::-1] if self.is_reversed else name

        ordered = sorted(names, key=place)
        start = 0 if after is None else sum(place(name) <= place(after) for name in ordered)
        page = ordered[start : start + limit]
        last = page[-1] if start + limit < len(ordered) else None
        if self.has_duplicates:
            page = ordered[max(0, start - 1) : start] + page + page[:1]
        if self.is_loop and ordered:
            last = ordered[0]
        return page, last


def spoilt(response: StoreResponse, how: str, field: str) -> StoreResponse:
    """A damaged response, see SPOILS."""
    half = response.body[: len(response.body) // 2]
    framing = ("content-length", "transfer-encoding")
    endless = {name: v for name, v in response.headers.items() if name.lower() not in framing}
    match how:
        case "empty":
            return replace(response, body=b"", headers=endless)
        case "cut":
            return replace(response, body=b"", headers=endless, ends=True)
        case "half":
            return replace(response, body=half, headers=endless)
        case "half a body":
            return replace(response, body=half, headers=endless, ends=True)
        case "foreign":
            page = b"<html><head><title>Sign in</title></head><body>Please sign in</body></html>"
            return StoreResponse(response.status, page, {"Content-Type": "text/html"})
    name = re.escape(field).encode()
    body = re.sub(rb"<%b>[^<]*</%b>|<%b ?/>" % (name, name, name), b"", response.body)
    body = re.sub(rb'"%b": *("[^"]*"|\[[^]]*\]|[0-9]+)(, *)?' % name, b"", body)
    body = re.sub(rb", *}", b"}", body)
    headers = {
        key: value for key, value in response.headers.items() if key.lower() != field.lower()
    }
    return replace(response, body=body, headers=headers)


def error_response(status: int, code: str, message: str = "") -> StoreResponse:
    """An error in the XML of S3 and GCS."""
    body = f"<Error><Code>{escape(code)}</Code><Message>{escape(message or code)}</Message></Error>"
    return StoreResponse(status, body.encode(), {"Content-Type": "application/xml"})


@dataclass(frozen=True)
class _Fault:
    kind: str
    """``answer``, ``stall``, ``flip`` or ``spoil``."""
    method: str
    match: str
    times: int
    skip: int = 0
    """Number of requests that pass before the first one that fails."""
    response: StoreResponse = StoreResponse(503)
    carry_out: bool = False
    how: str = ""
    field: str = ""


class StoreControl:
    """Injects faults in front of an emulated store.

    Args:
        respond: the store without faults.
        ignoring: headers and query parameters that make a create conditional, in lower case.
        order: executes a command of this store; returns whether it is known.
    """

    def __init__(
        self,
        respond: Callable[[Call], StoreResponse],
        ignoring: tuple[str, ...],
        order: Callable[[str, Call], bool] = lambda _name, _call: False,
    ) -> None:
        self._respond = respond
        self._preconditions = ignoring
        self._store_order = order
        self._lock = threading.Lock()
        self.reads_pieces = False
        """Whether the server can change, slow down or stall a request."""
        self.over = threading.Event()
        """Set when the present faults end."""
        self._clear()

    def _clear(self) -> None:
        self._honour = True
        self._outage_end_mono_s = 0.0
        self._outage_retry_after_s = ""
        self._faults: list[_Fault] = []
        self._record: list[tuple[str, str]] = []
        self._hits = 0
        self.connection_bytes_per_s = 0.0
        self.total_bytes_per_s = 0.0
        self.latency_s = 0.0
        self.over.set()
        self.over = threading.Event()

    def handle(self, call: Call) -> StoreResponse:
        if call.path.startswith("/_control/"):
            return self._order(call.path.removeprefix("/_control/"), call)
        with self._lock:
            self._record.append((call.method, unquote(call.target)))
            outage = time.monotonic() < self._outage_end_mono_s
            after_s = self._outage_retry_after_s
            fault = self._take(call.method, call.target, "answer")
            spoil = self._take(call.method, call.target, "spoil") if fault is None else None
            honour = self._honour
        if outage:
            response = error_response(503, "SlowDown")
            headers = {"Retry-After": after_s} if after_s else {}
            return replace(response, headers={**response.headers, **headers})
        if not honour:
            call = self._unconditional(call)
        if fault is None:
            response = self._respond(call)
            return response if spoil is None else spoilt(response, spoil.how, spoil.field)
        if fault.carry_out:
            self._respond(call)
        return fault.response

    def next_stall(self, method: str, target: str) -> bool:
        """Whether to send no response to this request."""
        if target.startswith("/_control/"):
            return False
        with self._lock:
            is_stalled = self._take(method, target, "stall") is not None
            self._hits += is_stalled
        return is_stalled

    def next_flip(self, method: str, target: str) -> bool:
        """Whether to flip a bit of this request's body."""
        with self._lock:
            return self._take(method, target, "flip") is not None

    def _take(self, method: str, target: str, *kinds: str) -> _Fault | None:
        for index, fault in enumerate(self._faults):
            if (
                fault.kind in kinds
                and fault.method in ("", method)
                and fault.match in unquote(target)
            ):
                if fault.skip:
                    self._faults[index] = replace(fault, skip=fault.skip - 1)
                    return None
                del self._faults[index]
                if fault.times > 1:
                    self._faults.insert(index, replace(fault, times=fault.times - 1))
                return fault
        return None

    def _unconditional(self, call: Call) -> Call:
        headers = {k: v for k, v in call.headers.items() if k not in self._preconditions}
        pairs = call.query.split("&")
        query = "&".join(p for p in pairs if p.partition("=")[0].lower() not in self._preconditions)
        return replace(call, headers=headers, query=query)

    def _order(self, name: str, call: Call) -> StoreResponse:
        with self._lock:
            if name == "requests":
                return StoreResponse(200, json.dumps(self._record).encode())
            if name == "hits":
                return StoreResponse(200, json.dumps(self._hits).encode())
            if name == "clear":
                self._clear()
                self._store_order(name, call)
            elif name == "outage":
                self._outage_end_mono_s = time.monotonic() + float(call.parameter("seconds") or 0)
                self._outage_retry_after_s = call.parameter("retry_after_s") or ""
            elif name == "preconditions":
                self._honour = call.parameter("honour") != "0"
                self._store_order(name, call)  # signed headers cannot be removed here
            elif name == "answer":
                self._faults.append(self._fault(call, "answer"))
            elif name == "say":
                status = int(call.parameter("status", "200") or 0)
                headers = {"ETag": tag} if (tag := call.parameter("etag")) else {}
                said = StoreResponse(status, (call.parameter("body") or "").encode(), headers)
                self._faults.append(replace(self._fault(call, "answer"), response=said))
            elif name in ("stall", "flip", "pace") and not self.reads_pieces:
                return StoreResponse(400, b"this server reads whole requests: it cannot do that")
            elif name in ("stall", "flip"):
                self._faults.append(self._fault(call, name))
            elif name == "spoil":
                fault = self._fault(call, "spoil")
                if fault.how not in (*SPOILS, "without"):
                    return StoreResponse(400, b"no such way to damage a response")
                self._faults.append(fault)
            elif name == "pace":
                self.connection_bytes_per_s = float(call.parameter("connection_bytes_per_s") or 0)
                self.total_bytes_per_s = float(call.parameter("total_bytes_per_s") or 0)
                self.latency_s = float(call.parameter("latency_s") or 0)
            elif not self._store_order(name, call):
                return StoreResponse(400, b"no such order")
        return StoreResponse(200, b"{}")

    def _fault(self, call: Call, kind: str) -> _Fault:
        response = error_response(
            int(call.parameter("status", "503") or 0),
            call.parameter("code", "InternalError") or "",
        )
        after_s = call.parameter("retry_after_s")
        if after_s:
            response = replace(response, headers={**response.headers, "Retry-After": after_s})
        return _Fault(
            kind=kind,
            method=call.parameter("method", "") or "",
            match=call.parameter("match", "") or "",
            times=int(call.parameter("times", "1") or 0),
            skip=int(call.parameter("skip", "0") or 0),
            response=response,
            carry_out=call.parameter("carry_out") == "1",
            how=call.parameter("how", "") or "",
            field=call.parameter("field", "") or "",
        )
