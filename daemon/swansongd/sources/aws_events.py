# SPDX-License-Identifier: Apache-2.0
"""The other sources of Amazon EC2: ``aws.rebalance``, ``aws.asg`` and ``aws.scheduled``.

They read a rebalance recommendation, which may have no consequence, the target lifecycle state of an Auto
Scaling group, and scheduled events, which are announced days ahead.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from swansong_bucket.model import Notice, Severity

from swansongd.core.lifecycle_hook import ASG_SOURCE
from swansongd.sources.aws import AwsSource, Imds, json_of, not_spot
from swansongd.sources.metadata import MetadataUnavailable, shortened
from swansongd.sources.polled import ClockReading, PollResult, parse_date

REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
LIFE_CYCLE_PATH = "/latest/meta-data/instance-life-cycle"
ASG_PATH = "/latest/meta-data/autoscaling/target-lifecycle-state"
SCHEDULED_PATH = "/latest/meta-data/events/maintenance/scheduled"
HISTORY_PATH = "/latest/meta-data/events/maintenance/history"

REBALANCE_S = 3600.0
"""Assumed time until the end after a recommendation, which states none."""

_ASG_ENDS = {
    "Terminated": "scale-in",
    "Warmed:Terminated": "scale-in",
    # Return to the warm pool: the VM is stopped, and its local disks are lost.
    "Warmed:Stopped": "stop",
    "Warmed:Hibernated": "hibernate",
}
_ASG_STAYS = ("InService", "Standby", "Detached", "Warmed:Running")

_EVENT_KINDS = {
    "instance-stop": "stop",
    "instance-retirement": "retirement",
    "instance-reboot": "reboot",
    "system-reboot": "reboot",
    "system-maintenance": "maintenance",
}
_EVENT_OVER = {"canceled": "canceled", "cancelled": "canceled", "completed": "completed"}


class AwsRebalanceSource(AwsSource):
    """``aws.rebalance``: the VM has an elevated risk of interruption.

    This source also renews the token and reads the life cycle for all sources of the VM, so that nothing
    delays the polls of ``aws.spot``.
    """

    name = "aws.rebalance"
    severity = Severity.ADVISORY

    def _poll(self, imds: Imds, asked: ClockReading) -> PollResult:
        answer = imds.read(REBALANCE_PATH)
        imds.renew_if_due()
        self._read_life_cycle(imds)
        notice = parse_rebalance(answer.body, asked) if answer.status == 200 else None
        return PollResult(answer, notice, unsupported=not_spot(self._session))

    def _read_life_cycle(self, imds: Imds) -> None:
        if self._session.life_cycle == "spot":  # it never changes
            return
        with contextlib.suppress(MetadataUnavailable):  # unknown: spot notices are possible
            answer = imds.read(LIFE_CYCLE_PATH)
            self._session.life_cycle = answer.text if answer.status == 200 else ""


def parse_rebalance(body: bytes, asked: ClockReading) -> Notice:
    """The advisory in the body of ``events/recommendations/rebalance``; any body is one."""
    deadline = asked.deadline(None, REBALANCE_S)
    return AwsRebalanceSource.noticed("rebalance", deadline, body.decode("utf-8", "replace"))


class AwsAsgSource(AwsSource):
    """``aws.asg``: the Auto Scaling group of this VM is about to terminate or stop it.

    The service shows the target state, but not the timeout of the lifecycle hook: that is
    ``assumed_grace_s``.
    """

    name = ASG_SOURCE

    def _poll(self, imds: Imds, asked: ClockReading) -> PollResult:
        answer = imds.read(ASG_PATH)
        state = answer.text if answer.status == 200 else ""
        if answer.status == 404 or state in _ASG_STAYS:
            reason = f"the target lifecycle state is {state or 'not set'}"
            return PollResult(answer, None, withdrawn_because=reason)
        if state not in _ASG_ENDS:
            raise MetadataUnavailable(f"unknown target lifecycle state {shortened(state, 40)!r}")
        notice = self.noticed(
            _ASG_ENDS[state],
            asked.deadline(None, self._options.assumed_grace_s),
            f"target lifecycle state {state}",
            identity=state,
        )
        return PollResult(answer, notice)


class AwsScheduledSource(AwsSource):
    """``aws.scheduled``: the earliest scheduled stop, retirement, reboot or maintenance."""

    name = "aws.scheduled"
    severity = Severity.SCHEDULED
    _event_id = ""

    def _poll(self, imds: Imds, asked: ClockReading) -> PollResult:
        answer = imds.read(SCHEDULED_PATH)
        events = _events(answer.body) if answer.status == 200 else []
        live = [event for event in events if not _over(event)]
        over: dict[str, str] = {}
        if live or self._live is not None:
            over = self._read_history(imds)
        notices = [
            (
                parse_event(event, asked.by_server_clock(answer), self._options.assumed_grace_s),
                event,
            )
            for event in live
            if _text(event, "EventId") not in over
        ]
        if notices:
            notice, event = min(notices, key=lambda item: item[0].deadline_mono_s)
            self._event_id = _text(event, "EventId")
            return PollResult(answer, notice)
        # The event may have moved to the history between the two requests.
        over = {_text(event, "EventId"): how for event in events if (how := _over(event))} | over
        how = over.get(self._event_id, "no longer listed")
        return PollResult(answer, None, withdrawn_because=f"the event is {how}")

    def _read_history(self, imds: Imds) -> dict[str, str]:
        """How past events ended, by their id; empty on failure, because it only explains a withdrawal."""
        with contextlib.suppress(MetadataUnavailable):
            answer = imds.read(HISTORY_PATH)
            if answer.status == 200:
                events = _events(answer.body)
                named = ((_text(event, "EventId"), _over(event)) for event in events)
                return {event_id: how for event_id, how in named if event_id and how}
        return {}


def parse_event(event: dict[str, Any], asked: ClockReading, assumed_grace_s: float) -> Notice:
    """The notice for one scheduled event; any field may be missing.

    The identity does not contain the date, because AWS may postpone an event.

    Args:
        asked: the time of the request, by the server's clock.
        assumed_grace_s: grace period if the date is invalid.
    """
    begins = parse_date(_text(event, "NotBefore"))
    code = _text(event, "Code")
    return AwsScheduledSource.noticed(
        _EVENT_KINDS.get(code, "maintenance"),
        asked.deadline(begins, assumed_grace_s),
        json.dumps(event),
        identity=shortened(_text(event, "EventId") or code, 100) or "unknown",
    )


def _events(body: bytes) -> list[dict[str, Any]]:
    """The events of a list.

    Raises:
        MetadataUnavailable: the body is not a list of objects, so the events are unknown.
    """
    events = json_of(body)
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise MetadataUnavailable("the scheduled events are not a list of objects")
    return events


def _over(event: dict[str, Any]) -> str:
    """How the event ended; empty while it is pending or its state is unclear."""
    tag = _text(event, "Description").partition("]")[0].removeprefix("[")
    for word in (_text(event, "State"), tag):
        if word.lower() in _EVENT_OVER:
            return _EVENT_OVER[word.lower()]
    return ""


def _text(event: dict[str, Any], key: str) -> str:
    value = event.get(key)
    return value.strip() if isinstance(value, str) else ""
