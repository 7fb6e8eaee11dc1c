# SPDX-License-Identifier: Apache-2.0
"""The store contract on Google Cloud Storage.

Objects use the XML interface, listings and metadata the JSON interface.  Google also calls the version number
of an object its generation; here that is the *object generation*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.stores import responses
from swansong_bucket.stores.base import Body, ObjectInfo
from swansong_bucket.stores.checksums import crc32c_base64
from swansong_bucket.stores.gcs.access import GcsAccess
from swansong_bucket.stores.gcs.retention import GcsRetention
from swansong_bucket.stores.gcs.settings import GcsSettings
from swansong_bucket.stores.remote import DEFAULT_LIMITS, RemoteStore, WireLimits
from swansong_bucket.stores.retention import Lock

_CRC32C = "crc32c="
_INFO_FIELDS = "name,size,timeCreated,generation"


class GcsStore(RemoteStore):
    """A bucket, or a prefix in one.  :class:`swansong_bucket.stores.gcs.access.GcsAccess` has credentials.

    Args:
        config: with a URL ``gs://bucket/prefix``.
        lock: retention of new objects; None: they get none.
    """

    _checksum_header = "x-goog-hash"
    _listing: ClassVar[Mapping[str, str]] = {
        "fields": f"kind,prefixes,items({_INFO_FIELDS}),nextPageToken"
    }
    _size_name, _token_name = "maxResults", "pageToken"
    _absent: ClassVar[Mapping[str, str]] = {"x-goog-if-generation-match": "0"}

    def __init__(
        self, config: StoreAccess, limits: WireLimits = DEFAULT_LIMITS, *, lock: Lock | None = None
    ) -> None:
        access = GcsAccess(config, limits, self.check)
        self.settings = GcsSettings(access)
        super().__init__(config, access, GcsRetention(lock, self.settings.has_lock, access))

    # ------------------------------------------------------------ requests

    _parsed = staticmethod(responses.json_objects)

    def _start(self, token: str | None, after: str) -> Mapping[str, str]:  # noqa: ARG002 - for S3
        # It also lists this key itself.
        return {"startOffset": self._prefix + after} if after else {}

    def _described(
        self, what: str, key: str, _headers: Mapping[str, str]
    ) -> tuple[ObjectInfo, str | None]:
        fields = {"fields": f"kind,{_INFO_FIELDS},crc32c"}
        response = self._access.call(what, "GET", key, fields)
        with responses.complete(what):
            info, checksum = responses.json_metadata(response, self._prefix, key)
        return info, checksum and _CRC32C + checksum

    def _delete(self, key: str, if_tag: str) -> None:
        condition = {"ifGenerationMatch": if_tag} if if_tag else {}
        self._access.call(f"delete {key}", "DELETE", key, condition)

    def _checksum(self, body: Body) -> str:
        return _CRC32C + crc32c_base64(body.crc32c)

    def _checksum_in(self, headers: Mapping[str, str]) -> str | None:
        hashes = (item.strip() for item in headers.get(self._checksum_header, "").split(","))
        return next((item for item in hashes if item.startswith(_CRC32C)), None)
