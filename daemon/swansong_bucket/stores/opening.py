# SPDX-License-Identifier: Apache-2.0
"""Opens the store and the mirror of the configuration."""

from __future__ import annotations

from swansong_bucket.config.sections import MirrorConfig, StoreAccess
from swansong_bucket.errors import ConfigError
from swansong_bucket.stores.azure.store import AzureStore
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.stores.gcs.store import GcsStore
from swansong_bucket.stores.remote import WireLimits
from swansong_bucket.stores.retention import Lock
from swansong_bucket.stores.s3.store import S3Store


def open_store(
    config: StoreAccess,
    *,
    connections: int = 16,
    lock: Lock | None = None,
) -> ObjectStore:
    """The backend for ``file://``, ``s3://``, ``gs://`` or ``az://``.  Sends no request: see ``check()``.

    The options of one provider are ignored by the others.

    Args:
        config: with a URL that :func:`swansong_bucket.config.values.store_url` accepts.
        lock: retention of new objects, on S3 and GCS; None: they get none.

    Raises:
        ConfigError: an option is wrong.
    """
    url = config.url or ""
    limits = WireLimits(connections=connections)
    match url.partition("://")[0]:
        case "file":
            return FileStore(url)
        case "s3":
            return S3Store(config, limits, lock=lock)
        case "gs":
            return GcsStore(config, limits, lock=lock)
        case _:
            return AzureStore(config, limits)


def open_mirror(config: MirrorConfig, *, connections: int | None = None) -> ObjectStore | None:
    """The store that receives a copy of each commit; None if no mirror is configured.  Sends no request.

    Args:
        connections: threads that call the store at the same time; None: those of the configuration.

    Raises:
        ConfigError: an option is wrong.
    """
    if config.url is None:
        return None
    try:
        return open_store(config, connections=connections or config.connections)
    except ConfigError as error:
        problems = [problem.replace("store.", "mirror.", 1) for problem in error.problems]
        raise ConfigError(problems, hint=error.hint) from None
