# SPDX-License-Identifier: Apache-2.0
"""A strict emulator of two calls of the Auto Scaling API, those of a lifecycle hook; moto has neither.

Start: ``python -m testkit.emulators.autoscaling --instance i-1 --group trainers --hook swansong``.

A lifecycle action of that instance is pending from the start.  The emulator refuses all other calls as the
real service does.
Control, below ``/_control/``::

    calls  (GET)                                      the parameters of every call
    fail   {"status": 503, "code": "X", "count": 2}   the next calls fail; status 0: no response
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

from testkit.emulators.process import announce

_NAMESPACE = "http://autoscaling.amazonaws.com/doc/2011-01-01/"
_COMMON = {
    "Action",
    "Version",
    "LifecycleHookName",
    "AutoScalingGroupName",
    "InstanceId",
}
_FIELDS = {
    "RecordLifecycleActionHeartbeat": _COMMON,
    "CompleteLifecycleAction": _COMMON | {"LifecycleActionResult"},
}


class _State:
    def __init__(self, wanted: dict[str, str]) -> None:
        self.wanted = wanted
        self.lock = threading.Lock()
        self.calls: list[dict[str, str]] = []
        self.failures: list[tuple[int, str]] = []
        self.waits = True

    def answer(self, fields: dict[str, str], authorization: str) -> tuple[int, str]:
        """HTTP status, and the error code or an empty string."""
        with self.lock:
            self.calls.append(fields)
            if self.failures:
                return self.failures.pop(0)
            action = fields.get("Action", "")
            if not authorization.startswith("AWS4-HMAC-SHA256 ") or (
                "/us-east-1/autoscaling/aws4_request" not in authorization
            ):
                return 403, "SignatureDoesNotMatch"
            if fields.get("Version") != "2011-01-01" or fields.keys() != _FIELDS.get(action):
                return 400, "ValidationError"
            if any(fields[name] != value for name, value in self.wanted.items()) or not self.waits:
                return 400, "ValidationError"
            if action == "CompleteLifecycleAction":
                if fields["LifecycleActionResult"] not in ("CONTINUE", "ABANDON"):
                    return 400, "ValidationError"
                self.waits = False
            return 200, ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: _State

    def do_GET(self) -> None:
        with self.state.lock:
            self._send(200, json.dumps(self.state.calls))

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if self.path == "/_control/fail":
            body: dict[str, Any] = json.loads(content)
            failure = (int(body["status"]), str(body.get("code", "")))
            with self.state.lock:
                self.state.failures += [failure] * int(body.get("count", 1))
            self._send(200, "{}")
            return
        fields = dict(parse_qsl(content, keep_blank_values=True))
        status, code = self.state.answer(fields, self.headers.get("Authorization", ""))
        if status == 0:
            threading.Event().wait()
        action = fields.get("Action", "")
        inner = f"<{action}Result/>" if not code else ""
        error = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>No</Message></Error>"
        name = "ErrorResponse" if code else f"{action}Response"
        self._send(status, f'<{name} xmlns="{_NAMESPACE}">{error if code else inner}</{name}>')

    def _send(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    """Serve until killed, or until standard input ends."""
    parser = argparse.ArgumentParser(description="Auto Scaling lifecycle actions, emulated")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--instance", default="i-0123456789abcdef0")
    parser.add_argument("--group", default="trainers")
    parser.add_argument("--hook", default="swansong")
    options = parser.parse_args()
    _Handler.state = _State(
        {
            "InstanceId": options.instance,
            "AutoScalingGroupName": options.group,
            "LifecycleHookName": options.hook,
        }
    )
    with ThreadingHTTPServer(("127.0.0.1", options.port), _Handler) as server:
        server.daemon_threads = True
        announce(f"http://127.0.0.1:{server.server_port}")
        server.serve_forever()


if __name__ == "__main__":
    main()
