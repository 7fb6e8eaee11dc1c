# SPDX-License-Identifier: Apache-2.0
"""The bodies of webhooks: generic JSON, Slack, PagerDuty, CloudEvents, or a template of the operator.

Sources of the formats:

- Slack, incoming webhooks and message formatting: https://docs.slack.dev/messaging
- PagerDuty, Events API v2: https://developer.pagerduty.com/docs/events-api-v2/trigger-events/
- CloudEvents 1.0.2, JSON format, structured mode: https://github.com/cloudevents/spec
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swansong_bucket.errors import SwansongError

from swansongd.observe.notifications import Notification, Origin, fields, sample

JSON = "application/json; charset=utf-8"
CLOUDEVENTS = "application/cloudevents+json; charset=utf-8"
_TEMPLATE_BYTES_MAX = 2**16


class UnusableTemplate(SwansongError):
    """The template of the operator cannot be read, or does not become JSON."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class WebhookBody:
    """The body of a request, and its type."""

    data: bytes
    content_type: str = JSON


def of_preset(
    preset: str, origin: Origin, notification: Notification, *, token: str = ""
) -> WebhookBody:
    """The body in one of the known formats.

    Args:
        token: routing key for ``pagerduty``.
    """
    facts = fields(origin, notification)
    if preset == "slack":
        return _encoded(_slack(facts))
    if preset == "pagerduty":
        return _encoded(_pagerduty(facts, token))
    if preset == "cloudevents":
        return WebhookBody(_encoded(_cloudevent(facts)).data, CLOUDEVENTS)
    return _encoded(facts)


def _encoded(body: Mapping[str, object]) -> WebhookBody:
    return WebhookBody(json.dumps(body, allow_nan=False).encode())


def _slack(facts: Mapping[str, object]) -> dict[str, object]:
    """Text of trainers and sources is plain text, in which Slack finds no links and no mentions."""
    summary = str(facts["summary"])
    shown = [
        f"{name} {facts[name]}"
        for name in ("run", "generation", "step", "host")
        if facts[name] is not None
    ]
    context = {"type": "plain_text", "text": ", ".join(shown)[:2000], "emoji": False}
    return {
        "text": _slack_escaped(f"{facts['run']}: {summary}"),
        "blocks": [
            {"type": "section", "text": {"type": "plain_text", "text": summary, "emoji": False}},
            {"type": "context", "elements": [context]},
        ],
    }


def _slack_escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _pagerduty(facts: Mapping[str, object], routing_key: str) -> dict[str, object]:
    """All notices and verdicts of a VM are one incident, which SAFE or the end of all notices resolves."""
    return {
        "routing_key": routing_key,
        "event_action": "resolve" if facts["over"] else "trigger",
        "dedup_key": facts["group"],
        "client": "swansong",
        "payload": {
            "summary": f"{facts['run']}: {facts['summary']}"[:1024],
            "source": facts["host"],
            "severity": facts["severity"],
            "timestamp": facts["time"],
            "component": "swansongd",
            "group": facts["run"],
            "class": facts["kind"],
            "custom_details": dict(facts),
        },
    }


def _cloudevent(facts: Mapping[str, object]) -> dict[str, object]:
    return {
        "specversion": "1.0",
        "id": facts["id"],
        "source": f"/swansong/{facts['run']}/{facts['vm']}",
        "type": f"swansong.{facts['kind']}",
        "subject": facts["group"],
        "time": facts["time"],
        "datacontenttype": "application/json",
        "data": dict(facts),
    }


# ---------------------------------------------------------------- templates


class Template:
    """A JSON body with placeholders such as ``$summary``, which stand between quotes or for a number.

    Text is escaped for a JSON string, so no value can end its string.  Unknown values are ``null``.

    Raises:
        UnusableTemplate: it has an unknown placeholder, or does not become JSON.
    """

    def __init__(self, text: str) -> None:
        self._template = string.Template(text)
        origin = Origin(run='a "run"', vm="vm", host="host")
        quoted = sample(0.0)
        try:
            json.loads(self.body(origin, quoted).data)
        except KeyError as error:
            names = ", ".join(fields(origin, quoted))
            raise UnusableTemplate(
                f"the template has the unknown placeholder {error}", hint=f"Use one of {names}"
            ) from None
        except ValueError as error:
            raise UnusableTemplate(
                f"the template does not become JSON: {error}",
                hint="Put text placeholders between quotes, and write $$ for a dollar sign",
            ) from None

    def body(self, origin: Origin, notification: Notification) -> WebhookBody:
        values = {
            name: json.dumps(value)[1:-1] if isinstance(value, str) else json.dumps(value)
            for name, value in fields(origin, notification).items()
        }
        return WebhookBody(self._template.substitute(values).encode())


def read_template(path: Path) -> Template:
    """The template in this file.

    Raises:
        UnusableTemplate: it cannot be read, or is not valid.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_TEMPLATE_BYTES_MAX + 1)
    except OSError as error:
        raise UnusableTemplate(
            f"notify.template_file cannot be read: {error.strerror}", hint=f"Check {path}"
        ) from None
    if len(data) > _TEMPLATE_BYTES_MAX:
        raise UnusableTemplate(f"{path} has over {_TEMPLATE_BYTES_MAX} bytes")
    try:
        return Template(data.decode())
    except UnicodeDecodeError:
        raise UnusableTemplate(f"{path} is not UTF-8") from None
