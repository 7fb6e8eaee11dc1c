# SPDX-License-Identifier: Apache-2.0
"""Credentials, address and error responses of Google Cloud Storage."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from swansong import bounds
from swansong.bounds import BoundsError

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import ConfigError, Permanent, StoreError, Transient
from swansong_bucket.stores.base import RENEW_BELOW_S, Body, Sink, bucket_and_prefix, named
from swansong_bucket.stores.clock import StoreClock
from swansong_bucket.stores.credentials import CredentialCache
from swansong_bucket.stores.http.client import REFUSAL_BYTES_MAX, Response, Wire
from swansong_bucket.stores.remote import ENDPOINT, WireLimits, refusal, translated, wire_to
from swansong_bucket.stores.responses import one_line, xml_text

_ADDRESS = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"

_CREDENTIALS = (
    "Give the VM a service account with the storage scope, or set application default credentials"
)
_HINTS = {
    **dict.fromkeys(
        (301, 302, 303, 307, 308),
        "Redirects are not followed: set store.endpoint to the store's own address",
    ),
    401: _CREDENTIALS,
    403: "Grant the role of packer/permissions/gcp-vm.yaml on the bucket to the VM's service account",
    404: "If the bucket is missing, create it or fix store.url",
}


class _NoCredentials(Permanent):
    """No source has application default credentials."""


class GcsAccess:
    """Requests to one bucket, with its connections and credentials.

    Uses Google's application default credentials: a file that GOOGLE_APPLICATION_CREDENTIALS names, those of
    gcloud, or the VM's service account from the metadata server.  No token is ever sent over plain http.
    Without credentials, requests to a store that is not Google's are anonymous.

    Args:
        config: with a URL ``gs://bucket/prefix``.
        check: sends a request, for the clock of the store.

    Raises:
        ConfigError: the URL has another form, or the endpoint is not ``https://host[:port]``.
    """

    def __init__(
        self, config: StoreAccess, limits: WireLimits, check: Callable[[], object]
    ) -> None:
        self._url = config.url or ""
        self.bucket, self.prefix = bucket_and_prefix(self._url)
        self.clock = StoreClock(check)
        configured = config.endpoint or _emulator()
        self._is_google = configured is None
        self._endpoint = (configured or _ADDRESS).rstrip("/")
        if not ENDPOINT.fullmatch(self._endpoint):
            raise ConfigError(
                [f"store.endpoint: {self._endpoint!r:.80} must read https://host[:port]"]
            )
        trusted = os.environ.get("REQUESTS_CA_BUNDLE") or None
        self._credentials = CredentialCache(
            "GCS",
            load=self._load_credentials,
            fetch=self._fetch_token,
            has_expired=lambda found: _left_s(found) <= 0,
        )
        self._transport = _Transport(trusted, limits.read_timeout_s)
        self._wire = wire_to(self._endpoint, config, limits, trusted)

    def renew_credentials(self) -> None:
        """Renew a token that expires soon; raises Permanent if there are no credentials."""
        if self._authorization():
            self._credentials.renew()

    def json(
        self,
        what: str,
        method: str,
        key: str | None,
        parameters: Mapping[str, str] | None = None,
        *,
        body: Body | None = None,
    ) -> Response:
        """Send one request to the JSON interface for an object; with key None for the bucket's objects."""
        target = f"/storage/v1/b/{quote(self.bucket, safe='')}/o"
        if key is not None:
            target += f"/{quote(self.prefix + key, safe='')}"
        if parameters:
            target += "?" + urlencode(parameters, quote_via=quote)
        with named(f"{what} in {self._url}"):
            headers = {"content-type": "application/json"} if body is not None else {}
            return self.exchange(method, target, headers, body=body)

    def xml(
        self,
        what: str,
        method: str,
        key: str,
        *,
        headers: Mapping[str, str],
        body: Body | None = None,
        sink: Sink | None = None,
    ) -> Response:
        """Send one request to the XML interface for an object."""
        target = f"/{self.bucket}/{quote(self.prefix + key)}"
        with named(f"{what} in {self._url}"):
            return self.exchange(method, target, headers, body=body, sink=sink)

    def exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        *,
        body: Body | None = None,
        sink: Sink | None = None,
    ) -> Response:
        """Send one request to the XML or JSON interface; returns the response of a success.

        When the store refuses a token, one thread reads the credentials again for all threads.

        Raises:
            Transient: also when the credentials were renewed after a refusal.
            Permanent: also for a redirect, and when the store refuses the renewed credentials.
        """
        authorization = self._authorization()
        response = self._wire.request(
            method, target, {**(headers or {}), **authorization}, body=body, sink=sink
        )
        # The cause of a 403 is a missing right, or a new key file of another account.
        is_of_credentials = bool(authorization) and response.status in (401, 403)
        if is_of_credentials and self._credentials.replace(
            authorization, is_certain=response.status == 401
        ):
            raise Transient(f"{_message(response)}; the credentials have been renewed")
        if response.status >= 300:
            raise _refusal(response)
        self._credentials.accept(authorization)
        self.clock.observe(response.headers.get("date", ""))
        return response

    def _authorization(self) -> Mapping[str, str]:
        """Headers that authorise a request; empty for anonymous requests."""
        if self._endpoint.startswith("http:"):
            return {}
        try:
            return self._credentials.get()
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

    def _fetch_token(self, found: Any) -> Mapping[str, str]:
        """Headers with a token, renewed if it expires soon."""
        with _errors_of_credentials():
            if _left_s(found) < RENEW_BELOW_S:
                found.refresh(self._transport)
            headers: dict[str, str] = {}
            found.apply(headers, found.token)
            return headers


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


def _message(response: Response) -> str:
    code = one_line(xml_text(response.body, "Code"), 80)
    reason = one_line(_reason(response.body), 300)
    return " ".join(filter(None, (str(response.status), code, reason)))


def _refusal(response: Response) -> StoreError:
    """The error of the contract for a response with an error status."""
    code, message = xml_text(response.body, "Code"), _message(response)
    hint = _HINTS.get(response.status, "")
    if response.status == 404 and code not in ("", "NoSuchBucket"):
        hint = ""
    is_transient = code in ("BadDigest", "IncompleteBody")
    return refusal(response, message, hint, is_transient=is_transient)


def _reason(body: bytes) -> str:
    """The message of an error response: JSON, XML or plain text."""
    try:
        whole = bounds.json_object(body, "the refusal", REFUSAL_BYTES_MAX)
    except BoundsError:
        tags = [xml_text(body, tag) for tag in ("Message", "Details", "title")]
        is_text = not body.lstrip().startswith((b"<", b"{"))
        return " ".join(filter(None, tags)) or (body.decode("utf-8", "replace") if is_text else "")
    found = whole.get("error", whole)
    if isinstance(found, dict):
        found = found.get("message")
    return found if isinstance(found, str) else ""


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
