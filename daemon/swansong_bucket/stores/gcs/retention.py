# SPDX-License-Identifier: Apache-2.0
"""Object retention of GCS: of new objects, and its extension."""

from __future__ import annotations

import json
from collections.abc import Callable

from swansong.bounds import json_object, mapping

from swansong_bucket.errors import NotFound, Permanent
from swansong_bucket.stores import responses
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.gcs.access import GcsAccess
from swansong_bucket.stores.http.client import RESPONSE_BYTES_MAX
from swansong_bucket.stores.retention import Lock, LockMode, Retention, instant


class GcsRetention(Retention):
    """The retention of the objects of one bucket of GCS."""

    _right = "Grant the role of packer/permissions/gcp-vm-lock.yaml on the bucket"
    _enable = (
        "Set store.lock_days = 0, turn on object retention for the bucket, or create one that has it",
        "gcloud storage buckets create gs://NEW --enable-per-object-retention",
    )
    _disabled = Permanent

    def __init__(self, lock: Lock | None, has_lock: Callable[[], bool], access: GcsAccess) -> None:
        super().__init__(lock, has_lock, access.clock)
        self._access = access

    def _headers(self, mode: str, until: str) -> dict[str, str]:
        """See :class:`Retention`; the request goes to the XML interface."""
        return {
            "x-goog-object-lock-mode": mode,
            "x-goog-object-lock-retain-until-date": until,
        }

    def _extend(self, key: str, mode: LockMode, until: str) -> None:
        name = {"governance": "Unlocked", "compliance": "Locked"}[mode]
        order = {"retention": {"mode": name, "retainUntilTime": until}}
        headers, body = {"content-type": "application/json"}, Body(json.dumps(order).encode())
        self._access.call(f"lock {key}", "PATCH", key, headers=headers, body=body)

    def _until(self, key: str) -> float | None:
        what = f"retention of {key}"
        try:
            response = self._access.call(what, "GET", key, {"fields": "kind,retention"})
        except NotFound:
            return None
        with responses.complete(what):
            found = json_object(response.body, "the metadata", RESPONSE_BYTES_MAX).get("retention")
            if found is None:
                return None
            end = mapping(found, "retention", 10).get("retainUntilTime")
            return instant(end, "retainUntilTime")
