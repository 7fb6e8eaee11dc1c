# SPDX-License-Identifier: Apache-2.0
"""The other sources of Compute Engine: maintenance of the host, and a requested stop."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from swansong_bucket.model import DeadlineQuality, Notice, Severity

from swansongd.sources.gcp import GcpSource, WatchResult, get
from swansongd.sources.metadata import (
    MetadataClient,
    MetadataUnavailable,
    shortened,
)
from swansongd.sources.polled import parse_time

GPU_MAINTENANCE_S = 3600.0
"""Time between the announcement and the maintenance of a host with GPUs."""

_DETAILS_TIMEOUT_S = 1.0
_SHUTDOWN_DETAILS = "/computeMetadata/v1/instance/shutdown-details/"
_ENDS = ("TERMINATE_ON_HOST_MAINTENANCE", "SHUTDOWN_ON_HOST_MAINTENANCE")


class GcpMaintenanceSource(GcpSource):
    """``gcp.maintenance``: maintenance of the host, for which the VM is stopped.

    A live migration raises no notice, because the VM keeps running.  Compute Engine gives the notice only to
    VMs that watch the key.  ``grace_s`` counts from the first response with the event.
    """

    name = "gcp.maintenance"
    severity = Severity.SCHEDULED
    key = "instance/maintenance-event"

    def is_idle(self, result: WatchResult) -> bool:
        idle = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE")
        return result.answer.status == 200 and result.text.upper() in idle

    def read(self, result: WatchResult) -> Notice:
        if result.text.upper() not in _ENDS:
            raise MetadataUnavailable(
                f"unknown value of maintenance-event: {shortened(result.text, 60)}"
            )
        # If the change was not observed, part of the hour may have passed: assumed, and not derived.
        quality = DeadlineQuality.DERIVED if result.is_change else DeadlineQuality.ASSUMED
        return self.noticed(
            "host-maintenance",
            (self._monotonic() + self._options.assumed_grace_s, quality),
            f"maintenance-event is {result.text}",
            identity=self._options.boot_id,
        )


class GcpUpcomingSource(GcpSource):
    """``gcp.upcoming``: maintenance of the host in a window that begins in hours or days.

    ``grace_s`` counts if the window has no valid start time.
    """

    name = "gcp.upcoming"
    severity = Severity.SCHEDULED
    key = "instance/upcoming-maintenance"
    parameters = {"alt": "json", "recursive": "true"}  # noqa: RUF012 - declared ClassVar above
    pace_s = 10.0

    def is_idle(self, result: WatchResult) -> bool:
        body = _object(result)
        if body == "NONE":
            return result.answer.status == 200
        if not isinstance(body, dict):
            return False
        # "No notifications yet" may come with an error status.  It must not withdraw an earlier notice.
        refused = isinstance(body.get("error"), str)
        if result.answer.status == 503:
            return refused and self._live is None
        return result.answer.status == 200 and (refused or not body)

    def read(self, result: WatchResult) -> Notice:
        body = _object(result)
        fields = body if isinstance(body, dict) else {}
        kind, status = fields.get("type"), fields.get("maintenancestatus")
        begin = next(
            (fields[name] for name in ("windowstarttime", "starttime") if name in fields), None
        )
        if kind is None and status is None and begin is None:
            raise MetadataUnavailable(
                f"upcoming-maintenance has no known field: {shortened(result.text, 60)}"
            )
        return self.noticed(
            "host-maintenance",
            self._deadline(result, _instant(begin)),
            result.text,
            identity=shortened(str(kind), 40),
        )


class GcpStopSource(GcpSource):
    """``gcp.stop``: a stop or deletion of a VM that was created with graceful shutdown.

    The key appears with the stop, so 404 is the idle value.  ``grace_s`` counts if the server does not return
    the duration.
    """

    name = "gcp.stop"
    key = "instance/shutdown-details/stop-state"
    pace_s = 5.0

    def is_idle(self, result: WatchResult) -> bool:
        if result.answer.status == 404:
            return True
        word = result.text.upper()
        return result.answer.status == 200 and (
            word in ("", "NONE") or "UNSPECIFIED" in word or "UNKNOWN" in word
        )

    def read(self, result: WatchResult) -> Notice:
        if result.text.upper() != "PENDING_STOP":
            raise MetadataUnavailable(f"unknown value of stop-state: {shortened(result.text, 60)}")
        length_s, requested = (None, None) if self._live else self._details()
        if length_s is not None and requested is None and result.is_change:
            deadline = self._monotonic() + length_s, DeadlineQuality.DERIVED
        elif length_s is not None:
            deadline = self._deadline(result, requested, length_s)
        else:
            deadline = self._deadline(result, None)
        detail = f"stop-state is {result.text}"
        return self.noticed("stop", deadline, detail, identity=self._options.boot_id)

    def _details(self) -> tuple[float | None, datetime | None]:
        """The longest duration of the stop, and the time of its request; None where unavailable."""
        texts = []
        with MetadataClient(
            self._options.metadata_url, timeout_s=_DETAILS_TIMEOUT_S, cloud=self.cloud
        ) as client:
            for name in ("max-duration", "request-timestamp"):
                try:
                    answer = get(client, _SHUTDOWN_DETAILS + name)
                except MetadataUnavailable:
                    return None, None
                texts.append(answer.text if answer.status == 200 else "")
        return _seconds(texts[0]), _instant(texts[1])


def _object(result: WatchResult) -> Any:
    """The value as JSON, with field names in lower case without ``_`` and ``-``; or as an upper-case word."""
    try:
        body = json.loads(result.text)
    except (ValueError, RecursionError):
        return result.text.upper()
    if isinstance(body, dict):
        return {name.replace("_", "").replace("-", "").lower(): body[name] for name in body}
    return body.upper() if isinstance(body, str) else None


def _instant(value: object) -> datetime | None:
    """An instant in UTC, from RFC 3339 or from seconds since 1970; None if it is neither."""
    text = str(value).strip().strip('"')
    if not text.isdecimal():
        return parse_time(text)
    try:
        return datetime.fromtimestamp(int(text), UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _seconds(text: str) -> float | None:
    """A duration such as ``600`` or ``600s``; None if it is not one."""
    number = text.strip().strip('"').removesuffix("s")
    return float(number) if number.isdecimal() and len(number) <= 6 else None
