# SPDX-License-Identifier: Apache-2.0
"""Object Lock of S3: the retention of new objects, and its extension."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol
from xml.etree import ElementTree as ET

from swansong.bounds import BoundsError, text

from swansongd.errors import NotFound, Permanent
from swansongd.stores import responses
from swansongd.stores.base import Body
from swansongd.stores.checksums import crc32c_base64
from swansongd.stores.http.client import Response
from swansongd.stores.retention import Lock, StoreClock, instant, locked, stamp
from swansongd.stores.s3.access import Denied, Invalid, Unsupported

_RIGHT = "Allow s3:PutObjectRetention: packer/permissions/aws-vm-lock.json has the statement"
_MODE = "x-amz-object-lock-mode"
_UNTIL = "x-amz-object-lock-retain-until-date"


class Call(Protocol):
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


class S3Retention:
    """The retention of the objects of one bucket.

    Args:
        bucket: its name, for errors.
        lock: retention of new objects; None: they get none.
        call: sends requests.
        clock: of the store.
    """

    def __init__(self, bucket: str, lock: Lock | None, call: Call, clock: StoreClock) -> None:
        self._bucket = bucket
        self._lock = lock
        self._call = call
        self._clock = clock
        self._has_object_lock: bool | None = None
        """None: not known yet."""

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
            if self._lock is not None and self._lock.period_s(key):
                raise Permanent(str(error), hint=self._enable()) from error
            raise
        except Denied as error:
            if self._lock is not None and self._lock.period_s(key):
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

    def until(self, key: str) -> float | None:
        """End of the retention of an object; see ObjectStore.locked_until."""
        if not self.may_lock():
            return None
        what = f"GetObjectRetention {key}"
        try:
            response = self._call("GetObjectRetention", "GET", key, {"retention": ""})
        except NotFound:  # no object, or an object without a retention
            return None
        except Invalid:
            self._has_object_lock = False
            return None
        with responses.complete(what):
            found = responses.document(response, "Retention").findtext("RetainUntilDate")
            try:
                return instant(text(found, "RetainUntilDate", 40))
            except ValueError as error:
                raise BoundsError(str(error)) from None

    def expect_none(self, key: str) -> None:
        """Raise Locked if a retention protects the object.

        A bucket with Object Lock has versions: a delete would hide the object, and its bytes would remain.
        """
        until = self.until(key)
        if until is not None and until > self._clock.now_unix_s():
            raise locked(key, until)

    def may_lock(self) -> bool:
        """Whether the bucket may have Object Lock; asks the store once."""
        if self._has_object_lock is None:
            try:
                self._has_object_lock = self.is_enabled()
            except Unsupported:
                self._has_object_lock = False
            except Permanent:  # no right to read the setting
                self._has_object_lock = True
        return self._has_object_lock

    def is_enabled(self) -> bool:
        """Whether the bucket has Object Lock; raises Permanent without the right to read that."""
        try:
            response = self._call("GetObjectLockConfiguration", "GET", None, {"object-lock": ""})
        except NotFound:
            return False
        with responses.complete("GetObjectLockConfiguration"):
            # A store that does not know the operation lists the bucket.
            root = responses.document(response, "ObjectLockConfiguration", "ListBucketResult")
        return root.findtext("ObjectLockEnabled") == "Enabled"

    def _end(self, key: str) -> float | None:
        period_s = 0.0 if self._lock is None else self._lock.period_s(key)
        return self._clock.now_unix_s() + period_s if period_s else None

    def _enable(self) -> str:
        return f"Enable Object Lock: {enable_command(self._bucket)}; or set store.lock_days = 0"


def enable_command(bucket: str) -> str:
    """The command that enables versioning and Object Lock."""
    return (
        f"`aws s3api put-bucket-versioning --bucket {bucket} "
        "--versioning-configuration Status=Enabled && "
        f"aws s3api put-object-lock-configuration --bucket {bucket} "
        "--object-lock-configuration ObjectLockEnabled=Enabled`"
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
