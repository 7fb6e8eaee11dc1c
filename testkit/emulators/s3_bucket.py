# SPDX-License-Identifier: Apache-2.0
"""A bucket of the strict S3: objects, their retention and settings.

Retention follows AmazonS3/latest/userguide/object-lock.html: it protects a version, not a key, so a delete
hides a locked object.  There is no access to older versions.
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
    retention: Retention | None = None


@dataclass
class S3Bucket:
    objects: dict[str, S3Object] = field(default_factory=dict)
    versioning: str = ""
    """``Enabled`` or ``Suspended``; empty before the first change."""
    has_object_lock: bool = False
    policy: dict[str, Any] | None = None
    policy_text: bytes = b""
    lifecycle: bytes = b""

    def store(self, key: str, stored: S3Object) -> None:
        if stored.retention is not None and not self.has_object_lock:
            raise S3Error(400, "InvalidRequest", "Bucket is missing Object Lock Configuration")
        self.objects[key] = stored

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def find(self, key: str) -> S3Object:
        """The object; raises S3Error."""
        if key not in self.objects:
            raise S3Error(404, "NoSuchKey")
        return self.objects[key]

    def set_retention(self, key: str, wanted: Retention, now: datetime) -> None:
        """Set or extend a retention: AmazonS3/latest/API/API_PutObjectRetention.html."""
        if not self.has_object_lock:
            raise S3Error(400, "InvalidRequest", "Bucket is missing Object Lock Configuration")
        found = self.find(key)
        old = found.retention
        if old is not None and old.until > now and wanted.until < old.until:
            raise S3Error(403, "AccessDenied", "the retention cannot be shortened")
        if wanted.until <= now:
            raise S3Error(400, "InvalidArgument", "The retain until date must be in the future!")
        self.objects[key] = replace(found, retention=wanted)

    def set_versioning(self, status: str) -> None:
        if status not in ("Enabled", "Suspended"):
            raise S3Error(400, "MalformedXML")
        if status == "Suspended" and self.has_object_lock:
            raise S3Error(409, "InvalidBucketState", "Object Lock needs versioning")
        self.versioning = status


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
