# SPDX-License-Identifier: Apache-2.0
"""The store contract on Azure Blob Storage.

Every write contains an MD5, which the store verifies and keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import NotFound
from swansong_bucket.stores import responses
from swansong_bucket.stores.azure.access import AzureAccess, BlobMissing
from swansong_bucket.stores.azure.auth import content_md5
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.remote import DEFAULT_LIMITS, RemoteStore, WireLimits


class AzureStore(RemoteStore):
    """A container, or a prefix in one.

    For credentials see :class:`swansong_bucket.stores.azure.access.AzureAccess`.  Swansong gives blobs no
    retention: the policy of a container refuses a delete with Locked.  In a container with policies for
    versions, a delete keeps the bytes as an older version.

    Args:
        config: with a URL ``az://account/container/prefix``.
    """

    _checksum_header = "content-md5"
    _listing: ClassVar[Mapping[str, str]] = {"restype": "container", "comp": "list"}
    _size_name, _token_name = "maxresults", "marker"
    _page_items = 500  # there are more than twenty elements for each blob
    _put_headers: ClassVar[Mapping[str, str]] = {"x-ms-blob-type": "BlockBlob"}

    def __init__(self, config: StoreAccess, limits: WireLimits = DEFAULT_LIMITS) -> None:
        super().__init__(config, AzureAccess(config, limits, self.check))

    # ------------------------------------------------------------ requests

    # Versions of the interface before 2026-02-06 start at the first key.
    _parsed = staticmethod(responses.blobs)

    def _expect_bucket(self, key: str, error: NotFound) -> None:  # noqa: ARG002 - Azure has two codes
        if not isinstance(error, BlobMissing):
            raise error

    def _checksum(self, body: Body) -> str:
        return content_md5(body.data)
