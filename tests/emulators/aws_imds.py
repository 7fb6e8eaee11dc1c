# SPDX-License-Identifier: Apache-2.0
"""The EC2 instance metadata service, to rehearse with: ``python -m emulators.aws_imds --port 1338``.

Session tokens (IMDSv2) are required as on a VM that enforces them.  Control, beside what
:mod:`emulators.faults` lists::

    notice             {"action": "terminate", "in_s": 120}   the time is pinned here, once
                       {"action": "stop", "time": "2026-01-05T18:02:00Z"}
    withdraw           {}                                     the notice goes away again
    set                {"path": "autoscaling/target-lifecycle-state", "value": "Terminated"}
                       any path below meta-data; null takes it away (404)
    invalidate-tokens  {}                                     as after a reset of the service
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from emulators.faults import ControlError, Emulator, Reply, Request, serve

TOKEN_PATH = "/latest/api/token"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
META_DATA = "/latest/meta-data/"
ACTIONS = ("terminate", "stop", "hibernate")

_REGION = "us-east-1"
_INSTANCE = "i-0123456789abcdef0"
_TYPE = "p4d.24xlarge"


def utc(moment: datetime) -> str:
    """The way in which the service writes an instant."""
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


class AwsImds(Emulator):
    """State of one VM.

    Args:
        role: name of the instance profile's role.
        v1: answer requests without a token, too (``HttpTokens=optional``).
        ttl_on_get: repeat the remaining life of the token on every answer.
        scheduled_idle: value of the scheduled events while there are none; None for 404.
    """

    headers: ClassVar[dict[str, str | None]] = {"Server": "EC2ws"}

    def __init__(
        self,
        *,
        role: str = "swansong",
        v1: bool = False,
        ttl_on_get: bool = False,
        scheduled_idle: str | None = "[]",
    ) -> None:
        super().__init__()
        self._v1 = v1
        self._ttl_on_get = ttl_on_get
        self._tokens: dict[str, float] = {}  # -> monotonic instant of its end
        self._values: dict[str, str] = {
            "ami-id": "ami-0123456789abcdef0",
            "iam/security-credentials/" + role: "",  # made when asked for
            "instance-action": "none",
            "instance-id": _INSTANCE,
            "instance-life-cycle": "spot",
            "instance-type": _TYPE,
            "placement/availability-zone": _REGION + "a",
            "placement/region": _REGION,
            "events/maintenance/history": "[]",
        }
        if scheduled_idle is not None:
            self._values["events/maintenance/scheduled"] = scheduled_idle

    def respond(self, request: Request) -> Reply:
        if request.path.rstrip("/").endswith("/api/token"):
            return self._token(request)
        if request.method not in ("GET", "HEAD"):
            return _page(405, "Method Not Allowed")
        token = request.headers.get(TOKEN_HEADER)
        with self.changed:
            left_s = self._tokens.get(token or "", 0.0) - time.monotonic()
            if left_s <= 0 and not (self._v1 and token is None):
                self._tokens.pop(token or "", None)
                return _page(401, "Unauthorized")
            reply = self._read(request.path)
        if self._ttl_on_get and token is not None:
            reply.headers[TTL_HEADER] = str(int(left_s))
        return reply

    def _token(self, request: Request) -> Reply:
        if request.method != "PUT":
            return _page(405, "Method Not Allowed")
        if request.path.rstrip("/") != TOKEN_PATH or "X-Forwarded-For" in request.headers:
            return _page(403, "Forbidden")
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
        if key.startswith("iam/security-credentials/") and key in self._values:
            return _text(json.dumps(_credentials(), indent=2))
        if key in self._values:
            return _text(self._values[key])
        below = key + "/" if key else ""
        names = {
            name + ("/" if rest else "")
            for name, rest, _ in (
                other.removeprefix(below).partition("/")
                for other in self._values
                if other.startswith(below)
            )
        }
        return _text("\n".join(sorted(names))) if names else _page(404, "Not Found")

    def order(self, name: str, body: dict[str, Any]) -> object:
        match name:
            case "notice":
                return self._notice(**body)
            case "withdraw":
                self._put("spot/instance-action", None)
                self._put("spot/termination-time", None)
            case "set":
                self._put(body["path"], body["value"])
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
        self._put("spot/instance-action", json.dumps({"action": action, "time": when}))
        self._put("spot/termination-time", when if action == "terminate" else None)
        return {"action": action, "time": when}

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
        "instanceType": _TYPE,
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
    """Serve until killed, or until standard input ends."""
    parser = argparse.ArgumentParser(description="EC2 instance metadata, emulated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--role", default="swansong", help="name of the instance role")
    parser.add_argument("--v1", action="store_true", help="answer without a token, too")
    parser.add_argument("--ttl-on-get", action="store_true", help="token life on every answer")
    parser.add_argument("--scheduled-404", action="store_true", help="404 for no scheduled event")
    options = parser.parse_args()
    emulator = AwsImds(
        role=options.role,
        v1=options.v1,
        ttl_on_get=options.ttl_on_get,
        scheduled_idle=None if options.scheduled_404 else "[]",
    )
    serve(emulator, options.host, options.port)


if __name__ == "__main__":
    main()
