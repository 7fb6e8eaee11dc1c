# SPDX-License-Identifier: Apache-2.0
"""Azure's Scheduled Events: ``azure.deletion`` and ``azure.scheduled``.

The service returns one document with the events of this VM and of others of its scale set or availability
set.  It is switched on by the first request, whose answer can take two minutes, and off after a day without
requests.  An event that is over is no longer in the document.

A freeze pauses the VM for seconds and loses nothing, so it is no notice.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import dataclass

import structlog
from swansong import bounds
from swansong.bounds import BoundsError
from swansong_bucket.model import DeadlineQuality, Notice, Severity
from swansong_bucket.util.forms import Form, Kind, Named, or_else, several, text

from swansongd.sources.metadata import (
    MAX_BODY_BYTES,
    MetadataClient,
    MetadataResponse,
    MetadataUnavailable,
    shortened,
)
from swansongd.sources.polled import (
    ClockReading,
    PolledSource,
    Poller,
    PollOptions,
    PollResult,
    parse_date,
)

EVENTS_PATH = "/metadata/scheduledevents"
NAME_PATH = "/metadata/instance/compute/name"
_PARAMETERS = {
    EVENTS_PATH: {"api-version": "2020-07-01"},
    NAME_PATH: {"api-version": "2021-02-01", "format": "text"},
}
NOTICE_S = 30.0
"""Shortest time between the event of an eviction and the end; Azure may also evict without an event."""

_HEADERS = {"Metadata": "true"}
_EVENTS_MAX, _RESOURCES_MAX = 1000, 2000
_DELETIONS = {"Preempt": "reclaim", "Terminate": "scale-in"}
_FREEZE = "Freeze"
_INTERRUPTIONS = {"Reboot": "reboot", "Redeploy": "redeploy"}
"""Other types than these, the freeze and the deletions count as maintenance."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AzureEvent:
    """One event."""

    id: str
    type: str
    resources: tuple[str, ...]
    """Names of the VMs; none if the event does not name them."""
    is_started: bool
    not_before: str
    """Empty once the event has started."""
    description: str

    def concerns(self, name: str) -> bool:
        return not self.resources or name.lower() in map(str.lower, self.resources)


def _is_started(value: object, name: str) -> bool:
    return bounds.text(value, name) == "Started"


def parse_events(body: bytes) -> list[AzureEvent]:
    """The events of a document.

    Raises:
        MetadataUnavailable: the body is not such a document, so the events are unknown.
    """
    try:
        document = bounds.json_object(body, "the document of events", MAX_BODY_BYTES)
        events = bounds.items(document.get("Events"), "Events", _EVENTS_MAX)
        return [_EVENT.read(each, "an event") for each in events]
    except BoundsError as error:
        raise MetadataUnavailable(shortened(str(error))) from None


_EVENT = Form(
    AzureEvent,
    EventId=Named("id", text()),
    EventType=Named("type", text()),
    Resources=Named("resources", or_else(several(text(), _RESOURCES_MAX), ())),
    EventStatus=Named("is_started", or_else(Kind(_is_started), False)),
    NotBefore=Named("not_before", or_else(text(), "")),
    Description=Named("description", or_else(text(), "")),
)


class AzureSource(PolledSource):
    """Base of both: the nearest event of this VM that the subclass is for.

    Args:
        options: of the source.
        approves: whether an event that names this VM only is approved after SAFE, so that Azure need not
            wait for its time.
    """

    cloud = "azure"

    def __init__(self, options: PollOptions, *, approves: bool = False) -> None:
        super().__init__(options)
        self._approves = approves
        self._vm_name = ""
        self._settled: frozenset[str] = frozenset()
        self._approved: set[str] = set()

    @abstractmethod
    def kind_of(self, event: AzureEvent) -> str:
        """The kind of the notice; empty if the event is not for this source."""

    def settle(self, identities: frozenset[str]) -> None:
        """These notices have got SAFE: the next poll approves their events.  From any thread."""
        self._settled = identities

    def poller(self, client: MetadataClient) -> Poller:
        def poll(asked: ClockReading) -> PollResult:
            answer = _checked(get(client, EVENTS_PATH))
            if not self._vm_name:
                self._vm_name = _checked(get(client, NAME_PATH)).text
            events = [
                each
                for each in parse_events(answer.body)
                if self.kind_of(each) and each.concerns(self._vm_name)
            ]
            self._approve(client, events)
            found = [self._notice(each, asked.by_server_clock(answer)) for each in events]
            nearest = min(found, key=lambda notice: notice.deadline_mono_s, default=None)
            return PollResult(answer, nearest, withdrawn_because="the event is over or withdrawn")

        return poll

    def _identity(self, event: AzureEvent) -> str:
        return f"{self.name}:{shortened(event.id, 100)}"

    def _notice(self, event: AzureEvent, asked: ClockReading) -> Notice:
        identity = self._identity(event)
        live = self._live
        if event.is_started and live is not None and live.identity == identity:
            return live
        begins = parse_date(event.not_before)
        left_s = -1.0 if begins is None else begins.timestamp() - asked.wall_s
        # One that has started, states no valid time, or is late: a clock may be wrong.
        is_stated = left_s > 0
        grace_s = left_s if is_stated else self._options.assumed_grace_s
        quality = DeadlineQuality.STATED if is_stated else DeadlineQuality.ASSUMED
        return self.noticed(
            self.kind_of(event),
            (asked.mono_s + grace_s, quality),
            f"{event.type}: {event.description}",
            identity=shortened(event.id, 100),
        )

    def _approve(self, client: MetadataClient, events: list[AzureEvent]) -> None:
        for event in events if self._approves else ():
            is_due = self._identity(event) in self._settled
            if not is_due or event.is_started or event.id in self._approved:
                continue
            self._approved.add(event.id)
            if len(event.resources) != 1:
                _log.info("event_not_approved", id=event.id, reason="it names other VMs, too")
                continue
            body = json.dumps({"StartRequests": [{"EventId": event.id}]}).encode()
            try:
                parameters = _PARAMETERS[EVENTS_PATH]
                _checked(
                    client.request(
                        "POST", EVENTS_PATH, headers=_HEADERS, params=parameters, body=body
                    )
                )
            except MetadataUnavailable as error:
                self._approved.discard(event.id)  # the next poll tries again
                _log.warning("event_not_approved", id=event.id, reason=str(error))
            else:
                _log.info("event_approved", id=event.id)


class AzureDeletionSource(AzureSource):
    """``azure.deletion``: this VM is being deleted, as a Spot VM or by its scale set."""

    name = "azure.deletion"

    def kind_of(self, event: AzureEvent) -> str:
        return _DELETIONS.get(event.type, "")


class AzureScheduledSource(AzureSource):
    """``azure.scheduled``: a reboot, a move to another host, or other maintenance."""

    name = "azure.scheduled"
    severity = Severity.SCHEDULED

    def kind_of(self, event: AzureEvent) -> str:
        if event.type in _DELETIONS or event.type == _FREEZE:
            return ""
        return _INTERRUPTIONS.get(event.type, "maintenance")


def get(client: MetadataClient, path: str) -> MetadataResponse:
    """GET one of the two paths; returns a response of any status."""
    return client.request("GET", path, headers=_HEADERS, params=_PARAMETERS[path])


def _checked(answer: MetadataResponse) -> MetadataResponse:
    if answer.status != 200:
        raise MetadataUnavailable(f"the metadata service returned HTTP {answer.status}")
    return answer
