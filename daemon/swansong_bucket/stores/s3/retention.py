# SPDX-License-Identifier: Apache-2.0
"""Object Lock of S3: the retention of new objects, and its extension."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from xml.etree import ElementTree as ET

from swansong_bucket.errors import NotFound
from swansong_bucket.stores import responses
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.checksums import crc32c_base64
from swansong_bucket.stores.retention import Lock, LockMode, Retention, instant
from swansong_bucket.stores.s3.access import Invalid, S3Access


class S3Retention(Retention):
    """The retention of the objects of one bucket of S3."""

    _right = "Allow s3:PutObjectRetention: packer/permissions/aws-vm-lock.json has the statement"
    _disabled = Invalid

    def __init__(self, lock: Lock | None, has_lock: Callable[[], bool], access: S3Access) -> None:
        super().__init__(lock, has_lock, access.clock)
        self._access = access
        self._enable = (
            "Set store.lock_days = 0, or enable Object Lock",
            (
                f"aws s3api put-bucket-versioning --bucket {access.bucket} "
                "--versioning-configuration Status=Enabled && "
                f"aws s3api put-object-lock-configuration --bucket {access.bucket} "
                "--object-lock-configuration ObjectLockEnabled=Enabled"
            ),
        )

    def _headers(self, mode: str, until: str) -> dict[str, str]:
        return {
            "x-amz-object-lock-mode": mode,
            "x-amz-object-lock-retain-until-date": until,
            # S3 requires a checksum that it verifies; this header names the one in the request.
            "x-amz-sdk-checksum-algorithm": "CRC32C",
        }

    def _extend(self, key: str, mode: LockMode, until: str) -> None:
        order = ET.Element("Retention")
        ET.SubElement(order, "Mode").text = mode.upper()
        ET.SubElement(order, "RetainUntilDate").text = until
        headers, body = signed_document(order)
        query = {"retention": ""}
        self._access.call(f"PutObjectRetention {key}", "PUT", key, query, headers, body=body)

    def _until(self, key: str) -> float | None:
        what = f"GetObjectRetention {key}"
        try:
            response = self._access.call(what, "GET", key, {"retention": ""})
        except NotFound:  # no object, or an object without a retention
            return None
        except Invalid:
            self._may_lock = False
            return None
        with responses.complete(what):
            found = responses.document(response, "Retention").findtext("RetainUntilDate")
            return instant(found, "RetainUntilDate")


def signed_document(root: ET.Element) -> tuple[dict[str, str], Body]:
    """Headers and body of a request with an XML document.

    It has two checksums: S3 requires one of them, and compatible stores know the older one only.
    """
    content = ET.tostring(root)
    body = Body(content)
    md5 = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
    headers = {"x-amz-checksum-crc32c": crc32c_base64(body.crc32c), "content-md5": md5}
    return headers, body
