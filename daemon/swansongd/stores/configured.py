# SPDX-License-Identifier: Apache-2.0
"""From the configuration to the store that it names."""

from __future__ import annotations

from swansongd.config.config import StoreConfig
from swansongd.errors import ConfigError
from swansongd.stores.base import ObjectStore
from swansongd.stores.opening import open_store


def open_configured(config: StoreConfig, *, connections: int = 16) -> ObjectStore:
    """The store of the configuration.  Asks nothing of it yet.

    Raises:
        ConfigError: it names no store that we know, or files that are not there.
    """
    if config.ca_bundle is not None and not config.ca_bundle.is_file():
        raise ConfigError(
            [f"store.ca_bundle: is no file (got {str(config.ca_bundle)!r}); name a PEM file"]
        )
    return open_store(
        config.url,
        endpoint=config.endpoint,
        region=config.region,
        connections=connections,
        profile=config.profile,
        ca_bundle=str(config.ca_bundle) if config.ca_bundle is not None else None,
        addressing=config.addressing,
        checksums=config.checksums,
    )
