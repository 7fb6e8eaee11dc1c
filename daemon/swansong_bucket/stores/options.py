# SPDX-License-Identifier: Apache-2.0
"""How to reach a store, as one value that is checked when it is made."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swansong_bucket.errors import ConfigError
from swansong_bucket.stores.retention import Lock

Addressing = Literal["auto", "path", "virtual"]

_GCS_ENDPOINT = "https://storage.googleapis.com"
ENDPOINT = re.compile(r"https?://([^/@?#:\[\]]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


_AZURE_ENDPOINT = re.compile(rf"{ENDPOINT.pattern}(/[a-z0-9]{{3,24}})?/?")


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Options of every store that is reached over the network.

    Raises:
        ConfigError: ``ca_bundle`` is not a file.
    """

    endpoint: str | None = None
    """URL of a compatible store, an emulator or a private endpoint; None: the provider's."""
    connections: int = 16
    """Threads that call the store at the same time."""
    ca_bundle: Path | None = None
    """Certificates to trust; None: those of the provider's environment variable, or the system's."""
    connect_timeout_s: float = 3.0
    """Limit for opening a connection."""
    read_timeout_s: float = 8.0
    """Limit for one wait for a response."""
    lock: Lock | None = None
    """Retention of new objects; None: they get none."""

    def __post_init__(self) -> None:
        if self.ca_bundle is not None and not self.ca_bundle.is_file():
            raise ConfigError(
                [f"store.ca_bundle: is not a file (got {str(self.ca_bundle)!r}); name a PEM file"]
            )


@dataclass(frozen=True, kw_only=True)
class S3Options(StoreOptions):
    """Options of S3 and compatible stores."""

    region: str | None = None
    """Region of the bucket; None: from boto3's configuration, then from the store's redirect."""
    profile: str | None = None
    """Profile of the AWS configuration files; None: boto3's default credential chain."""
    addressing: Addressing = "auto"
    """Position of the bucket name in a URL; ``auto``: the path with an endpoint, else as AWS does."""


@dataclass(frozen=True, kw_only=True)
class GcsOptions(StoreOptions):
    """Options of Google Cloud Storage.

    Raises:
        ConfigError: ``ca_bundle`` is not a file, or the endpoint is not ``https://host[:port]``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not ENDPOINT.fullmatch(self.address):
            raise ConfigError(
                [f"store.endpoint: {self.address!r:.80} must read https://host[:port]"]
            )

    @property
    def address(self) -> str:
        """The endpoint, else the server of STORAGE_EMULATOR_HOST, else Google's."""
        return (self.endpoint or _emulator() or _GCS_ENDPOINT).rstrip("/")

    @property
    def is_google(self) -> bool:
        """Whether no endpoint and no emulator is configured."""
        return not (self.endpoint or _emulator())


@dataclass(frozen=True, kw_only=True)
class AzureOptions(StoreOptions):
    """Options of Azure Blob Storage.

    Raises:
        ConfigError: ``ca_bundle`` is not a file, or the endpoint is not ``https://host[:port][/account]``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint and not _AZURE_ENDPOINT.fullmatch(self.endpoint):
            problem = f"{self.endpoint!r:.80} must read https://host[:port], and for Azurite"
            raise ConfigError([f"store.endpoint: {problem} http://host:port/account"])

    def address(self, account: str) -> str:
        """The endpoint, else Azure's for this account."""
        return (self.endpoint or f"https://{account}.blob.core.windows.net").rstrip("/")


def _emulator() -> str | None:
    """The server of STORAGE_EMULATOR_HOST, as a URL."""
    named = os.environ.get("STORAGE_EMULATOR_HOST")
    return named if not named or "://" in named else f"http://{named}"
