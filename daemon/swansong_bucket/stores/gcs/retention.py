# SPDX-License-Identifier: Apache-2.0
"""Object retention of GCS: of new objects, and its extension."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from swansong.bounds import json_object, mapping

from swansong_bucket.errors import Exists, Forbidden, NotFound, Permanent
from swansong_bucket.stores import responses
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.http.client import RESPONSE_BYTES_MAX, Response
from swansong_bucket.stores.retention import Lock, Retention, StoreClock, instant, stamp

_RIGHT = "Grant the role of packer/permissions/gcp-vm-lock.yaml on the bucket"
_ENABLE = (
    "Turn on object retention for the bucket, or create one that has it: "
    "`gcloud storage buckets create gs://NEW --enable-per-object-retention`; or set store.lock_days = 0"
)


class GcsCall(Protocol):
    """Sends a request to the JSON interface for an object, or with key None for the bucket."""

    def __call__(
        self,
        what: str,
        method: str,
        key: str | None,
        parameters: Mapping[str, str] | None = None,
        *,
        body: Body | None = None,
    ) -> Response: ...


class GcsRetention(Retention):
    """The retention of the objects of one bucket of GCS.

    Args:
        call: sends requests.
    """

    def __init__(
        self, lock: Lock | None, has_lock: Callable[[], bool], clock: StoreClock, call: GcsCall
    ) -> None:
        super().__init__(lock, has_lock, clock)
        self._call = call

    def headers(self, key: str) -> dict[str, str]:
        """Headers of the request to the XML interface that creates an object."""
        until = self._end(key)
        if self._lock is None or until is None:
            return {}
        mode = self._lock.mode.upper()
        return {
            "x-goog-object-lock-mode": mode,
            "x-goog-object-lock-retain-until-date": stamp(until),
        }

    @contextmanager
    def explained(self, key: str) -> Iterator[None]:
        """Add the fix to the error of a request that gives an object a retention."""
        try:
            yield
        except (NotFound, Exists):
            raise
        except Forbidden as error:
            if self._period_s(key):
                error.hint = f"{error.hint}. {_RIGHT}".removeprefix(". ")
            raise
        except Permanent as error:
            if self._period_s(key):
                error.hint = error.hint or _ENABLE
            raise

    def extend(self, key: str) -> float | None:
        """Extend the retention of an object to that of a new one; returns its end."""
        until = self._end(key)
        if self._lock is None or until is None:
            return None
        mode = {"governance": "Unlocked", "compliance": "Locked"}[self._lock.mode]
        order = {"retention": {"mode": mode, "retainUntilTime": stamp(until)}}
        body = Body(json.dumps(order).encode())
        with self.explained(key):
            self._call(f"lock {key}", "PATCH", key, body=body)
        return until

    def _until(self, key: str) -> float | None:
        what = f"retention of {key}"
        try:
            response = self._call(what, "GET", key, {"fields": "kind,retention"})
        except NotFound:
            return None
        with responses.complete(what):
            found = json_object(response.body, "the metadata", RESPONSE_BYTES_MAX).get("retention")
            if found is None:
                return None
            end = mapping(found, "retention", 10).get("retainUntilTime")
            return instant(end, "retainUntilTime")
