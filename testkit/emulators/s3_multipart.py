# SPDX-License-Identifier: Apache-2.0
"""Multipart uploads of the strict S3: the rules for parts and completions."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from xml.etree import ElementTree as ET

from testkit.emulators.s3_request import (
    ALGORITHMS,
    Checksum,
    Payload,
    S3Error,
    checksum_of,
    composite_of,
    named_checksum,
)

PART_SIZE_BYTES_MIN = 5 * 2**20
PARTS_MAX = 10_000
_numbers = itertools.count(1)


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
    checksum_type: str = "FULL_OBJECT"
    modified: datetime = field(default_factory=lambda: datetime.now(UTC))
    version_id: str = "null"
    """``null`` for an object that was stored without versioning."""
    retention: Retention | None = None
    is_marker: bool = False


@dataclass(frozen=True)
class S3Part:
    data: bytes
    etag: str
    checksum: Checksum | None


@dataclass
class S3Upload:
    bucket: str
    key: str
    algorithm: str
    """Empty for an upload without an algorithm."""
    checksum_type: str
    retention: Retention | None = None
    parts: dict[int, S3Part] = field(default_factory=dict)
    begun: datetime = field(default_factory=lambda: datetime.now(UTC))
    upload_id: str = field(default_factory=lambda: f"upload.{next(_numbers)}_{id(object()):x}-~")

    def put(self, number: int, payload: Payload) -> S3Part:
        if not 1 <= number <= PARTS_MAX:
            raise S3Error(400, "InvalidArgument", f"part number {number}")
        stated = payload.checksum.algorithm if payload.checksum else ""
        if self.algorithm and stated != self.algorithm:
            raise S3Error(400, "InvalidRequest", f"the part needs a {self.algorithm}, not {stated}")
        part = S3Part(payload.data, f'"{hashlib.md5(payload.data).hexdigest()}"', payload.checksum)
        self.parts[number] = part
        return part

    def whole(self, document: bytes, headers: Mapping[str, str]) -> S3Object:
        """The object; raises S3Error if the completion breaks a rule."""
        chosen = [self._named(item) for item in _listed(document)]
        if any(len(part.data) < PART_SIZE_BYTES_MIN for part in chosen[:-1]):
            raise S3Error(400, "EntityTooSmall")
        data = b"".join(part.data for part in chosen)
        if headers.get("x-amz-mp-object-size", str(len(data))) != str(len(data)):
            raise S3Error(400, "InvalidRequest", "the size differs from that of the parts")
        if headers.get("x-amz-checksum-type", self.checksum_type) != self.checksum_type:
            raise S3Error(400, "InvalidRequest", "not the checksum type of the upload")
        md5s = b"".join(bytes.fromhex(part.etag.strip('"')) for part in chosen)
        etag = f'"{hashlib.md5(md5s).hexdigest()}-{len(chosen)}"'
        checksum = self._checksum(chosen, data)
        stated = named_checksum(headers)
        if stated is not None and stated != checksum:
            raise S3Error(400, "BadDigest" if checksum else "InvalidRequest", stated.header)
        return S3Object(data, etag, checksum, self.checksum_type, retention=self.retention)

    def _checksum(self, chosen: list[S3Part], data: bytes) -> Checksum | None:
        if not self.algorithm:
            return None
        if self.checksum_type == "FULL_OBJECT":
            return checksum_of(self.algorithm, data)
        return composite_of(self.algorithm, [part.checksum for part in chosen if part.checksum])

    def _named(self, item: ET.Element) -> S3Part:
        part = self.parts.get(int(item.findtext("{*}PartNumber") or "0"))
        if part is None or (item.findtext("{*}ETag") or "").strip('"') != part.etag.strip('"'):
            raise S3Error(400, "InvalidPart")
        for algorithm in ALGORITHMS:
            stated = item.findtext(f"{{*}}Checksum{algorithm}")
            if stated is not None and Checksum(algorithm, stated) != part.checksum:
                raise S3Error(400, "InvalidPart", "not the checksum of the part")
            if stated is None and algorithm == self.algorithm and self.checksum_type == "COMPOSITE":
                raise S3Error(400, "InvalidRequest", "a part has no checksum")
        return part


def begun(
    bucket: str, key: str, headers: Mapping[str, str], retention: Retention | None
) -> S3Upload:
    """A new upload, with the options of its headers."""
    algorithm = headers.get("x-amz-checksum-algorithm", "").upper()
    if algorithm and algorithm not in ALGORITHMS:
        raise S3Error(501, "NotImplemented", algorithm)
    kind = headers.get("x-amz-checksum-type", "COMPOSITE" if algorithm else "FULL_OBJECT")
    if kind not in ("COMPOSITE", "FULL_OBJECT"):
        raise S3Error(400, "InvalidRequest", kind)
    if kind == "FULL_OBJECT" and algorithm.startswith("SHA"):
        raise S3Error(400, "InvalidRequest", f"{algorithm} cannot be {kind}")
    return S3Upload(bucket, key, algorithm, kind, retention)


def _listed(document: bytes) -> list[ET.Element]:
    try:
        root = ET.fromstring(document)
        items = root.findall("{*}Part")
        numbers = [int(item.findtext("{*}PartNumber") or "") for item in items]
    except (ET.ParseError, ValueError):
        raise S3Error(400, "MalformedXML") from None
    if root.tag.rpartition("}")[2] != "CompleteMultipartUpload" or not items:
        raise S3Error(400, "MalformedXML")
    if numbers != sorted(set(numbers)):
        raise S3Error(400, "InvalidPartOrder")
    return items
