# SPDX-License-Identifier: Apache-2.0
"""The store contract on S3 and compatible stores.

Every write contains a CRC32C that the store verifies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as ET

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import Changed, Exists, Locked, NotFound, Transient
from swansong_bucket.stores import responses
from swansong_bucket.stores.base import (
    Body,
    Folders,
    ObjectInfo,
    Page,
    Sink,
    expect_few,
)
from swansong_bucket.stores.checksums import crc32c_base64
from swansong_bucket.stores.http.client import Response
from swansong_bucket.stores.remote import DEFAULT_LIMITS, RemoteStore, WireLimits
from swansong_bucket.stores.retention import Lock
from swansong_bucket.stores.s3.access import S3Access, Unsupported
from swansong_bucket.stores.s3.retention import S3Retention, signed_document
from swansong_bucket.stores.s3.settings import S3Settings
from swansong_bucket.stores.s3.sigv4 import UNSIGNED_PAYLOAD
from swansong_bucket.util.threads import parallel

_CHECKSUM = "x-amz-checksum-crc32c"
_ABSENT = {"if-none-match": "*"}
_RETENTION_THREADS = 8


class S3Store(RemoteStore):
    """A bucket, or a prefix in one.

    Args:
        config: with a URL ``s3://bucket/prefix``.
        lock: retention of new objects; None: they get none.
    """

    def __init__(
        self, config: StoreAccess, limits: WireLimits = DEFAULT_LIMITS, *, lock: Lock | None = None
    ) -> None:
        self._access = S3Access(config, limits, self.check)
        super().__init__(config, self._access.prefix, self._access.renew_credentials)
        self.settings = S3Settings(self._access)
        self._retention = S3Retention(lock, self.settings.has_lock, self._access)

    def head(self, key: str) -> ObjectInfo | None:
        try:
            response = self._access.call("HeadObject", "HEAD", key)
        except NotFound:
            # Object and bucket have the same 404: a listing raises NotFound if the bucket is missing.
            self.page(key, None, items=1)
            return None
        with responses.complete(f"HeadObject {key}"):
            return responses.head_info(response, key)

    def folders(self, prefix: str, token: str | None) -> Folders:
        response = self._listing(prefix, token, {"delimiter": "/"})
        with responses.complete(f"ListObjectsV2 {prefix}"):
            return responses.folders(response, self._prefix, prefix)

    def delete(self, key: str, *, if_tag: str = "") -> None:
        """See the contract.  In a bucket with versions the object's bytes remain as an older version."""
        self._retention.expect_none(key)
        self._delete(key, if_tag)

    def _delete(self, key: str, if_tag: str) -> None:
        condition = {"if-match": if_tag} if if_tag else {}
        try:
            self._access.call("DeleteObject", "DELETE", key, headers=condition)
        except (NotFound, Exists) as refused:
            # A condition makes a missing object an error: 404, or 412 from SeaweedFS.
            if not if_tag:
                raise
            if self.head(key) is not None:
                raise Changed(str(refused)) from refused

    def delete_many(self, infos: Sequence[ObjectInfo]) -> Mapping[str, str]:
        expect_few(infos)
        held: dict[str, str] = {}
        if infos and self._retention.may_lock():
            held = self._locked(infos)
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
        headers, payload, body = signed_document(order)
        try:
            response = self._access.call(
                "DeleteObjects",
                "POST",
                None,
                {"delete": ""},
                headers,
                payload=payload,
                body=body,
            )
        except Unsupported:
            return {**held, **super().delete_many(infos)}
        with responses.complete("DeleteObjects"):
            remaining = responses.remaining(response, self._prefix)
        # A conditional delete of a missing object is refused.
        return held | {key: code for key, code in remaining.items() if code != "NoSuchKey"}

    def lock(self, key: str) -> float | None:
        return self._retention.extend(key)

    def _locked(self, infos: Sequence[ObjectInfo]) -> dict[str, str]:
        """The objects that a retention protects, each with the reason."""
        found: dict[str, str] = {}

        def ask(info: ObjectInfo) -> None:
            try:
                self._retention.expect_none(info.key)
            except Locked as error:
                found[info.key] = str(error)

        parallel(infos, ask, threads=_RETENTION_THREADS)
        return found

    # ------------------------------------------------------------ requests

    def _read(self, key: str, headers: Mapping[str, str], sink: Sink) -> Response:
        return self._access.call("GetObject", "GET", key, headers=headers, sink=sink)

    def page(
        self, prefix: str, token: str | None, *, after: str = "", items: int | None = None
    ) -> Page:
        start = {"start-after": self._prefix + after} if after and token is None else {}
        response = self._listing(prefix, token, start, items)
        with responses.complete(f"ListObjectsV2 {prefix}"):
            return responses.objects(response, self._prefix, prefix)

    def _listing(
        self, prefix: str, token: str | None, more: Mapping[str, str], items: int | None = None
    ) -> Response:
        parameters = {
            "encoding-type": "url",
            "list-type": "2",
            "max-keys": str(items or responses.PAGE_ITEMS),
            "prefix": self._prefix + prefix,
            **more,
        }
        if token is not None:
            parameters["continuation-token"] = token
        return self._access.call("ListObjectsV2", "GET", None, parameters)

    def _holds(self, key: str, body: Body) -> bool | None:
        headers = {"x-amz-checksum-mode": "ENABLED"}
        try:
            response = self._access.call("HeadObject", "HEAD", key, headers=headers)
        except NotFound:
            return False
        with responses.complete(f"HeadObject {key}"):
            if responses.length_of(response.headers) != body.size_bytes:
                return False
        reported = response.headers.get(_CHECKSUM)
        return None if reported is None else reported == crc32c_base64(body.crc32c)

    def _put(self, key: str, body: Body, *, if_absent: bool) -> None:
        is_tls = self._access.route().is_tls
        checksum = crc32c_base64(body.crc32c)
        condition = _ABSENT if if_absent else {}
        headers = {_CHECKSUM: checksum, **condition, **self._retention.headers(key)}
        payload = UNSIGNED_PAYLOAD if is_tls else body.sha256()
        with self._retention.explained(key):
            response = self._access.call(
                "PutObject", "PUT", key, headers=headers, payload=payload, body=body
            )
        with responses.complete(f"PutObject {key} in {self.url}"):
            responses.etag_of(response.headers)
        if response.headers.get(_CHECKSUM, checksum) != checksum:
            raise Transient(
                f"PutObject {key} in {self.url}: the store has other bytes than were sent"
            )
