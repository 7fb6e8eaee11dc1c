# SPDX-License-Identifier: Apache-2.0
"""Opens the store of the configuration."""

from __future__ import annotations

from collections.abc import Callable

from swansongd.config.config import StoreConfig
from swansongd.errors import ConfigError
from swansongd.stores.base import ObjectStore
from swansongd.stores.file.store import FileStore
from swansongd.stores.gcs.store import GcsStore
from swansongd.stores.options import GcsOptions, S3Options
from swansongd.stores.retention import Lock
from swansongd.stores.s3.store import S3Store


def open_store(
    config: StoreConfig,
    *,
    connections: int = 16,
    lock_period_s: Callable[[str], float] | None = None,
) -> ObjectStore:
    """The backend for ``file://``, ``s3://`` or ``gs://``.  Sends no request: see ``check()``.

    The options of one provider are ignored by the others.

    Args:
        lock_period_s: retention of a new object by its key; None: this store writes nothing that needs one.

    Raises:
        ConfigError: the URL does not name a store, or an option is wrong.
    """
    lock = None
    if config.lock_days and lock_period_s is not None:
        lock = Lock(config.lock_mode, lock_period_s)
    match config.url.partition("://")[0]:
        case "file":
            if config.lock_days:
                raise ConfigError(
                    [
                        "store.lock_days: a directory locks no files; remove the key, or use S3 or GCS"
                    ]
                )
            return FileStore(config.url)
        case "s3":
            return S3Store(
                config.url,
                S3Options(
                    endpoint=config.endpoint,
                    connections=connections,
                    ca_bundle=config.ca_bundle,
                    lock=lock,
                    region=config.region,
                    profile=config.profile,
                    addressing=config.addressing,
                    checksums=config.checksums,
                ),
            )
        case "gs":
            return GcsStore(
                config.url,
                GcsOptions(
                    endpoint=config.endpoint,
                    connections=connections,
                    ca_bundle=config.ca_bundle,
                    lock=lock,
                ),
            )
        case scheme:
            raise ConfigError(
                [f"store.url: unknown scheme {scheme!r:.40}; use file://, s3:// or gs://"]
            )
