# SPDX-License-Identifier: Apache-2.0
"""The section ``[notify]``: webhook, heartbeat and command of the operator."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from swansong_bucket.config import values as read
from swansong_bucket.config.values import InvalidValue, key

KINDS = ("notice", "verdict", "stall", "blind", "margin", "metrics", "resumption", "redone")
PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"
_URL_CHARS_MAX = 2048
_KINDS_REMEDY = f"give a list of {', '.join(KINDS)}"
_ARGUMENTS_MAX = 64
_ARGUMENT_CHARS_MAX = 4096


def url(value: object) -> str:
    """An address for notifications.  It may contain a secret, so that errors do not show it."""
    remedy = "give https://HOST/PATH, or http://127.0.0.1:PORT/PATH for a receiver on this VM"
    text = value if isinstance(value, str) else ""
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and parts.hostname
        is_port = parts.port is None or parts.port > 0
    except ValueError:
        is_address, is_port = "", False
    is_plain = text.isascii() and text.isprintable() and " " not in text
    if not (is_address and is_port and is_plain and len(text) <= _URL_CHARS_MAX):
        raise InvalidValue("is not an HTTP address", remedy, shown="***")
    if "@" in parts.netloc:
        remedy = "put a token into notify.token_file"
        raise InvalidValue("contains a user name or password", remedy, shown="***")
    return text


def is_encrypted_or_local(address: str) -> bool:
    """Whether no other machine can read the requests to this address on their way."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    if parts.scheme == "https" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def secret_file(value: object) -> str:
    """An absolute path, or ``credential:NAME`` for a credential of systemd."""
    remedy = "give an absolute path, or credential:NAME for a LoadCredential= of the unit"
    text = value if isinstance(value, str) else ""
    if re.fullmatch(r"credential:[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", text):
        return text
    try:
        return str(read.path(value))
    except InvalidValue:
        raise InvalidValue("is not a secret file", remedy, shown="***") from None


def kind_list(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidValue("is not a list of strings", _KINDS_REMEDY)
    unknown = [item for item in value if item not in KINDS]
    if unknown:
        raise InvalidValue(f"contains {unknown[0]!r:.40}, which is not a kind", _KINDS_REMEDY)
    return tuple(value)


def command(value: object) -> tuple[str, ...]:
    """A program with its arguments; no shell interprets them."""
    remedy = 'give a list such as ["/usr/local/bin/replace-vm", "--group", "trainers"]'
    is_list = isinstance(value, list) and len(value) <= _ARGUMENTS_MAX
    words = list(value) if is_list and isinstance(value, list) else [None]
    is_text = all(isinstance(word, str) and "\0" not in word for word in words)
    if not is_text or any(len(str(word)) > _ARGUMENT_CHARS_MAX for word in words):
        raise InvalidValue("is not a list of strings", remedy)
    if words and (not str(words[0]).startswith("/") or "=" in str(words[0])):
        raise InvalidValue("does not begin with the absolute path of a program", remedy)
    return tuple(str(word) for word in words)


_section = dataclass(frozen=True, slots=True, kw_only=True)


@_section
class NotifyConfig:
    """Receivers of notifications: see docs/operations/notifications.md."""

    webhook_url: str | None = key(
        url,
        None,
        about="Address that receives notifications by POST: https, or http on this VM. An address "
        "with a secret, such as Slack's, belongs in a file.",
        unset="no webhook",
        example="https://events.example.org/swansong",
    )
    webhook_url_file: str | None = key(
        secret_file,
        None,
        about="File with that address. `credential:NAME` names a `LoadCredential=` of the unit; "
        "any other file must be readable only by the daemon's user.",
        unset="no webhook",
        example="credential:notify-webhook",
    )
    preset: Literal["json", "slack", "pagerduty", "cloudevents"] = key(
        read.one_of("json", "slack", "pagerduty", "cloudevents"),
        "json",
        about="Format: `json`, `slack`, `pagerduty` or `cloudevents`. The address of `pagerduty` "
        "is known.",
    )
    template_file: Path | None = key(
        read.path,
        None,
        about="JSON with placeholders such as `$summary`, in place of the format of the preset.",
        unset="the preset's format",
        example="/etc/swansong/notify.json",
    )
    token_file: str | None = key(
        secret_file,
        None,
        about='File with a token, sent as "Authorization: Bearer TOKEN"; for `pagerduty` the '
        "routing key. It has the same forms as `notify.webhook_url_file`.",
        unset="no token",
        example="credential:notify-token",
    )
    kinds: tuple[str, ...] = key(kind_list, list(KINDS), about="Events to send.")
    ca_bundle: Path | None = key(
        read.path,
        None,
        about="PEM file of the certificate authorities to trust for webhook and heartbeat.",
        unset="the system's",
        example="/etc/ssl/certs/our-ca.pem",
    )
    allow_http: bool = key(
        read.yes_or_no,
        False,
        about="Send to other machines over plain http, too.",
    )
    heartbeat_url: str | None = key(
        url,
        None,
        about="Address that is called by GET while all is well, for a service that raises an "
        "alarm when a call is missing.",
        unset="no heartbeat",
        example="http://127.0.0.1:8080/ping",
    )
    heartbeat_url_file: str | None = key(
        secret_file,
        None,
        about="File with that address. It has the same forms as `notify.webhook_url_file`.",
        unset="no heartbeat",
        example="credential:notify-heartbeat",
    )
    heartbeat_interval_s: float = key(read.duration, "5m", about="Interval of these calls.")
    exec: tuple[str, ...] = key(
        command,
        [],
        about="Program with arguments that runs at an event, with the facts in its environment, "
        "for example to order the replacement of this VM. It runs as the daemon's user in the "
        "daemon's sandbox, without a shell. See docs/operations/replacement.md.",
    )
    exec_on: tuple[str, ...] = key(kind_list, ["notice"], about="Events at which it runs.")
    exec_timeout_s: float = key(
        read.duration,
        "1m",
        about="Time after which the program is killed, with all its children.",
    )

    @property
    def has_webhook(self) -> bool:
        return bool(self.webhook_url or self.webhook_url_file or self.preset == "pagerduty")

    @property
    def has_heartbeat(self) -> bool:
        return bool(self.heartbeat_url or self.heartbeat_url_file)

    @property
    def has_receiver(self) -> bool:
        return bool(self.has_webhook or self.has_heartbeat or self.exec)


def conflicts(values: Mapping[str, Any]) -> list[str]:
    """Conflicts between values that are each valid, one line each."""
    problems = []
    for name in ("webhook_url", "heartbeat_url"):
        address = values.get(name)
        if address and values.get(f"{name}_file"):
            problems.append(f"notify.{name}: must not be set together with notify.{name}_file")
        if address and not values.get("allow_http") and not is_encrypted_or_local(address):
            problems.append(
                f"notify.{name}: would send without encryption; use https, or set notify.allow_http"
            )
    if values.get("preset") == "pagerduty" and not values.get("token_file"):
        problems.append(
            "notify.token_file: is missing (got nothing); "
            "the preset pagerduty needs the file with the routing key"
        )
    if values.get("preset", "json") != "json" and values.get("template_file"):
        problems.append("notify.template_file: must not be set together with notify.preset")
    has_webhook = values.get("webhook_url") or values.get("webhook_url_file")
    if values.get("preset", "json") not in ("json", "pagerduty") and not has_webhook:
        problems.append(f"notify.preset: {values['preset']} needs notify.webhook_url_file")
    return problems
