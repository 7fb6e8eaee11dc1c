# SPDX-License-Identifier: Apache-2.0
"""Object Lock of S3: the retention of new objects, and its extension."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol
from xml.etree import ElementTree as ET

from swansong_bucket.errors import Forbidden, NotFound, Permanent
from swansong_bucket.stores import responses
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.checksums import crc32c_base64
from swansong_bucket.stores.http.client import Response
from swansong_bucket.stores.retention import Lock, Retention, StoreClock, instant, stamp
from swansong_bucket.stores.s3.access import Invalid

_RIGHT = "Allow s3:PutObjectRetention: packer/permissions/aws-vm-lock.json has the statement"
_MODE = "x-amz-object-lock-mode"
_UNTIL = "x-amz-object-lock-retain-until-date"


class S3Call(Protocol):
    """Sends a request for an object, or with key None for the bucket."""

    def __call__(
        self,
        operation: str,
        method: str,
        key: str | None,
        parameters: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        payload: str = ...,
        body: Body | None = None,
    ) -> Response: ...


class S3Retention(Retention):
    """The retention of the objects of one bucket of S3.

    Args:
        bucket: its name, for errors.
        call: sends requests.
    """

    def __init__(
        self,
        lock: Lock | None,
        has_lock: Callable[[], bool],
        clock: StoreClock,
        call: S3Call,
        bucket: str,
    ) -> None:
        super().__init__(lock, has_lock, clock)
        self._call = call
        self._bucket = bucket

    def headers(self, key: str) -> dict[str, str]:
        """Headers of the request that creates an object."""
        until = self._end(key)
        if self._lock is None or until is None:
            return {}
        # S3 requires a checksum that it verifies; this header names the one in the request.
        integrity = {"x-amz-sdk-checksum-algorithm": "CRC32C"}
        return {_MODE: self._lock.mode.upper(), _UNTIL: stamp(until), **integrity}

    @contextmanager
    def explained(self, key: str) -> Iterator[None]:
        """Add the fix to the error of a request that creates an object with a retention."""
        try:
            yield
        except Invalid as error:
            if self._period_s(key):
                raise Permanent(str(error), hint=self._enable()) from error
            raise
        except Forbidden as error:
            if self._period_s(key):
                error.hint = f"{error.hint}. {_RIGHT}".removeprefix(". ")
            raise

    def extend(self, key: str) -> float | None:
        """Extend the retention of an object to that of a new one; returns its end."""
        until = self._end(key)
        if self._lock is None or until is None:
            return None
        order = ET.Element("Retention")
        ET.SubElement(order, "Mode").text = self._lock.mode.upper()
        ET.SubElement(order, "RetainUntilDate").text = stamp(until)
        with self.explained(key):
            headers, payload, body = signed_document(order)
            self._call(
                "PutObjectRetention",
                "PUT",
                key,
                {"retention": ""},
                headers,
                payload=payload,
                body=body,
            )
        return until

    def _until(self, key: str) -> float | None:
        what = f"GetObjectRetention {key}"
        try:
            response = self._call("GetObjectRetention", "GET", key, {"retention": ""})
        except NotFound:  # no object, or an object without a retention
            return None
        except Invalid:
            self._may_lock = False
            return None
        with responses.complete(what):
            found = responses.document(response, "Retention").findtext("RetainUntilDate")
            return instant(found, "RetainUntilDate")

    def _enable(self) -> str:
        return (
            "Enable Object Lock: "
            f"`aws s3api put-bucket-versioning --bucket {self._bucket} "
            "--versioning-configuration Status=Enabled && "
            f"aws s3api put-object-lock-configuration --bucket {self._bucket} "
            "--object-lock-configuration ObjectLockEnabled=Enabled`; or set store.lock_days = 0"
        )


def signed_document(root: ET.Element) -> tuple[dict[str, str], str, Body]:
    """Headers, payload hash and body of a request with an XML document.

    It has two checksums: S3 requires one of them, and compatible stores know the older one only.
    """
    content = ET.tostring(root)
    body = Body(content)
    md5 = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
    headers = {"x-amz-checksum-crc32c": crc32c_base64(body.crc32c), "content-md5": md5}
    return headers, body.sha256(), body
