# SPDX-License-Identifier: Apache-2.0
"""The EC2 instance metadata service: ``python -m testkit.emulators.aws_imds --port 1338``.

Session tokens (IMDSv2) are required, as on a VM that enforces them.  A time ``in_s`` counts from the arrival
of the command.  Control, in addition to :mod:`testkit.emulators.faults`::

    notice             {"action": "terminate", "in_s": 120}   spot interruption: terminate, stop, hibernate
                       {"action": "stop", "time": "2026-01-05T18:02:00Z"}
    withdraw           {}                                     remove that notice
    rebalance          {}                                     a recommendation
    schedule           {"code": "instance-retirement", "in_s": 86400, "event_id": "instance-event-1"}
                       add an event, or replace the event with that id
    finish             {"event_id": "instance-event-1", "state": "canceled"}
                       the event moves to the history, as canceled or completed
    set                {"path": "autoscaling/target-lifecycle-state", "value": "Terminated"}
                       any path below meta-data; null removes it (404)
    quiet              {}                                     reset every path
    invalidate-tokens  {}                                     as after a restart of the service
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from testkit.emulators.faults import (
    ControlError,
    Emulator,
    Reply,
    Request,
    add_arguments,
    serve,
)

TOKEN_PATH = "/latest/api/token"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
META_DATA = "/latest/meta-data/"
ACTIONS = ("terminate", "stop", "hibernate")

SPOT_KEY = "spot/instance-action"
REBALANCE_KEY = "events/recommendations/rebalance"
ASG_KEY = "autoscaling/target-lifecycle-state"
SCHEDULED_KEY = "events/maintenance/scheduled"
HISTORY_KEY = "events/maintenance/history"
ROLES_KEY = "iam/security-credentials"

_REGION = "us-east-1"
_INSTANCE = "i-0123456789abcdef0"
_ROLE = "swansong"

_EVENT = "instance-event-0d59937288b749b32"
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


def utc(moment: datetime) -> str:
    """An instant in the format of the service."""
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def event_date(moment: datetime) -> str:
    """A date in the format of events, whose day is not padded."""
    day = moment.astimezone(UTC)
    return f"{day.day} {_MONTHS[day.month - 1]} {day:%Y %H:%M:%S} GMT"


class AwsImds(Emulator):
    """State of one VM.

    Args:
        v1: accept requests without a token, too (``HttpTokens=optional``).
    """

    headers: ClassVar[dict[str, str | None]] = {"Server": "EC2ws"}

    def __init__(self, *, v1: bool = False) -> None:
        super().__init__()
        self._v1 = v1
        self._tokens: dict[str, float] = {}  # token -> monotonic instant of its expiry
        self._values: dict[str, str] = {
            ROLES_KEY: _ROLE,
            "instance-id": _INSTANCE,
            "instance-life-cycle": "spot",
            SCHEDULED_KEY: "[]",
            HISTORY_KEY: "[]",
        }
        self._quiet = dict(self._values)

    def respond(self, request: Request) -> Reply:
        if request.path == TOKEN_PATH:
            return self._token(request)
        if request.method not in ("GET", "HEAD"):
            return _page(405, "Method Not Allowed")
        token = request.headers.get(TOKEN_HEADER)
        with self.changed:
            left_s = self._tokens.get(token or "", 0.0) - time.monotonic()
            if left_s <= 0 and not (self._v1 and token is None):
                self._tokens.pop(token or "", None)
                return _page(401, "Unauthorized")
            return self._read(request.path)

    def _token(self, request: Request) -> Reply:
        if request.method != "PUT":
            return _page(405, "Method Not Allowed")
        ttl = request.headers.get(TTL_HEADER, "")
        if not (ttl.isdecimal() and 1 <= int(ttl) <= 21600):
            return _page(400, "Bad Request")
        token = secrets.token_urlsafe(40)
        with self.changed:
            self._tokens[token] = time.monotonic() + int(ttl)
        return _text(token, {TTL_HEADER: ttl})

    def _read(self, path: str) -> Reply:
        if path == "/latest/dynamic/instance-identity/document":
            return _text(json.dumps(_identity_document(), indent=2))
        if not (path + "/").startswith(META_DATA):
            return _page(404, "Not Found")
        key = path.removeprefix(META_DATA.rstrip("/")).strip("/")
        if key == f"{ROLES_KEY}/{_ROLE}":
            return _text(json.dumps(_credentials(), indent=2))
        if key in self._values:
            return _text(self._values[key])
        return _page(404, "Not Found")

    def order(self, name: str, body: dict[str, Any]) -> object:
        match name:
            case "notice":
                return self._notice(**body)
            case "withdraw":
                self._put(SPOT_KEY, None)
            case "rebalance":
                self._put(REBALANCE_KEY, json.dumps({"noticeTime": utc(datetime.now(UTC))}))
            case "schedule":
                return self._schedule(**body)
            case "finish":
                return self._finish(**body)
            case "set":
                self._put(body["path"], body["value"])
            case "quiet":
                self._values = dict(self._quiet)
            case "invalidate-tokens":
                self._tokens.clear()
            case _:
                return super().order(name, body)
        return {}

    def _notice(
        self, action: str = "terminate", in_s: float = 120, time: str | None = None
    ) -> object:
        if action not in ACTIONS:
            raise ControlError(f"no such action: {action}")
        when = time or utc(datetime.now(UTC) + timedelta(seconds=in_s))
        self._put(SPOT_KEY, json.dumps({"action": action, "time": when}))
        return {"action": action, "time": when}

    def _schedule(self, code: str, in_s: float, event_id: str = _EVENT) -> object:
        begins = datetime.now(UTC) + timedelta(seconds=in_s)
        event = {
            "NotBefore": event_date(begins),
            "NotAfter": event_date(begins + timedelta(hours=2)),
            "Code": code,
            "Description": f"scheduled {code}",
            "EventId": event_id,
            "State": "active",
        }
        others = [other for other in self._events(SCHEDULED_KEY) if other["EventId"] != event_id]
        self._put(SCHEDULED_KEY, json.dumps([*others, event]))
        return event

    def _finish(self, event_id: str, state: str) -> object:
        tag = {"canceled": "[Canceled] ", "completed": "[Completed] "}.get(state)
        events = self._events(SCHEDULED_KEY)
        past = [event for event in events if event["EventId"] == event_id]
        if tag is None or not past:
            raise ControlError(f"no such event, or state: {event_id}, {state}")
        left = [event for event in events if event["EventId"] != event_id]
        ended = {**past[0], "Description": tag + past[0]["Description"], "State": state}
        self._put(SCHEDULED_KEY, json.dumps(left))
        self._put(HISTORY_KEY, json.dumps([*self._events(HISTORY_KEY), ended]))
        return ended

    def _events(self, key: str) -> list[dict[str, str]]:
        events: list[dict[str, str]] = json.loads(self._values.get(key, "[]"))
        return events

    def _put(self, key: str, value: str | None) -> None:
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value


def _text(body: str, headers: dict[str, str | None] | None = None) -> Reply:
    kind: dict[str, str | None] = {"Content-Type": "text/plain"}
    return Reply(200, body, {**AwsImds.headers, **kind, **(headers or {})})


def _page(status: int, title: str) -> Reply:
    page = (
        '<?xml version="1.0" encoding="iso-8859-1"?>\n'
        f"<html><head><title>{status} - {title}</title></head>"
        f"<body><h1>{status} - {title}</h1></body></html>\n"
    )
    return Reply(status, page, {**AwsImds.headers, "Content-Type": "text/html"})


def _identity_document() -> dict[str, str]:
    return {
        "accountId": "123456789012",
        "architecture": "x86_64",
        "availabilityZone": _REGION + "a",
        "imageId": "ami-0123456789abcdef0",
        "instanceId": _INSTANCE,
        "instanceType": "p4d.24xlarge",
        "privateIp": "10.0.0.10",
        "region": _REGION,
        "version": "2017-09-30",
    }


def _credentials() -> dict[str, str]:
    now = datetime.now(UTC)
    return {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "LastUpdated": utc(now),
        "Expiration": utc(now + timedelta(hours=6)),
        "AccessKeyId": "ASIAEMULATED00000000",
        "SecretAccessKey": "emulated-secret",
        "Token": "emulated-session-token",
    }


def main() -> None:
    """Serve until killed, or until standard input closes."""
    parser = argparse.ArgumentParser(description="EC2 instance metadata, emulated")
    add_arguments(parser)
    parser.add_argument("--v1", action="store_true", help="answer without a token, too")
    options = parser.parse_args()
    serve(AwsImds(v1=options.v1), options.host, options.port)


if __name__ == "__main__":
    main()
