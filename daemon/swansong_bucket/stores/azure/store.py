# SPDX-License-Identifier: Apache-2.0
"""The store contract on Azure Blob Storage.

The wire sends each request once; retries and deadlines belong to the caller.  Every write contains an MD5,
which the store verifies and keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from swansong_bucket.errors import Changed, Exists, Forbidden, Locked, Permanent, Transient
from swansong_bucket.stores import responses
from swansong_bucket.stores.azure.access import AzureAccess, BlobMissing
from swansong_bucket.stores.azure.auth import content_md5
from swansong_bucket.stores.base import (
    GET_BYTES_MAX,
    Body,
    BytesSink,
    Folders,
    Moved,
    ObjectInfo,
    Page,
    Sink,
    account_container_and_prefix,
    delete_each,
    ignore_moved,
    listed,
    named,
)
from swansong_bucket.stores.http.client import Response
from swansong_bucket.stores.options import AzureOptions

_ABSENT = {"if-none-match": "*"}
_DELETE_THREADS = 8
_PAGE_ITEMS = 500
"""A listing has more than twenty elements for each blob."""


class AzureStore:
    """A container, or a prefix in one.

    For credentials see :class:`swansong_bucket.stores.azure.access.AzureAccess`.

    Args:
        url: ``az://account/container/prefix``.
    """

    def __init__(self, url: str, options: AzureOptions) -> None:
        self.url = url
        account, container, self._prefix = account_container_and_prefix(url)
        self._access = AzureAccess(account, container, options)

    # ------------------------------------------------------------ small objects

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        body = Body(data)
        with self._creating(key) if if_absent else nullcontext():
            self._put(key, body, content_md5(body.data), _ABSENT if if_absent else {})

    def get(self, key: str) -> bytes:
        sink = BytesSink(GET_BYTES_MAX)
        response = self._call(f"get {key}", "GET", key, sink=sink)
        if response.status != 200:
            raise Permanent(
                f"get {key} in {self.url}: HTTP {response.status} is not a complete object"
            )
        return bytes(sink.data)

    def head(self, key: str) -> ObjectInfo | None:
        found = self._properties(key)
        return found[0] if found is not None else None

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return listed(prefix, lambda token: self.page(prefix, token, after=after), after)

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:  # noqa: ARG002
        """See the contract.  ``after`` has no effect: versions before 2026-02-06 start at the first key."""
        response = self._listing(prefix, token, {})
        with responses.complete(f"list {prefix}"):
            return responses.blobs(response, self._prefix, prefix)

    def folders(self, prefix: str, token: str | None) -> Folders:
        response = self._listing(prefix, token, {"delimiter": "/"})
        with responses.complete(f"list {prefix}"):
            return responses.blob_folders(response, self._prefix, prefix)

    def delete(self, key: str, *, if_tag: str = "") -> None:
        """See the contract.  In an account with versions the bytes remain as an older version."""
        try:
            self._call(
                f"delete {key}", "DELETE", key, headers={"if-match": if_tag} if if_tag else {}
            )
        except BlobMissing:
            pass
        except Exists as other:
            if self.head(key) is not None:
                raise Changed(str(other)) from other

    def delete_many(self, infos: Sequence[ObjectInfo]) -> Mapping[str, str]:
        return delete_each(self, infos, threads=_DELETE_THREADS)

    def lock(self, key: str) -> float | None:  # noqa: ARG002
        """See the contract.  Swansong gives blobs no retention.

        The policy of a container refuses a delete with Locked.  In a container with policies for versions, a
        delete keeps the bytes as an older version.
        """
        return None

    # ------------------------------------------------------------ chunks

    def create(self, key: str, data: memoryview, *, moved: Moved = ignore_moved) -> None:
        body = Body(data, moved)
        md5 = content_md5(body.data)
        try:
            with self._creating(key):
                self._put(key, body, md5, _ABSENT)
        except Exists:
            # If the bytes match, our write succeeded and only the reply was lost.
            found = self._properties(key)
            if found is None or (found[0].size_bytes, found[1]) != (body.size_bytes, md5):
                raise

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if not size_bytes:
            return
        span = f"{offset}-{offset + size_bytes - 1}"
        headers = {"range": f"bytes={span}"}
        response = self._call(f"get {key}", "GET", key, headers=headers, sink=sink)
        range_ = response.headers.get("content-range", "")
        if response.status != 206 or not range_.startswith(f"bytes {span}/"):
            raise Permanent(f"get {key} in {self.url}: bytes {span} are not within the object")

    # ------------------------------------------------------------ the container

    def check(self) -> None:
        self._listing("", None, {"maxresults": "1"})

    def warm(self) -> None:
        self.renew_credentials()
        self.check()

    def renew_credentials(self) -> None:
        """Renew a token that expires soon; raises Permanent if there are no credentials."""
        self._access.renew_credentials()

    # ------------------------------------------------------------ requests

    def _properties(self, key: str) -> tuple[ObjectInfo, str] | None:
        """The blob and its MD5, which is empty if the store has none; None if it does not exist."""
        try:
            response = self._call(f"head {key}", "HEAD", key)
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
        return self._call(f"list {prefix}", "GET", None, parameters)

    def _put(self, key: str, body: Body, md5: str, condition: Mapping[str, str]) -> None:
        """PUT ``body`` with a checksum that the store verifies."""
        what = f"put {key}"
        headers = {"x-ms-blob-type": "BlockBlob", "content-md5": md5, **condition}
        response = self._call(what, "PUT", key, headers=headers, body=body)
        with responses.complete(what):
            responses.etag_of(response.headers)
        if response.headers.get("content-md5", md5) != md5:
            raise Transient(f"{what} in {self.url}: the store has other bytes than were sent")

    def _call(
        self,
        what: str,
        method: str,
        key: str | None,
        parameters: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        body: Body | None = None,
        sink: Sink | None = None,
    ) -> Response:
        """Send one request for a blob, or with key None for the container; returns a success."""
        name = None if key is None else self._prefix + key
        with named(f"{what} in {self.url}"):
            return self._access.exchange(
                method, name, parameters or {}, headers or {}, body=body, sink=sink
            )

    @contextmanager
    def _creating(self, key: str) -> Iterator[None]:
        """Around a create-if-absent: raise Exists if the blob exists, in place of Forbidden and Locked.

        Azure requires the right to write for an overwrite.  Without it, the status can be 403 instead of 409.
        """
        try:
            yield
        except (Forbidden, Locked) as error:
            if self.head(key) is None:
                raise
            raise Exists(str(error)) from error
