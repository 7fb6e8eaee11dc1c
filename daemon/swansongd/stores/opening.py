# SPDX-License-Identifier: Apache-2.0
"""From the URL in the configuration to the store that it names."""

from __future__ import annotations

from swansongd.errors import ConfigError
from swansongd.stores.base import ObjectStore
from swansongd.stores.file.store import FileStore
from swansongd.stores.gcs.store import GcsStore
from swansongd.stores.s3.access import Addressing
from swansongd.stores.s3.store import Checksums, S3Store


def open_store(
    url: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    connections: int = 16,
    profile: str | None = None,
    ca_bundle: str | None = None,
    addressing: Addressing = "auto",
    checksums: Checksums = "auto",
) -> ObjectStore:
    """The backend for ``file://``, ``s3://`` or ``gs://``.  Asks nothing of it yet: see ``check()``.

    What concerns one provider only is ignored by the others.

    Raises:
        ConfigError: the URL names no store that we know, or not in full.
    """
    match url.partition("://")[0]:
        case "file":
            return FileStore(url)
        case "s3":
            return S3Store(
                url,
                endpoint,
                region,
                connections,
                profile=profile,
                ca_bundle=ca_bundle,
                addressing=addressing,
                checksums=checksums,
            )
        case "gs":
            return GcsStore(url, endpoint, connections, ca_bundle=ca_bundle)
        case scheme:
            raise ConfigError([f"store.url: {scheme!r:.40} is none of file://, s3://, gs://"])
