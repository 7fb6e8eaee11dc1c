# SPDX-License-Identifier: Apache-2.0
"""The bodies of webhooks, by the rules of their receivers, and templates."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swansongd.notifications.bodies import (
    Template,
    UnusableTemplate,
    of_preset,
    read_template,
)
from swansongd.observe.notifications import (
    Importance,
    Notification,
    NotificationKind,
    Origin,
    sample,
)

ORIGIN = Origin(run="my-run", vm="0123456789abcdef", host="gpu-1")
HOSTILE = '"}], <!channel> <https://evil.example|click> & \\u0022 @here $run ${step}'
RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def verdict(**facts: Any) -> Notification:
    base = replace(
        sample(1_800_000_000.0),
        key="verdict/abc/PARTIAL",
        group="evacuation/abc",
        kind=NotificationKind.VERDICT,
        summary="Verdict PARTIAL: the trainer declined",
        importance=Importance.ERROR,
        verdict="PARTIAL",
        step=120,
        generation=3,
    )
    return replace(base, **facts)


def body(preset: str, notification: Notification, *, token: str = "") -> dict[str, Any]:
    made = of_preset(preset, ORIGIN, notification, token=token)
    parsed: dict[str, Any] = json.loads(made.data)
    return parsed


def test_generic_json_has_all_fields() -> None:
    facts = body("json", verdict())
    stated = {"kind": "verdict", "verdict": "PARTIAL", "step": 120, "run": "my-run"}
    assert stated.items() <= facts.items()
    assert RFC3339.fullmatch(facts["time"])


def test_slack_has_text_and_plain_blocks_within_its_limits() -> None:
    """Incoming webhooks: ``text`` is required, a section has up to 3,000 characters."""
    facts = body("slack", verdict(summary=HOSTILE + "a" * 400))
    assert set(facts) == {"text", "blocks"}
    section, context = facts["blocks"]
    assert section["type"] == "section"
    assert section["text"]["type"] == "plain_text"
    assert 0 < len(section["text"]["text"]) <= 3000
    assert context["type"] == "context"
    assert {element["type"] for element in context["elements"]} == {"plain_text"}


@pytest.mark.fault("W07")
def test_text_of_a_trainer_makes_no_mention_and_no_link_in_slack() -> None:
    """Slack reads both between angle brackets, unless they are escaped."""
    text = body("slack", verdict(summary=HOSTILE))["text"]
    assert "<" not in text
    assert ">" not in text
    assert "&lt;!channel&gt;" in text


def test_pagerduty_has_the_required_fields() -> None:
    """Events API v2: routing_key, event_action, and payload with summary, source, severity."""
    facts = body("pagerduty", verdict(summary="x" * 2000), token="r" * 32)
    assert facts["routing_key"] == "r" * 32
    assert facts["event_action"] == "trigger"
    assert 0 < len(facts["dedup_key"]) <= 255
    payload = facts["payload"]
    assert 0 < len(payload["summary"]) <= 1024
    assert payload["source"] == "gpu-1"
    assert payload["severity"] in ("critical", "error", "warning", "info")
    assert RFC3339.fullmatch(payload["timestamp"])


def test_pagerduty_resolves_what_the_notice_triggered() -> None:
    notice = verdict(kind=NotificationKind.NOTICE, key="notice/1", verdict="")
    safe = verdict(is_over=True, verdict="SAFE")
    triggered, resolved = body("pagerduty", notice), body("pagerduty", safe)
    assert (triggered["event_action"], resolved["event_action"]) == ("trigger", "resolve")
    assert triggered["dedup_key"] == resolved["dedup_key"]


def test_cloudevents_has_the_required_attributes() -> None:
    """CloudEvents 1.0: names of lower-case letters and digits; source is a URI reference."""
    made = of_preset("cloudevents", ORIGIN, verdict())
    assert made.content_type.startswith("application/cloudevents+json")
    facts = json.loads(made.data)
    assert facts["specversion"] == "1.0"
    for name in ("id", "source", "type", "subject"):
        assert isinstance(facts[name], str)
        assert facts[name]
    assert re.fullmatch(r"[A-Za-z0-9/._~-]+", facts["source"])
    assert RFC3339.fullmatch(facts["time"])
    assert facts["datacontenttype"] == "application/json"
    assert facts["data"] == body("json", verdict())
    assert all(re.fullmatch("[a-z0-9]+", name) for name in facts)


def test_two_attempts_are_one_event_and_two_events_differ() -> None:
    first, again = (body("cloudevents", verdict()) for _ in range(2))
    other = body("cloudevents", verdict(key="verdict/abc/SAFE"))
    assert first == again
    assert first["id"] != other["id"]


# ---------------------------------------------------------------- templates


@pytest.mark.fault("W07")
def test_no_value_ends_its_string_in_a_template() -> None:
    template = Template('{"title": "$run: $summary", "step": $step, "price": "$$5"}')
    facts = json.loads(template.body(ORIGIN, verdict(summary=HOSTILE)).data)
    assert facts == {"title": f"my-run: {HOSTILE}", "step": 120, "price": "$5"}
    unknown = json.loads(template.body(ORIGIN, verdict(step=None)).data)
    assert unknown["step"] is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": "$nothing"}', "unknown placeholder 'nothing'"),
        ('{"a": $summary}', "does not become JSON"),
        ('{"a": "$"}', "does not become JSON"),
        ("hello", "does not become JSON"),
    ],
)
def test_a_template_that_cannot_work_is_refused_before_the_first_notice(
    tmp_path: Path, text: str, found: str
) -> None:
    file = tmp_path / "template.json"
    file.write_text(text)
    with pytest.raises(UnusableTemplate, match=found):
        read_template(file)


def test_a_template_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableTemplate, match="cannot be read"):
        read_template(tmp_path / "missing")
    (tmp_path / "large").write_bytes(b" " * 70_000)
    with pytest.raises(UnusableTemplate, match="has over 65536 bytes"):
        read_template(tmp_path / "large")
