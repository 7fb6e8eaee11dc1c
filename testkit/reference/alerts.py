# SPDX-License-Identifier: Apache-2.0
"""The alerts, from the rules of Prometheus and the comments around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from testkit import REPOSITORY
from testkit.reference.markup import filled, linked, sentences

RULES = REPOSITORY / "monitoring/prometheus/swansong.rules.yml"
_RULE = re.compile(r"((?: {6}# .*\n)*) {6}- alert: (\w+)\n(?: {8}(?!#).*\n)*((?: {8}# .*\n)*)")
_HOLD = {"s": "s", "m": "min", "h": "h"}


@dataclass(frozen=True, slots=True)
class _Alert:
    name: str
    severity: str
    hold: str
    summary: str
    description: str
    reason: str
    action: str


def _alerts() -> Iterator[_Alert]:
    text = RULES.read_text(encoding="utf-8")
    comments = {
        name: (_prose(before), _prose(after)) for before, name, after in _RULE.findall(text)
    }
    for group in yaml.safe_load(text)["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                reason, action = comments[rule["alert"]]
                assert action, (
                    f"{rule['alert']}: a comment after the annotations explains what to do"
                )
                yield _Alert(
                    name=rule["alert"],
                    severity=rule["labels"]["severity"],
                    hold=rule.get("for", ""),
                    summary=_without_values(rule["annotations"]["summary"]),
                    description=_without_values(rule["annotations"]["description"]),
                    reason=reason,
                    action=action,
                )


def _prose(comment: str) -> str:
    return " ".join(line.strip().removeprefix("# ") for line in comment.splitlines())


def _without_values(text: str) -> str:
    """The text with the names of labels in the place of their values."""
    words = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda label: label[1].upper(), text)
    return re.sub(r"\{\{ \$value.*?\}\}B?", "N", words)


def page() -> str:
    """docs/reference/alerts.md."""
    alerts = list(_alerts())
    return filled(
        "alerts.md",
        pages="\n\n".join(_section(each) for each in alerts if each.severity == "page"),
        tickets="\n\n".join(_section(each) for each in alerts if each.severity == "ticket"),
    )


def _section(alert: _Alert) -> str:
    consequence, first, command = re.split(r"(First command[^:]*): ", alert.description)
    hold = (
        f"The condition must hold for {alert.hold[:-1]} {_HOLD[alert.hold[-1]]}."
        if alert.hold
        else ""
    )
    parts = [
        f"### {alert.name}",
        f"**{alert.summary}.**\n{sentences(consequence)}",
        f"{first}:\n\n```\n{command.replace(', or ', chr(10))}\n```",
        _with_alerts(sentences(alert.action)),
        _with_alerts(sentences(f"{hold} {alert.reason}")),
    ]
    return "\n\n".join(part for part in parts if part)


def _with_alerts(text: str) -> str:
    """A link for each alert that the text names."""
    name = r"\bSwansong[A-Z]\w+"
    return re.sub(name, lambda found: f"[{found[0]}](#{found[0].lower()})", linked(text))
