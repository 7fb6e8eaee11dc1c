# SPDX-License-Identifier: Apache-2.0
"""What Compute Engine announces besides preemption: maintenance of the host, and a stop on order."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from swansongd.model import DeadlineQuality, Notice, Severity
from swansongd.sources.aws import Moment
from swansongd.sources.gcp import GcpSource, Sight, get
from swansongd.sources.metadata import (
    MetadataClient,
    MetadataUnavailable,
    fallback_url,
    shortened,
)

GPU_MAINTENANCE_S = 3600.0
"""How far ahead Compute Engine announces maintenance of a host with GPUs."""

_DETAILS_TIMEOUT_S = 1.0
_SHUTDOWN_DETAILS = "/computeMetadata/v1/instance/shutdown-details/"
_ENDS = ("TERMINATE_ON_HOST_MAINTENANCE", "SHUTDOWN_ON_HOST_MAINTENANCE")


class _TimedSource(GcpSource):
    """A source whose notices state their time."""

    def _deadline(
        self, sight: Sight, stated: datetime | None, plus_s: float = 0.0
    ) -> tuple[float, DeadlineQuality]:
        """``plus_s`` after a stated time, by the server's clock; now if that has passed."""
        now = Moment(self._monotonic(), self._wall()).fixed(sight.answer)
        if stated is None:
            return now.mono_s + self._options.grace_s, DeadlineQuality.ASSUMED
        left_s = stated.timestamp() + plus_s - now.wall_s
        quality = DeadlineQuality.STATED if left_s >= 0 else DeadlineQuality.DERIVED
        return now.mono_s + max(0.0, left_s), quality


class GcpMaintenanceSource(_TimedSource):
    """``gcp.maintenance``: the host will be serviced, and the VM stopped for it.

    A live migration is none of our business: the VM goes on.  Watching is what buys the notice: a VM
    that does not read the key is taken not to want any.  ``grace_s`` counts from the first sight.
    """

    name = "gcp.maintenance"
    key = "instance/maintenance-event"

    def is_idle(self, sight: Sight) -> bool:
        idle = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE")
        return sight.answer.status == 200 and sight.text.upper() in idle

    def read(self, sight: Sight) -> Notice:
        if sight.text.upper() not in _ENDS:
            raise MetadataUnavailable(
                f"maintenance-event is an unknown word: {shortened(sight.text, 60)}"
            )
        # Without the flip having been seen part of the hour may have gone by: only assumed then.
        quality = DeadlineQuality.DERIVED if sight.is_fresh else DeadlineQuality.ASSUMED
        return Notice(
            source=self.name,
            kind="host-maintenance",
            identity=self._identity,
            severity=Severity.SCHEDULED,
            deadline_mono_s=self._monotonic() + self._options.grace_s,
            deadline_quality=quality,
            detail=f"maintenance-event is {sight.text}",
        )


class GcpUpcomingSource(_TimedSource):
    """``gcp.upcoming``: maintenance of the host in a window that begins hours or days ahead.

    ``grace_s`` is for a window whose begin is not stated, or not understandably.
    """

    name = "gcp.upcoming"
    key = "instance/upcoming-maintenance"
    parameters = {"alt": "json", "recursive": "true"}  # noqa: RUF012 - declared ClassVar above
    pace_s = 10.0

    def is_idle(self, sight: Sight) -> bool:
        body = _object(sight)
        if body == "NONE":
            return sight.answer.status == 200
        if not isinstance(body, dict):
            return False
        # "No notifications yet" may come as an error.  It cannot take back what was announced before.
        refused = isinstance(body.get("error"), str)
        if sight.answer.status == 503:
            return refused and self._live is None
        return sight.answer.status == 200 and (refused or not body)

    def read(self, sight: Sight) -> Notice:
        body = _object(sight)
        fields = body if isinstance(body, dict) else {}
        kind, status = fields.get("type"), fields.get("maintenancestatus")
        begin = next(
            (fields[name] for name in ("windowstarttime", "starttime") if name in fields), None
        )
        if kind is None and status is None and begin is None:
            raise MetadataUnavailable(
                f"upcoming-maintenance is not understood: {shortened(sight.text, 60)}"
            )
        stated = _instant(begin)
        deadline_mono_s, quality = self._deadline(sight, stated)
        return Notice(
            source=self.name,
            kind="host-maintenance",
            identity=f"{self.name}:{shortened(str(kind), 40)}",
            severity=Severity.SCHEDULED,
            deadline_mono_s=deadline_mono_s,
            deadline_quality=quality,
            detail=shortened(sight.text),
        )


class GcpStopSource(_TimedSource):
    """``gcp.stop``: somebody stops or deletes the VM, and it was created with a graceful shutdown.

    The key appears with the stop, so 404 is the idle value.  ``grace_s`` is for a stop whose length is
    not told.
    """

    name = "gcp.stop"
    key = "instance/shutdown-details/stop-state"
    pace_s = 5.0

    def is_idle(self, sight: Sight) -> bool:
        if sight.answer.status == 404:
            return True
        word = sight.text.upper()
        return sight.answer.status == 200 and (
            word in ("", "NONE") or "UNSPECIFIED" in word or "UNKNOWN" in word
        )

    def read(self, sight: Sight) -> Notice:
        if sight.text.upper() != "PENDING_STOP":
            raise MetadataUnavailable(f"stop-state is an unknown word: {shortened(sight.text, 60)}")
        length_s, requested = (None, None) if self._live else self._details()
        if length_s is not None and requested is None and sight.is_fresh:
            deadline_mono_s, quality = self._monotonic() + length_s, DeadlineQuality.DERIVED
        elif length_s is not None:
            deadline_mono_s, quality = self._deadline(sight, requested, length_s)
        else:
            deadline_mono_s, quality = self._deadline(sight, None)
        return Notice(
            source=self.name,
            kind="stop",
            identity=self._identity,
            severity=Severity.IMMINENT,
            deadline_mono_s=deadline_mono_s,
            deadline_quality=quality,
            detail=f"stop-state is {sight.text}",
        )

    def _details(self) -> tuple[float | None, datetime | None]:
        """How long the stop may take, and when it was ordered; what cannot be had quickly is None."""
        texts = []
        fallback = fallback_url(self._options.metadata_url, "gcp")
        with MetadataClient(
            self._options.metadata_url, timeout_s=_DETAILS_TIMEOUT_S, fallback_url=fallback
        ) as client:
            for name in ("max-duration", "request-timestamp"):
                try:
                    answer = get(client, _SHUTDOWN_DETAILS + name)
                except MetadataUnavailable:
                    return None, None
                texts.append(answer.body.decode("utf-8", "replace") if answer.status == 200 else "")
        return _seconds(texts[0]), _instant(texts[1])


def _object(sight: Sight) -> Any:
    """The answer as JSON, names of fields in lower case without ``_`` and ``-``; or as a plain word."""
    try:
        body = json.loads(sight.text)
    except (ValueError, RecursionError):
        return sight.text.upper()
    if isinstance(body, dict):
        return {name.replace("_", "").replace("-", "").lower(): body[name] for name in body}
    return body.upper() if isinstance(body, str) else None


def _instant(value: object) -> datetime | None:
    """An instant in UTC, from RFC 3339 or from seconds since 1970; None where it is neither."""
    text = str(value).strip().strip('"')
    try:
        if text.isdecimal():
            return datetime.fromtimestamp(int(text), UTC)
        stated = datetime.fromisoformat(text)
        return stated.replace(tzinfo=stated.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _seconds(text: str) -> float | None:
    """A duration such as ``600`` or ``600s``; None where it is none."""
    number = text.strip().strip('"').removesuffix("s")
    return float(number) if number.isdecimal() and len(number) <= 6 else None
