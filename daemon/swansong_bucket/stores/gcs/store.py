# SPDX-License-Identifier: Apache-2.0
"""The store contract on Google Cloud Storage.

Objects use the XML interface, listings and metadata the JSON interface.  Google also calls the version number
of an object its generation; here that is the *object generation*.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import Changed, Exists, NotFound, Permanent, Transient
from swansong_bucket.stores import responses
from swansong_bucket.stores.base import (
    Body,
    Folders,
    ObjectInfo,
    Page,
    Sink,
)
from swansong_bucket.stores.checksums import crc32c_base64
from swansong_bucket.stores.gcs.access import GcsAccess
from swansong_bucket.stores.gcs.retention import GcsRetention
from swansong_bucket.stores.gcs.settings import GcsSettings
from swansong_bucket.stores.http.client import Response
from swansong_bucket.stores.remote import DEFAULT_LIMITS, RemoteStore, WireLimits
from swansong_bucket.stores.retention import Lock

_HASH = "x-goog-hash"
_INFO_FIELDS = "name,size,timeCreated,generation"
_ABSENT = {"x-goog-if-generation-match": "0"}
_UNVERIFIED = "This store returns no CRC32C of an upload: use another endpoint"


class GcsStore(RemoteStore):
    """A bucket, or a prefix in one.  :class:`swansong_bucket.stores.gcs.access.GcsAccess` has credentials.

    Args:
        config: with a URL ``gs://bucket/prefix``.
        lock: retention of new objects; None: they get none.
    """

    def __init__(
        self, config: StoreAccess, limits: WireLimits = DEFAULT_LIMITS, *, lock: Lock | None = None
    ) -> None:
        self._access = GcsAccess(config, limits, self.check)
        super().__init__(config, self._access.prefix, self._access.renew_credentials)
        self.settings = GcsSettings(self._access)
        self._retention = GcsRetention(lock, self.settings.has_lock, self._access)

    def head(self, key: str) -> ObjectInfo | None:
        found = self._metadata(key)
        return found[0] if found is not None else None

    def folders(self, prefix: str, token: str | None) -> Folders:
        fields = {"delimiter": "/", "fields": "kind,prefixes,nextPageToken"}
        response = self._listing(prefix, token, fields)
        with responses.complete(f"list {prefix}"):
            return responses.json_folders(response, self._prefix, prefix)

    def delete(self, key: str, *, if_tag: str = "") -> None:
        self._retention.expect_none(key)
        condition = {"ifGenerationMatch": if_tag} if if_tag else {}
        try:
            self._access.json(f"delete {key}", "DELETE", key, condition)
        except NotFound:
            return
        except Exists as other:
            if self._metadata(key) is not None:
                raise Changed(str(other)) from other

    def lock(self, key: str) -> float | None:
        return self._retention.extend(key)

    # ------------------------------------------------------------ requests

    def _read(self, key: str, headers: Mapping[str, str], sink: Sink) -> Response:
        return self._access.xml(f"get {key}", "GET", key, headers=headers, sink=sink)

    def _holds(self, key: str, body: Body) -> bool:
        found = self._metadata(key)
        if found is None or found[0].size_bytes != body.size_bytes:
            return False
        if found[1] is None:
            raise Permanent(f"create {key}: the store returned no checksum", hint=_UNVERIFIED)
        return found[1] == body.crc32c

    def _metadata(self, key: str) -> tuple[ObjectInfo, int | None] | None:
        """The object and its CRC32C; None if it does not exist."""
        fields = {"fields": f"kind,{_INFO_FIELDS},crc32c"}
        try:
            response = self._access.json(f"head {key}", "GET", key, fields)
        except NotFound:
            # Object and bucket have the same 404: a listing raises NotFound if the bucket is missing.
            self.page(key, None, items=1)
            return None
        with responses.complete(f"head {key}"):
            return responses.json_metadata(response, self._prefix, key)

    def page(
        self, prefix: str, token: str | None, *, after: str = "", items: int | None = None
    ) -> Page:
        fields = {"fields": f"kind,items({_INFO_FIELDS}),nextPageToken"}
        if after:
            fields["startOffset"] = self._prefix + after  # also lists this key itself
        response = self._listing(prefix, token, fields, items)
        with responses.complete(f"list {prefix}"):
            return responses.json_objects(response, self._prefix, prefix)

    def _listing(
        self, prefix: str, token: str | None, more: Mapping[str, str], items: int | None = None
    ) -> Response:
        parameters = {
            "prefix": self._prefix + prefix,
            "maxResults": str(items or responses.PAGE_ITEMS),
            **more,
        }
        if token is not None:
            parameters["pageToken"] = token
        return self._access.json(f"list {prefix}", "GET", None, parameters)

    def _put(self, key: str, body: Body, *, if_absent: bool) -> None:
        what = f"put {key}"
        headers = {
            **(_ABSENT if if_absent else {}),
            **self._retention.headers(key),
            _HASH: f"crc32c={crc32c_base64(body.crc32c)}",
        }
        with self._creating(key) if if_absent else nullcontext(), self._retention.explained(key):
            response = self._access.xml(what, "PUT", key, headers=headers, body=body)
        with responses.complete(what):
            responses.etag_of(response.headers)
        reported = responses.hashed_crc32c(response.headers.get(_HASH, ""))
        if reported is None:
            raise Permanent(
                f"{what} in {self.url}: the store returned no checksum", hint=_UNVERIFIED
            )
        if reported != body.crc32c:
            raise Transient(f"{what} in {self.url}: the store has other bytes than were sent")
