# SPDX-License-Identifier: Apache-2.0
"""The metadata server of Compute Engine: ``python -m testkit.emulators.gcp_metadata``.

A change wakes every pending GET of that key.  An ETag is never used twice, even if a value returns.
Control, in addition to :mod:`testkit.emulators.faults`::

    set          {"key": "instance/preempted", "value": "TRUE"}   null removes the key (404)
    touch        {"key": "instance/preempted"}                    a new ETag for the old value
    maintenance  {"value": "TERMINATE_ON_HOST_MAINTENANCE"}       shown only to a VM that has read
                 the key since the previous event; returns {"shown": true} or false
    upcoming     {"in_s": 86400, "status": "PENDING"}             a window that begins in ``in_s``
    stop         {"in_s": 600}                                    a graceful stop of that length
    token        {"life_s": 3599}                                 lifetime of tokens from now on

The server returns the same token until five minutes of it are left, as Google's server does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from testkit.emulators.faults import (
    ControlError,
    Emulator,
    Reply,
    Request,
    add_arguments,
    serve,
)

BASE = "/computeMetadata/v1/"
ACCOUNT_KEYS = "instance/service-accounts/default/"
TOKEN_KEY = ACCOUNT_KEYS + "token"
MAINTENANCE_KEY = "instance/maintenance-event"
UPCOMING_KEY = "instance/upcoming-maintenance"
STOP_KEYS = "instance/shutdown-details/"
TOKEN_RENEWED_S = 300
"""A token with less time left is replaced."""

_HEADERS: dict[str, str | None] = {
    "Metadata-Flavor": "Google",
    "Server": "Metadata Server for VM",
    "X-XSS-Protection": "0",
    "X-Frame-Options": "SAMEORIGIN",
}
_EMAIL = "default@emulated.iam.gserviceaccount.com"
"""The service account has two names."""
_VALUES = {
    "instance/id": "1234567890123456789",
    "instance/machine-type": "projects/123456789012/machineTypes/a2-highgpu-1g",
    "instance/maintenance-event": "NONE",
    "instance/name": "emulated",
    "instance/preempted": "FALSE",
    "instance/scheduling/automatic-restart": "FALSE",
    "instance/scheduling/on-host-maintenance": "TERMINATE",
    "instance/scheduling/preemptible": "TRUE",
    ACCOUNT_KEYS + "email": _EMAIL,
    ACCOUNT_KEYS + "scopes": "https://www.googleapis.com/auth/cloud-platform",
    TOKEN_KEY: "",  # created on request
    "instance/upcoming-maintenance": "NONE",
    "instance/zone": "projects/123456789012/zones/us-central1-a",
    "project/numeric-project-id": "123456789012",
    "project/project-id": "emulated",
}


class GcpMetadata(Emulator):
    """State of one VM: values by key, and for each key ever set the number of its last change."""

    headers = _HEADERS

    def __init__(self) -> None:
        super().__init__()
        self._is_maintenance_watched = False
        self._tokens = 0
        self._token_life_s = 3599.0
        self._token_end_mono_s = 0.0
        self._salt = secrets.token_hex(8)
        self._values = dict(_VALUES)
        self._versions = {key: number for number, key in enumerate(_VALUES, start=1)}

    def order(self, name: str, body: dict[str, Any]) -> object:
        if name == "set":
            self._set(body["key"], body["value"])
        elif name == "touch":
            self._set(body["key"], self._values[body["key"]], touch=True)
        elif name == "maintenance":
            return {"shown": self._maintenance(body["value"])}
        elif name == "upcoming":
            self._set(UPCOMING_KEY, _window(body["in_s"], body.get("status", "PENDING")))
        elif name == "stop":
            self._set(STOP_KEYS + "max-duration", str(round(body["in_s"])))
            self._set(STOP_KEYS + "request-timestamp", _utc(datetime.now(UTC)))
            self._set(STOP_KEYS + "stop-state", "PENDING_STOP")
        elif name == "token":
            self._token_life_s, self._token_end_mono_s = float(body["life_s"]), 0.0
        else:
            return super().order(name, body)
        return {}

    def _maintenance(self, value: str) -> bool:
        if value != "NONE":
            watched, self._is_maintenance_watched = self._is_maintenance_watched, False
            if not watched:
                return False
        self._set(MAINTENANCE_KEY, value)
        return True

    def _token(self) -> str:
        left_s = self._token_end_mono_s - time.monotonic()
        if left_s < min(TOKEN_RENEWED_S, self._token_life_s / 2):
            self._tokens += 1
            left_s = self._token_life_s
            self._token_end_mono_s = time.monotonic() + left_s
        return json.dumps(
            {
                "access_token": f"emulated-token-{self._tokens}",
                "expires_in": int(left_s),
                "token_type": "Bearer",
            }
        )

    def _set(self, key: str, value: str | None, *, touch: bool = False) -> None:
        if value is not None and not isinstance(value, str):
            raise ControlError("a value is a string or null")
        if self._values.get(key) == value and not touch:
            return
        self._versions[key] = max(self._versions.values()) + 1
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value

    def respond(self, request: Request) -> Reply:
        flavor = request.headers.get("Metadata-Flavor")
        if flavor is None:
            return _refused(403, "Missing Metadata-Flavor:Google header.")
        if flavor != "Google":
            return _refused(404, "Not Found")
        if request.method not in ("GET", "HEAD"):
            return _refused(405, "Method Not Allowed")
        if request.path == "/":  # clients detect Compute Engine by it
            return Reply(
                200, "computeMetadata/\n", {**_HEADERS, "Content-Type": "application/text"}
            )
        if not request.path.startswith(BASE):
            return _refused(404, "Not Found")
        key = request.path.removeprefix(BASE).replace(f"/{_EMAIL}/", "/default/")
        with self.changed:
            if key == MAINTENANCE_KEY:
                self._is_maintenance_watched = True
            if key in self._values:
                return self._answer(request, key)
            if key == ACCOUNT_KEYS and request.query.get("recursive") == "true":
                # Without the token: a listing contains no credential.
                names = ("email", "scopes")
                return _json({name: self._values[ACCOUNT_KEYS + name] for name in names})
            return _refused(404, "Not Found")

    def _answer(self, request: Request, key: str) -> Reply:
        """The value, at its time.  Called with ``changed`` held."""
        if request.query.get("wait_for_change", "").lower() == "true":
            timeout = request.query.get("timeout_sec")
            if key == TOKEN_KEY or (timeout is not None and not timeout.isdecimal()):
                return _refused(400, "This cannot be waited for.")
            self._wait(
                key,
                request.query.get("last_etag") or None,
                None if timeout is None else int(timeout),
            )
        if key not in self._values:
            return _refused(404, "Not Found")
        body = self._token() if key == TOKEN_KEY else self._values[key]
        kind = "application/json" if body.startswith(("{", "[")) else "application/text"
        return Reply(200, body, {**_HEADERS, "Content-Type": kind, "ETag": self._etag(key)})

    def _wait(self, key: str, last_etag: str | None, timeout_s: int | None) -> None:
        now = self._etag(key)
        if last_etag is not None and last_etag != now:
            return
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while self._etag(key) == now:
            left_s = None if give_up is None else give_up - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            self.changed.wait(left_s)

    def _etag(self, key: str) -> str:
        return hashlib.sha256(f"{self._salt}{self._versions[key]}".encode()).hexdigest()[:16]


def _json(value: object) -> Reply:
    return Reply(200, json.dumps(value), {**_HEADERS, "Content-Type": "application/json"})


def _utc(when: datetime) -> str:
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"


def _window(in_s: float, status: str) -> str:
    begin = datetime.now(UTC) + timedelta(seconds=in_s)
    return json.dumps(
        {
            "can_reschedule": "false",
            "latest_window_start_time": _utc(begin),
            "maintenance_status": status,
            "type": "SCHEDULED",
            "window_end_time": _utc(begin + timedelta(hours=4)),
            "window_start_time": _utc(begin),
        }
    )


def _refused(status: int, words: str) -> Reply:
    return Reply(status, words + "\n", {**_HEADERS, "Content-Type": "text/html"})


def main() -> None:
    """Serve until killed, or until standard input closes."""
    parser = argparse.ArgumentParser(description="Compute Engine metadata, emulated")
    add_arguments(parser)
    options = parser.parse_args()
    serve(GcpMetadata(), options.host, options.port)


if __name__ == "__main__":
    main()
