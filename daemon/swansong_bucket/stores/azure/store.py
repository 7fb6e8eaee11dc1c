# SPDX-License-Identifier: Apache-2.0
"""The store contract on Azure Blob Storage.

Every write contains an MD5, which the store verifies and keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import Changed, Exists, Transient
from swansong_bucket.stores import responses
from swansong_bucket.stores.azure.access import AzureAccess, BlobMissing
from swansong_bucket.stores.azure.auth import content_md5
from swansong_bucket.stores.base import (
    Body,
    Folders,
    ObjectInfo,
    Page,
    Sink,
)
from swansong_bucket.stores.http.client import Response
from swansong_bucket.stores.remote import DEFAULT_LIMITS, RemoteStore, WireLimits

_ABSENT = {"if-none-match": "*"}
_PAGE_ITEMS = 500
"""A listing has more than twenty elements for each blob."""


class AzureStore(RemoteStore):
    """A container, or a prefix in one.

    For credentials see :class:`swansong_bucket.stores.azure.access.AzureAccess`.  Swansong gives blobs no
    retention: the policy of a container refuses a delete with Locked.  In a container with policies for
    versions, a delete keeps the bytes as an older version.

    Args:
        config: with a URL ``az://account/container/prefix``.
    """

    def __init__(self, config: StoreAccess, limits: WireLimits = DEFAULT_LIMITS) -> None:
        self._access = AzureAccess(config, limits)
        super().__init__(config, self._access.prefix, self._access.renew_credentials)

    def head(self, key: str) -> ObjectInfo | None:
        found = self._properties(key)
        return found[0] if found is not None else None

    def folders(self, prefix: str, token: str | None) -> Folders:
        response = self._listing(prefix, token, {"delimiter": "/"})
        with responses.complete(f"list {prefix}"):
            return responses.blob_folders(response, self._prefix, prefix)

    def delete(self, key: str, *, if_tag: str = "") -> None:
        """See the contract.  In an account with versions the bytes remain as an older version."""
        try:
            self._access.call(
                f"delete {key}", "DELETE", key, headers={"if-match": if_tag} if if_tag else {}
            )
        except BlobMissing:
            pass
        except Exists as other:
            if self.head(key) is not None:
                raise Changed(str(other)) from other

    # ------------------------------------------------------------ requests

    def _read(self, key: str, headers: Mapping[str, str], sink: Sink) -> Response:
        return self._access.call(f"get {key}", "GET", key, headers=headers, sink=sink)

    def page(
        self,
        prefix: str,
        token: str | None,
        *,
        after: str = "",  # noqa: ARG002 - versions before 2026-02-06 start at the first key
        items: int | None = None,
    ) -> Page:
        response = self._listing(prefix, token, {"maxresults": str(items or _PAGE_ITEMS)})
        with responses.complete(f"list {prefix}"):
            return responses.blobs(response, self._prefix, prefix)

    def _holds(self, key: str, body: Body) -> bool:
        found = self._properties(key)
        mine = (body.size_bytes, content_md5(body.data))
        return found is not None and (found[0].size_bytes, found[1]) == mine

    def _properties(self, key: str) -> tuple[ObjectInfo, str] | None:
        """The blob and its MD5, which is empty if the store has none; None if it does not exist."""
        try:
            response = self._access.call(f"head {key}", "HEAD", key)
        except BlobMissing:
            return None
        with responses.complete(f"head {key}"):
            return responses.head_info(response, key), response.headers.get("content-md5", "")

    def _listing(self, prefix: str, token: str | None, more: Mapping[str, str]) -> Response:
        parameters = {
            "restype": "container",
            "comp": "list",
            "prefix": self._prefix + prefix,
            "maxresults": str(_PAGE_ITEMS),
            **more,
        }
        if token is not None:
            parameters["marker"] = token
        return self._access.call(f"list {prefix}", "GET", None, parameters)

    def _put(self, key: str, body: Body, *, if_absent: bool) -> None:
        what, md5 = f"put {key}", content_md5(body.data)
        headers = {"x-ms-blob-type": "BlockBlob", "content-md5": md5}
        with self._creating(key) if if_absent else nullcontext():
            condition = _ABSENT if if_absent else {}
            response = self._access.call(what, "PUT", key, headers=headers | condition, body=body)
        with responses.complete(what):
            responses.etag_of(response.headers)
        if response.headers.get("content-md5", md5) != md5:
            raise Transient(f"{what} in {self.url}: the store has other bytes than were sent")
