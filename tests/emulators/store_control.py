# SPDX-License-Identifier: Apache-2.0
"""What both store emulators share: faults on order, and a record of what was asked.

Control, all by POST with a query but the last, below ``/_control/``::

    outage?seconds=3            every request is answered with 503 SlowDown
    answer?status=409&code=OperationAborted&method=PUT&match=/commits/&times=1&carry_out=1
                                the next requests whose target contains ``match`` get this error;
                                with ``carry_out`` only after they have taken effect (a lost reply).
                                ``times`` is 1 when left out; ``status=200`` is an error all the same
    corrupt?object=NAME         one bit of the stored object flips
    preconditions?honour=0      create-if-absent is ignored, as some stores do
    clear                       all this ends, and the record is empty again
    requests  (GET)             [["PUT", "/bucket/key?partNumber=1&uploadId=x"], ...]
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    """As sent, still quoted."""
    query: str
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path

    def parameter(self, name: str, default: str | None = None) -> str | None:
        return parse_qs(self.query, keep_blank_values=True).get(name, [default])[0]


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def error_answer(status: int, code: str, message: str = "") -> Answer:
    """An error in the XML that S3 and GCS have in common."""
    body = f"<Error><Code>{escape(code)}</Code><Message>{escape(message or code)}</Message></Error>"
    return Answer(status, body.encode(), {"Content-Type": "application/xml"})


@dataclass(frozen=True)
class _Fault:
    answer: Answer
    method: str
    match: str
    times: int
    carry_out: bool


class StoreControl:
    """Stands before an emulated store.

    Args:
        respond: the store in good health.
        corrupt: flips one bit of the object of that name; says whether there is one.
        ignoring: headers and query parameters that make a create conditional, in lower case.
    """

    def __init__(
        self,
        respond: Callable[[Call], Answer],
        corrupt: Callable[[str], bool],
        ignoring: tuple[str, ...],
    ) -> None:
        self._respond = respond
        self._corrupt = corrupt
        self._preconditions = ignoring
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._honour = True
        self._outage_end_mono_s = 0.0
        self._faults: list[_Fault] = []
        self._record: list[tuple[str, str]] = []

    def handle(self, call: Call) -> Answer:
        if call.path.startswith("/_control/"):
            return self._order(call.path.removeprefix("/_control/"), call)
        with self._lock:
            self._record.append((call.method, unquote(call.target)))
            outage = time.monotonic() < self._outage_end_mono_s
            fault = self._take_fault(call)
            honour = self._honour
        if outage:
            return error_answer(503, "SlowDown")
        if not honour:
            call = self._unconditional(call)
        if fault is None:
            return self._respond(call)
        if fault.carry_out:
            self._respond(call)
        return fault.answer

    def _take_fault(self, call: Call) -> _Fault | None:
        for index, fault in enumerate(self._faults):
            if fault.method in ("", call.method) and fault.match in unquote(call.target):
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

    def _order(self, name: str, call: Call) -> Answer:
        with self._lock:
            if name == "requests":
                return Answer(200, json.dumps(self._record).encode())
            if name == "clear":
                self._clear()
            elif name == "outage":
                self._outage_end_mono_s = time.monotonic() + float(call.parameter("seconds") or 0)
            elif name == "preconditions":
                self._honour = call.parameter("honour") != "0"
            elif name == "answer":
                self._faults.append(
                    _Fault(
                        answer=error_answer(
                            int(call.parameter("status", "503") or 0),
                            call.parameter("code", "InternalError") or "",
                        ),
                        method=call.parameter("method", "") or "",
                        match=call.parameter("match", "") or "",
                        times=int(call.parameter("times", "1") or 0),
                        carry_out=call.parameter("carry_out") == "1",
                    )
                )
            elif name == "corrupt":
                if not self._corrupt(call.parameter("object") or ""):
                    return Answer(404, b"no such object")
            else:
                return Answer(400, b"no such order")
        return Answer(200, b"{}")
