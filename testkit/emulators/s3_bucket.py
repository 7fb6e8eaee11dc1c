# SPDX-License-Identifier: Apache-2.0
"""A bucket of the strict S3: objects, their versions, retention and settings.

Versions follow AmazonS3/latest/userguide/DeletingObjectVersions.html: with versioning, a delete without a
version adds a delete marker, and removes no bytes.  Retention follows
AmazonS3/latest/userguide/object-lock.html: it protects a version, not a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree as ET

from testkit.emulators.s3_request import Checksum, S3Error

_MODES = ("GOVERNANCE", "COMPLIANCE")


@dataclass(frozen=True)
class Retention:
    mode: str
    """``GOVERNANCE`` or ``COMPLIANCE``."""
    until: datetime


@dataclass(frozen=True)
class S3Object:
    data: bytes
    etag: str
    checksum: Checksum | None
    modified: datetime = field(default_factory=lambda: datetime.now(UTC))
    version_id: str = "null"
    """``null`` for an object that was stored without versioning."""
    retention: Retention | None = None
    is_marker: bool = False


@dataclass
class S3Bucket:
    objects: dict[str, S3Object] = field(default_factory=dict)
    """The current version of each key; one with a delete marker is absent."""
    versions: dict[str, list[S3Object]] = field(default_factory=dict)
    """All versions and delete markers, oldest first; only with versioning."""
    versioning: str = ""
    """``Enabled`` or ``Suspended``; empty before the first change."""
    has_object_lock: bool = False
    policy: dict[str, Any] | None = None
    policy_text: bytes = b""
    lifecycle: bytes = b""
    _count: int = 0

    def store(self, key: str, stored: S3Object) -> S3Object:
        """Make ``stored`` the current version of the key; returns it with its version id."""
        if stored.retention is not None and not self.has_object_lock:
            raise S3Error(400, "InvalidRequest", "Bucket is missing Object Lock Configuration")
        if self.versioning == "Enabled":
            stored = replace(stored, version_id=self._next_id())
            self.versions.setdefault(key, []).append(stored)
        self.objects[key] = stored
        return stored

    def delete(self, key: str) -> dict[str, str]:
        """Delete the current version, or hide it with a delete marker; returns response headers."""
        if self.versioning != "Enabled":
            self.objects.pop(key, None)
            return {}
        marker = S3Object(b"", "", None, version_id=self._next_id(), is_marker=True)
        if key in self.objects and key not in self.versions:
            self.versions[key] = [self.objects[key]]  # older than versioning
        self.versions.setdefault(key, []).append(marker)
        self.objects.pop(key, None)
        return {"x-amz-delete-marker": "true", "x-amz-version-id": marker.version_id}

    def delete_version(self, key: str, version_id: str, *, bypasses: bool, now: datetime) -> None:
        """Delete a version permanently; raises S3Error while a retention protects it.

        Args:
            bypasses: the request has x-amz-bypass-governance-retention.
        """
        found = self.find(key, version_id)
        retention = found.retention
        is_protected = retention is not None and retention.until > now
        if (
            retention is not None
            and is_protected
            and not (bypasses and retention.mode == _MODES[0])
        ):
            raise S3Error(
                403, "AccessDenied", "Access Denied because object protected by object lock."
            )
        left = [each for each in self.versions.get(key, []) if each.version_id != version_id]
        self.versions[key] = left
        self.objects.pop(key, None)
        if left and not left[-1].is_marker:
            self.objects[key] = left[-1]

    def find(self, key: str, version_id: str | None) -> S3Object:
        """The current or the named version; raises S3Error."""
        if version_id is None:
            if key not in self.objects:
                raise S3Error(404, "NoSuchKey")
            return self.objects[key]
        for each in [*self.versions.get(key, []), *filter(None, [self.objects.get(key)])]:
            if each.version_id == version_id:
                return each
        raise S3Error(404, "NoSuchVersion")

    def set_retention(
        self, key: str, version_id: str | None, wanted: Retention, *, bypasses: bool, now: datetime
    ) -> None:
        """Set or extend the retention of a version: AmazonS3/latest/API/API_PutObjectRetention.html."""
        if not self.has_object_lock:
            raise S3Error(400, "InvalidRequest", "Bucket is missing Object Lock Configuration")
        found = self.find(key, version_id)
        old = found.retention
        if old is not None and old.until > now:
            weakens = wanted.until < old.until or (old.mode, wanted.mode) == _MODES[::-1]
            if weakens and (old.mode == "COMPLIANCE" or not bypasses):
                raise S3Error(403, "AccessDenied", "the retention cannot be shortened")
        if wanted.until <= now:
            raise S3Error(400, "InvalidArgument", "The retain until date must be in the future!")
        changed = replace(found, retention=wanted)
        self.versions[key] = [
            changed if each.version_id == found.version_id else each
            for each in self.versions.get(key, [])
        ]
        if self.objects.get(key) is found:
            self.objects[key] = changed

    def set_versioning(self, status: str) -> None:
        if status not in ("Enabled", "Suspended"):
            raise S3Error(400, "MalformedXML")
        if status == "Suspended" and self.has_object_lock:
            raise S3Error(409, "InvalidBucketState", "Object Lock needs versioning")
        self.versioning = status
        for key, stored in self.objects.items():
            self.versions.setdefault(key, [stored])

    def _next_id(self) -> str:
        self._count += 1
        return f"version.{self._count}"


def retention_of(headers: Mapping[str, str], now: datetime) -> Retention | None:
    """The retention in the headers of a PutObject; raises S3Error."""
    mode = headers.get("x-amz-object-lock-mode")
    until = headers.get("x-amz-object-lock-retain-until-date")
    if mode is None and until is None:
        return None
    if mode is None or until is None:
        raise S3Error(400, "InvalidArgument", "mode and date of a retention belong together")
    return _checked(mode, until, now)


def retention_in(document: bytes, now: datetime) -> Retention:
    """The retention in the body of a PutObjectRetention; raises S3Error."""
    try:
        root = ET.fromstring(document)
    except ET.ParseError:
        raise S3Error(400, "MalformedXML") from None
    if root.tag.rpartition("}")[2] != "Retention":
        raise S3Error(400, "MalformedXML")
    return _checked(root.findtext("{*}Mode") or "", root.findtext("{*}RetainUntilDate") or "", now)


def _checked(mode: str, until: str, now: datetime) -> Retention:
    if mode not in _MODES:
        raise S3Error(400, "InvalidArgument", "Unknown wormMode directive.")
    try:
        instant = datetime.fromisoformat(until)
        is_future = instant > now
    except (ValueError, TypeError):
        raise S3Error(400, "InvalidArgument", "the retain until date is not ISO 8601") from None
    if not is_future:
        raise S3Error(400, "InvalidArgument", "The retain until date must be in the future!")
    return Retention(mode, instant.astimezone(UTC))
