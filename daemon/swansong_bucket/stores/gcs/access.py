# SPDX-License-Identifier: Apache-2.0
"""Credentials, address and error responses of Google Cloud Storage."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import quote, urlencode, urlsplit

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import ConfigError, Permanent, StoreError, Transient
from swansong_bucket.stores.base import RENEW_BELOW_S, Body, bucket_and_prefix
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

_ADDRESS = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"

_CREDENTIALS = (
    "Give the VM a service account with the storage scope, or set application default credentials"
)


class _NoCredentials(Permanent):
    """No source has application default credentials."""


class GcsAccess(RemoteAccess):
    """Requests to one bucket, with its connections and credentials.

    Uses Google's application default credentials: a file that GOOGLE_APPLICATION_CREDENTIALS names, those of
    gcloud, or the VM's service account from the metadata server.  No token is ever sent over plain http.
    Without credentials, requests to a store that is not Google's are anonymous.

    Args:
        config: with a URL ``gs://bucket/prefix``.

    Raises:
        ConfigError: the URL has another form, or the endpoint is not ``https://host[:port]``.
    """

    _credentials_hint = _CREDENTIALS
    _kinds: ClassVar[Mapping[str, type[StoreError]]] = {
        "BadDigest": Transient,
        "IncompleteBody": Transient,
    }
    _hints: ClassVar[Mapping[str, str]] = {
        **REDIRECT_HINTS,
        "401": _CREDENTIALS,
        "403": "Grant the role of packer/permissions/gcp-vm.yaml on the bucket to the VM's service account",
        "404": "If the bucket is missing, create it or fix store.url",
        "NoSuchKey": "",
    }

    def __init__(
        self, config: StoreAccess, limits: WireLimits, check: Callable[[], object]
    ) -> None:
        super().__init__("GCS", config, check)
        self.bucket, self.prefix = bucket_and_prefix(self._url)
        configured = config.endpoint or _emulator()
        self._is_google = configured is None
        self._endpoint = (configured or _ADDRESS).rstrip("/")
        if not ENDPOINT.fullmatch(self._endpoint):
            raise ConfigError(
                [f"store.endpoint: {self._endpoint!r:.80} must read https://host[:port]"]
            )
        trusted = os.environ.get("REQUESTS_CA_BUNDLE") or None
        self._transport = _Transport(trusted, limits.read_timeout_s)
        self._wire = wire_to(self._endpoint, config, limits, trusted)

    def renew_credentials(self) -> None:
        if self._authorization():
            self._credentials.renew()

    def ask(self, what: str, method: str, target: str) -> Response:
        """Send a request of google-cloud-storage: its path with its query."""
        return self._exchange(what, StoreRequest(method, target, {}, {}))

    def _path(self, key: str | None, *, is_data: bool) -> str:
        """The XML interface has the bytes of objects, the JSON interface everything else."""
        if key is not None and is_data:
            return f"/{self.bucket}/{quote(self.prefix + key)}"
        below = "" if key is None else f"/{quote(self.prefix + key, safe='')}"
        return f"/storage/v1/b/{quote(self.bucket, safe='')}/o{below}"

    def _answered(self, used: Mapping[str, str], request: StoreRequest) -> Response:
        query = urlencode(request.parameters, quote_via=quote)
        return self._wire.request(
            request.method,
            f"{request.path}?{query}" if query else request.path,
            {**request.headers, **used},
            body=request.body,
            sink=request.sink,
        )

    def _are_refused(
        self, response: Response, code: str, request: StoreRequest, used: Any
    ) -> bool | None:
        """As in the base class: the cause of a 403 can be a new key file of another account."""
        if not used:
            return False
        is_doubtful = response.status == 403
        return super()._are_refused(response, code, request, used) or (
            None if is_doubtful else False
        )

    def _authorization(self) -> Mapping[str, str]:
        """Headers that authorise a request; empty for anonymous requests."""
        if self._endpoint.startswith("http:"):
            return {}
        try:
            found: Mapping[str, str] = self._credentials.get()
            return found
        except _NoCredentials:
            if self._is_google:
                raise
            return {}

    def _load_credentials(self) -> Any:
        """Google's default credentials, from the first source that has some."""
        # Plain http to the metadata server, as in sources/.
        os.environ.setdefault("GCE_METADATA_MTLS_MODE", "none")
        import google.auth  # noqa: PLC0415 - a VM on another cloud need not load it
        from google.auth.exceptions import DefaultCredentialsError  # noqa: PLC0415

        with _errors_of_credentials():
            try:
                return google.auth.default(scopes=[_SCOPE], request=self._transport)[0]
            except DefaultCredentialsError as error:
                raise _NoCredentials("none found", hint=_CREDENTIALS) from error

    def _fetch_credentials(self, source: Any) -> Mapping[str, str]:
        """Headers with a token, renewed if it expires soon."""
        with _errors_of_credentials():
            if _left_s(source) < RENEW_BELOW_S:
                source.refresh(self._transport)
            headers: dict[str, str] = {}
            source.apply(headers, source.token)
            return headers

    def _has_expired(self, source: Any) -> bool:
        return _left_s(source) <= 0


def _emulator() -> str | None:
    """The server of STORAGE_EMULATOR_HOST, as a URL; None if it is not set."""
    named = os.environ.get("STORAGE_EMULATOR_HOST") or None
    return named if named is None or "://" in named else f"http://{named}"


def _left_s(found: Any) -> float:
    """Seconds until the token expires; 0 without a token."""
    if found.token is None:
        return 0.0
    if found.expiry is None:
        return math.inf
    expiry: datetime = found.expiry
    return (expiry.replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds()


@dataclass(frozen=True, slots=True)
class _TokenResponse:
    """A response in the form that Google's credentials read."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class _Transport:
    """Sends the requests of Google's credentials once each, with bounded responses and without redirects.

    Args:
        ca_bundle: certificates to trust; None for the system's.
        timeout_s: limit of each step if the credentials give none.
    """

    def __init__(self, ca_bundle: str | None, timeout_s: float) -> None:
        self._ca_bundle = ca_bundle
        self._timeout_s = timeout_s

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> _TokenResponse:
        from google.auth.exceptions import TransportError  # noqa: PLC0415

        parts = urlsplit(url)
        limit_s = timeout or self._timeout_s
        wire = Wire(
            f"{parts.scheme}://{parts.netloc}",
            connections=1,
            ca_bundle=self._ca_bundle,
            connect_timeout_s=limit_s,
            stall_s=limit_s,
            first_byte_s=limit_s,
            response_s=limit_s,
            is_proxied=parts.scheme == "https",  # a metadata server is never behind a proxy
        )
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        data = body.encode() if isinstance(body, str) else body
        try:
            response = wire.request(
                method, target, headers or {}, body=None if data is None else Body(data)
            )
        except StoreError as error:
            raise TransportError(error) from error
        finally:
            wire.close()
        return _TokenResponse(response.status, response.headers, response.body)


# ---------------------------------------------------------------- errors


def _errors_of_credentials() -> AbstractContextManager[None]:
    """Turn errors of Google's credentials into errors of the contract."""
    return translated("credentials for GCS", _classified)


def _classified(error: Exception, message: str) -> StoreError:
    """The error of the contract for a request without a response."""
    from google.auth.exceptions import GoogleAuthError, TransportError  # noqa: PLC0415

    if isinstance(error, GoogleAuthError):
        # A TransportError: the metadata service did not respond.
        lost = isinstance(error, TransportError) or isinstance(error.__cause__, TransportError)
        return (
            Transient(message) if lost or error.retryable else Permanent(message, hint=_CREDENTIALS)
        )
    if isinstance(error, OSError):
        return Transient(message)
    return Permanent(message, hint=_CREDENTIALS)
