# SPDX-License-Identifier: Apache-2.0
"""Address, credentials and error responses of a container of Azure Blob Storage."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime
from functools import partial
from typing import Any
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
from swansong_bucket.stores.base import Body, Sink, account_container_and_prefix, named
from swansong_bucket.stores.clock import SigningClock
from swansong_bucket.stores.credentials import CredentialCache
from swansong_bucket.stores.http.client import Response, Wire
from swansong_bucket.stores.remote import ENDPOINT, WireLimits, refusal, translated, wire_to
from swansong_bucket.stores.responses import one_line, xml_text

_ENDPOINT = re.compile(rf"{ENDPOINT.pattern}(/[a-z0-9]{{3,24}})?/?")
_VERSION = "2021-12-02"
"""Version of the interface: old enough for every cloud of Azure, and for Azurite."""

# Codes whose cause is the credentials: rotated keys, expired signatures and tokens.
_CREDENTIALS_CODES = {
    "AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation",
    "KeyBasedAuthenticationNotPermitted",
}  # fmt: skip
_LOCKED_CODES = {
    "BlobImmutableDueToPolicy", "BlobImmutableDueToLegalHold", "LeaseIdMissing", "SnapshotsPresent",
}  # fmt: skip
_OFFLINE_CODES = {"BlobArchived", "BlobBeingRehydrated"}
_ROLE = "Grant the role Storage Blob Data Contributor on the container, or packer/permissions/azure-vm.json"
_ELSEWHERE = "Redirects are not followed: set store.endpoint to the store's own address"
_HINTS = {
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
    "AuthorizationSourceIPMismatch": "Allow the address of this VM in the shared access signature",
    "AuthorizationPermissionMismatch": _ROLE,
    "InsufficientAccountPermissions": "Allow read, list and create in the shared access signature",
    "UnauthorizedBlobOverwrite": _ROLE,
    **dict.fromkeys(_OFFLINE_CODES, "Rehydrate the blob, and remove the rule that archives blobs"),
}


class BlobMissing(NotFound):
    """The container exists, and the blob does not."""


@dataclass(frozen=True, slots=True)
class AzureRequest:
    """A request before it is authorized."""

    method: str
    path: str
    parameters: Mapping[str, str]
    headers: Mapping[str, str]
    body: Body | None
    sink: Sink | None


class AzureAccess:
    """Requests to one container, with its connections and credentials.

    Uses the account key or the shared access signature of the environment, else tokens of azure-identity.  A
    token is never sent over plain http.

    Args:
        config: with a URL ``az://account/container/prefix``.

    Raises:
        ConfigError: the URL has another form, or the endpoint is not ``https://host[:port][/account]``.
    """

    def __init__(self, config: StoreAccess, limits: WireLimits) -> None:
        self._url = config.url or ""
        self._account, container, self.prefix = account_container_and_prefix(self._url)
        if config.endpoint and not _ENDPOINT.fullmatch(config.endpoint):
            problem = f"{config.endpoint!r:.80} must read https://host[:port], and for Azurite"
            raise ConfigError([f"store.endpoint: {problem} http://host:port/account"])
        azure = f"https://{self._account}.blob.core.windows.net"
        self._address = (config.endpoint or azure).rstrip("/")
        self._path = f"{urlsplit(self._address).path}/{container}"
        self._timeout_s = limits.read_timeout_s
        trusted = os.environ.get("REQUESTS_CA_BUNDLE") or None
        self._credentials = CredentialCache(
            "Azure", load=self._load_credentials, fetch=_fetched, has_expired=_has_expired
        )
        self._signing = SigningClock()
        self._wire = wire_to(self._address, config, limits, trusted)

    def renew_credentials(self) -> None:
        """Renew a token that expires soon; raises Permanent if there are no credentials."""
        self._credentials.renew()

    def call(
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
        """Send one request for a blob, or with key None for the container; returns the response of a success.

        Raises:
            Transient: also when other credentials were found after a refusal.
            StoreError: the store refused the request.
        """
        path = self._path if key is None else f"{self._path}/{quote(self.prefix + key)}"
        with named(f"{what} in {self._url}"):
            credentials = self._credentials.get()
            request = AzureRequest(method, path, parameters or {}, headers or {}, body, sink)
            response = self._signing.answered(partial(_sent, self._wire, credentials, request))
            if response.status < 300:
                self._credentials.accept(credentials)
                return response
            code = response.headers.get("x-ms-error-code") or xml_text(response.body, "Code")
            if response.status == 401 or code in _CREDENTIALS_CODES:
                if self._credentials.replace(credentials, is_certain=True):
                    raise Transient(f"{_message(response, code)}; other credentials were found")
                raise Permanent(_message(response, code), hint=_HINTS.get(code, CREDENTIALS_HINT))
            raise _refusal(response, code)

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


def _sent(
    wire: Wire, credentials: AzureCredentials, request: AzureRequest, signed: datetime
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


def _fetched(source: AzureCredentials | Identity) -> AzureCredentials:
    if not isinstance(source, Identity):
        return source
    with _errors_of_identity():
        return source.token()


def _has_expired(source: Any) -> bool:
    return isinstance(source, Identity) and source.has_expired


def _errors_of_identity() -> AbstractContextManager[None]:
    """Turn errors of azure-identity into errors of the contract."""
    return translated("credentials for Azure", classified)


# ---------------------------------------------------------------- errors


def _message(response: Response, code: str) -> str:
    # Further lines of the message have the id and the time of the request.
    reason = xml_text(response.body, "Message").partition("\n")[0].strip().rstrip(".")
    words = (str(response.status), one_line(code, 80), one_line(reason, 300))
    return " ".join(filter(None, words))


def _refusal(response: Response, code: str) -> StoreError:
    """The error of the contract for a response with an error status."""
    message = _message(response, code)
    hint = _HINTS.get(code, _ELSEWHERE if response.status < 400 else "")
    if code == "BlobNotFound":
        return BlobMissing(message, hint=hint)
    if code in _LOCKED_CODES:
        return Locked(
            message, hint="Remove the policy, the lease or the snapshots, or delete later"
        )
    if code == "BlobAlreadyExists":
        return Exists(message)
    if code in _OFFLINE_CODES:
        return Permanent(message, hint=hint)
    return refusal(response, message, hint, is_transient=code in ("Md5Mismatch", "IncompleteBody"))
