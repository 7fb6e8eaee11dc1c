# SPDX-License-Identifier: Apache-2.0
"""Address, credentials and error responses of a container of Azure Blob Storage."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from email.utils import format_datetime
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote, urlencode, urlsplit

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import (
    ConfigError,
    Exists,
    Locked,
    NotFound,
    Permanent,
    StoreError,
    Transient,
)
from swansong_bucket.stores.azure.auth import (
    CREDENTIALS_HINT,
    AzureCredentials,
    Identity,
    Sas,
    SharedKey,
    Token,
    classified,
    from_environment,
)
from swansong_bucket.stores.base import account_container_and_prefix
from swansong_bucket.stores.clock import SigningClock
from swansong_bucket.stores.http.client import Response, Wire
from swansong_bucket.stores.remote import (
    ENDPOINT,
    REDIRECT_HINTS,
    RemoteAccess,
    StoreRequest,
    WireLimits,
    translated,
    wire_to,
)

_ENDPOINT = re.compile(rf"{ENDPOINT.pattern}(/[a-z0-9]{{3,24}})?/?")
_VERSION = "2021-12-02"
"""Version of the interface: old enough for every cloud of Azure, and for Azurite."""

_LOCKED_CODES = (
    "BlobImmutableDueToPolicy", "BlobImmutableDueToLegalHold", "LeaseIdMissing", "SnapshotsPresent",
)  # fmt: skip
_OFFLINE_CODES = ("BlobArchived", "BlobBeingRehydrated")
_ROLE = "Grant the role Storage Blob Data Contributor on the container, or packer/permissions/azure-vm.json"


class BlobMissing(NotFound):
    """The container exists, and the blob does not."""


class AzureAccess(RemoteAccess):
    """Requests to one container, with its connections and credentials.

    Uses the account key or the shared access signature of the environment, else tokens of azure-identity.  A
    token is never sent over plain http.

    Args:
        config: with a URL ``az://account/container/prefix``.

    Raises:
        ConfigError: the URL has another form, or the endpoint is not ``https://host[:port][/account]``.
    """

    _credentials_codes = (
        "AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation",
        "KeyBasedAuthenticationNotPermitted",
    )  # fmt: skip
    _credentials_hint = CREDENTIALS_HINT
    _kinds: ClassVar[Mapping[str, type[StoreError]]] = {
        **dict.fromkeys(_LOCKED_CODES, Locked),
        **dict.fromkeys(_OFFLINE_CODES, Permanent),
        "BlobNotFound": BlobMissing,
        "BlobAlreadyExists": Exists,
        "IncompleteBody": Transient,
        "Md5Mismatch": Transient,
    }
    _hints: ClassVar[Mapping[str, str]] = {
        **REDIRECT_HINTS,
        "ContainerNotFound": "Create the container, or fix store.url",
        "ResourceNotFound": "Create the container, or fix store.url",
        "AccountIsDisabled": "Enable the storage account, or fix store.url",
        "KeyBasedAuthenticationNotPermitted": (
            "The account allows no keys: remove AZURE_STORAGE_KEY, and assign a managed identity to the VM"
        ),
        "AuthenticationFailed": (
            "Renew the key, the signature or the identity; if they are valid, fix the clock of this VM"
        ),
        "AuthorizationFailure": (
            "Allow the network of this VM in the firewall of the storage account, or fix the key"
        ),
        "AuthorizationSourceIPMismatch": (
            "Allow the address of this VM in the shared access signature"
        ),
        "AuthorizationPermissionMismatch": _ROLE,
        "InsufficientAccountPermissions": (
            "Allow read, list and create in the shared access signature"
        ),
        "UnauthorizedBlobOverwrite": _ROLE,
        **dict.fromkeys(
            _LOCKED_CODES, "Remove the policy, the lease or the snapshots, or delete later"
        ),
        **dict.fromkeys(
            _OFFLINE_CODES, "Rehydrate the blob, and remove the rule that archives blobs"
        ),
    }

    def __init__(
        self, config: StoreAccess, limits: WireLimits, check: Callable[[], object]
    ) -> None:
        super().__init__("Azure", config, check)
        self._account, self.bucket, self.prefix = account_container_and_prefix(self._url)
        if config.endpoint and not _ENDPOINT.fullmatch(config.endpoint):
            problem = f"{config.endpoint!r:.80} must read https://host[:port], and for Azurite"
            raise ConfigError([f"store.endpoint: {problem} http://host:port/account"])
        azure = f"https://{self._account}.blob.core.windows.net"
        self._address = (config.endpoint or azure).rstrip("/")
        self._path_of_container = f"{urlsplit(self._address).path}/{self.bucket}"
        self._timeout_s = limits.read_timeout_s
        trusted = os.environ.get("REQUESTS_CA_BUNDLE") or None
        self._signing = SigningClock()
        self._wire = wire_to(self._address, config, limits, trusted)

    def _path(self, key: str | None, *, is_data: bool) -> str:  # noqa: ARG002 - for GCS
        return self._path_of_container + ("" if key is None else f"/{quote(self.prefix + key)}")

    def _answered(self, used: AzureCredentials, request: StoreRequest) -> Response:
        return self._signing.answered(partial(_sent, self._wire, used, request))

    def _load_credentials(self) -> AzureCredentials | Identity:
        """The first source that has credentials."""
        found = from_environment(self._account)
        if found is not None:
            return found
        if self._address.startswith("http:"):
            raise Permanent(
                f"{self._address} is plain http, and no token of an identity is sent over it",
                hint="Set store.endpoint to an https address, or set AZURE_STORAGE_KEY",
            )
        with _errors_of_identity():
            return Identity(self._timeout_s)

    def _fetch_credentials(self, source: AzureCredentials | Identity) -> AzureCredentials:
        if not isinstance(source, Identity):
            return source
        with _errors_of_identity():
            return source.token()

    def _has_expired(self, source: Any) -> bool:
        return isinstance(source, Identity) and source.has_expired


def _sent(
    wire: Wire, credentials: AzureCredentials, request: StoreRequest, signed: datetime
) -> Response:
    """Authorize a request with this time, and send it, once."""
    date = format_datetime(signed, usegmt=True)
    body, headers = request.body, {"x-ms-date": date, "x-ms-version": _VERSION, **request.headers}
    query = urlencode(request.parameters, quote_via=quote)
    match credentials:
        case SharedKey():
            length = {"content-length": str(body.size_bytes)} if body and body.size_bytes else {}
            headers["authorization"] = credentials.authorization(
                request.method, request.path, request.parameters, {**headers, **length}
            )
        case Sas():
            query = "&".join(filter(None, (query, credentials.query)))
        case Token():
            headers["authorization"] = f"Bearer {credentials.text}"
    target = f"{request.path}?{query}" if query else request.path
    return wire.request(request.method, target, headers, body=body, sink=request.sink)


def _errors_of_identity() -> AbstractContextManager[None]:
    """Turn errors of azure-identity into errors of the contract."""
    return translated("credentials for Azure", classified)
