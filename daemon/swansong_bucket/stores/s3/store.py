# SPDX-License-Identifier: Apache-2.0
"""The store contract on S3 and compatible stores.

Every write contains a CRC32C that the store verifies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar
from xml.etree import ElementTree as ET

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import Locked
from swansong_bucket.stores import responses
from swansong_bucket.stores.base import Body, ObjectInfo, expect_few
from swansong_bucket.stores.checksums import crc32c_base64
from swansong_bucket.stores.remote import DEFAULT_LIMITS, RemoteStore, WireLimits
from swansong_bucket.stores.retention import Lock, Retention
from swansong_bucket.stores.s3.access import S3Access, Unsupported
from swansong_bucket.stores.s3.retention import S3Retention, signed_document
from swansong_bucket.stores.s3.settings import S3Settings
from swansong_bucket.util.threads import parallel

_RETENTION_THREADS = 8


class S3Store(RemoteStore):
    """A bucket, or a prefix in one.

    Args:
        config: with a URL ``s3://bucket/prefix``.
        lock: retention of new objects; None: they get none.
    """

    _checksum_header = "x-amz-checksum-crc32c"
    _listing: ClassVar[Mapping[str, str]] = {"encoding-type": "url", "list-type": "2"}
    _size_name, _token_name = "max-keys", "continuation-token"
    _checked_headers: ClassVar[Mapping[str, str]] = {"x-amz-checksum-mode": "ENABLED"}
    _is_narrow = False
    _has_checksums = False  # not each compatible store

    def __init__(
        self, config: StoreAccess, limits: WireLimits = DEFAULT_LIMITS, *, lock: Lock | None = None
    ) -> None:
        access = S3Access(config, limits, self.check)
        self.settings = S3Settings(access)
        super().__init__(config, access, S3Retention(lock, self.settings.has_lock, access))

    _parsed = staticmethod(responses.objects)

    def _start(self, token: str | None, after: str) -> Mapping[str, str]:
        return {"start-after": self._prefix + after} if after and token is None else {}

    def delete_many(self, infos: Sequence[ObjectInfo]) -> Mapping[str, str]:
        expect_few(infos)
        held: dict[str, str] = {}
        assert self._retention is not None
        if infos and self._retention.may_lock():
            held = self._locked(self._retention, infos)
            infos = [info for info in infos if info.key not in held]
        if not infos:
            return held
        order = ET.Element("Delete")
        for info in infos:
            item = ET.SubElement(order, "Object")
            ET.SubElement(item, "Key").text = self._prefix + info.key
            if info.tag:
                ET.SubElement(item, "ETag").text = info.tag
        ET.SubElement(order, "Quiet").text = "true"
        headers, body = signed_document(order)
        try:
            response = self._access.call(
                "DeleteObjects", "POST", None, {"delete": ""}, headers, body=body
            )
        except Unsupported:
            return {**held, **super().delete_many(infos)}
        with responses.complete("DeleteObjects"):
            remaining = responses.remaining(response, self._prefix)
        # A conditional delete of a missing object is refused.
        return held | {key: code for key, code in remaining.items() if code != "NoSuchKey"}

    def _locked(self, retention: Retention, infos: Sequence[ObjectInfo]) -> dict[str, str]:
        """The objects that a retention protects, each with the reason."""
        found: dict[str, str] = {}

        def ask(info: ObjectInfo) -> None:
            try:
                retention.expect_none(info.key)
            except Locked as error:
                found[info.key] = str(error)

        parallel(infos, ask, threads=_RETENTION_THREADS)
        return found

    def _checksum(self, body: Body) -> str:
        return crc32c_base64(body.crc32c)
