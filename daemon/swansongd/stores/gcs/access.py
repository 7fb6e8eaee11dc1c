# SPDX-License-Identifier: Apache-2.0
"""Who we are to Google Cloud Storage, where it is, and what its refusals mean."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from swansong import bounds
from swansong.bounds import BoundsError

from swansongd.errors import ConfigError, Exists, NotFound, Permanent, StoreError, Transient
from swansongd.stores.answers import one_line, xml_text
from swansongd.stores.base import (
    RENEW_BELOW_S,
    Body,
    BytesBody,
    Sink,
    is_certificate_problem,
    named,
)
from swansongd.stores.credentials import Credentials
from swansongd.stores.http.client import REFUSAL_BYTES_MAX, Answer, Wire
from swansongd.util.http1 import retry_after_s

_PUBLIC_ENDPOINT = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_ENDPOINT = re.compile(r"https?://([^/@?#:\[\]]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_STALL_S_MAX = 3.0

_CREDENTIALS = (
    "Give the VM a service account with the storage scope, or set application default credentials"
)
_HINTS = {
    **dict.fromkeys(
        (301, 302, 303, 307, 308),
        "Redirects are not followed: name the store's own address in store.endpoint",
    ),
    401: _CREDENTIALS,
    403: "Grant the role of packer/permissions/gcp-vm.yaml on the bucket to the VM's service account",
    404: "If it is the bucket that is missing: make it, or fix store.url",
}


class Forbidden(Permanent):
    """403: these credentials lack a right."""


class _NoCredentials(Permanent):
    """There are no application default credentials."""


class GcsAccess:
    """Connections and credentials for one bucket.

    Credentials are Google's application default ones: a file that GOOGLE_APPLICATION_CREDENTIALS names,
    those of gcloud, or the VM's service account from the metadata server.  No token is ever sent over
    plain http, and a store that is not Google's is used anonymously when there are none.

    Args:
        endpoint: of an emulator or a private endpoint; without it STORAGE_EMULATOR_HOST, or Google's.
        ca_bundle: certificates to trust; without it REQUESTS_CA_BUNDLE, or the system's.
        read_timeout_s: limit of one wait for an answer.

    Raises:
        ConfigError: the endpoint is no address of a store.
    """

    def __init__(
        self,
        *,
        endpoint: str | None,
        connections: int,
        ca_bundle: str | None,
        connect_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        endpoint = endpoint or _emulator()
        self._is_custom = endpoint is not None
        self._endpoint = (endpoint or _PUBLIC_ENDPOINT).rstrip("/")
        if not _ENDPOINT.fullmatch(self._endpoint):
            raise ConfigError([f"store.endpoint: {endpoint!r:.80} must read https://host[:port]"])
        trusted = os.environ.get("REQUESTS_CA_BUNDLE") or None
        self._ca_bundle = ca_bundle or trusted
        self._read_timeout_s = read_timeout_s
        self._credentials = Credentials(
            "GCS",
            load=self._load_credentials,
            fetch=self._fetch_token,
            is_over=lambda found: _left_s(found) <= 0,
        )
        self._transport = _Transport(trusted, read_timeout_s)
        self._wire = Wire(
            self._endpoint,
            connections=connections,
            ca_bundle=self._ca_bundle,
            connect_timeout_s=connect_timeout_s,
            stall_s=min(_STALL_S_MAX, read_timeout_s),
            reply_s=read_timeout_s,
        )

    def renew_credentials(self) -> None:
        """Have a token that lasts for a while; raises Permanent where there are no credentials."""
        if self._identity():
            self._credentials.renew()

    def exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        body: Body | None = None,
        sink: Sink | None = None,
    ) -> Answer:
        """One request to either interface; the answer is a success.  A redirect is an error.

        When the store refuses a token, the credentials are read again, by one thread for all.  The request is
        Transient when that gives another token.  When the store refuses that one as well, it is Permanent.
        """
        identity = self._identity()
        answer = self._wire.request(method, target, {**headers, **identity}, body=body, sink=sink)
        # With 403 it may be a right that is lacking, or another account that has come with a new file.
        is_of_credentials = bool(identity) and answer.status in (401, 403)
        if is_of_credentials and self._credentials.replace(
            identity, is_certain=answer.status == 401
        ):
            raise Transient(f"{_message(answer)}; the credentials have been renewed")
        if answer.status >= 300:
            raise _refusal(answer)
        self._credentials.accept(identity)
        return answer

    def lifecycle_rules(self, bucket: str) -> list[Mapping[str, Any]]:
        """The rules of a bucket as Google's library returns them; for doctor, never while a flush is on.

        Raises:
            Permanent: they cannot be read, perhaps for want of the right storage.buckets.get.
        """
        # The library would fetch the bucket's metadata from threads of its own, for traces nobody reads.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        from google.api_core.exceptions import GoogleAPICallError  # noqa: PLC0415
        from google.auth.credentials import AnonymousCredentials  # noqa: PLC0415
        from google.auth.transport.requests import AuthorizedSession  # noqa: PLC0415
        from google.cloud.storage import Client  # noqa: PLC0415
        from google.oauth2.credentials import Credentials as TokenCredentials  # noqa: PLC0415
        from requests.exceptions import RequestException  # noqa: PLC0415

        token = self._identity().get("authorization", "").removeprefix("Bearer ")
        known = TokenCredentials(token) if token else AnonymousCredentials()
        session = AuthorizedSession(known)
        session.max_redirects = 0  # a redirect would carry the token elsewhere
        session.verify = self._ca_bundle or True
        client = Client(
            project="none",
            credentials=known,
            client_options={"api_endpoint": self._endpoint},
            _http=session,
        )
        try:
            found = client.get_bucket(bucket, timeout=self._read_timeout_s, retry=None)
            return list(found.lifecycle_rules)
        except (GoogleAPICallError, RequestException) as error:
            raise Permanent(f"settings of bucket {bucket}: {error!s:.200}") from error
        except (ValueError, TypeError, AttributeError) as error:  # the library checks no answer
            raise Permanent(f"settings of bucket {bucket}: {error!s:.200}") from error
        finally:
            session.close()

    def _identity(self) -> Mapping[str, str]:
        """The headers that say who asks; none where requests are anonymous."""
        if self._endpoint.startswith("http:"):
            return {}
        try:
            return self._credentials.get()
        except _NoCredentials:
            if self._is_custom:
                return {}
            raise

    def _load_credentials(self) -> Any:
        """Google's default credentials, from the first source that has some."""
        # The metadata server is asked over plain http, as the sources ask it.
        os.environ.setdefault("GCE_METADATA_MTLS_MODE", "none")
        import google.auth  # noqa: PLC0415 - a VM on another cloud need not load it
        from google.auth.exceptions import DefaultCredentialsError  # noqa: PLC0415

        with _errors_of_credentials():
            try:
                return google.auth.default(scopes=[_SCOPE], request=self._transport)[0]
            except DefaultCredentialsError as error:
                raise _NoCredentials("there are none", hint=_CREDENTIALS) from error

    def _fetch_token(self, found: Any) -> Mapping[str, str]:
        """Headers with a token that lasts for a while."""
        with _errors_of_credentials():
            if _left_s(found) < RENEW_BELOW_S:
                found.refresh(self._transport)
            headers: dict[str, str] = {}
            found.apply(headers, found.token)
            return headers


def _left_s(found: Any) -> float:
    """Life that the token has left; nothing where there is none yet."""
    if found.token is None:
        return 0.0
    if found.expiry is None:
        return math.inf
    expiry: datetime = found.expiry
    return (expiry.replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds()


def _emulator() -> str | None:
    """The server of STORAGE_EMULATOR_HOST, as a URL."""
    named = os.environ.get("STORAGE_EMULATOR_HOST")
    return named if not named or "://" in named else f"http://{named}"


@dataclass(frozen=True, slots=True)
class _TokenAnswer:
    """An answer as Google's credentials read it."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class _Transport:
    """Asks for tokens what Google's credentials ask, once each: bounded, and without redirects.

    Args:
        ca_bundle: certificates to trust; None for the system's.
        timeout_s: limit of each step where the credentials name none.
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
    ) -> _TokenAnswer:
        from google.auth.exceptions import TransportError  # noqa: PLC0415

        parts = urlsplit(url)
        limit_s = timeout or self._timeout_s
        wire = Wire(
            f"{parts.scheme}://{parts.netloc}",
            connections=1,
            ca_bundle=self._ca_bundle,
            connect_timeout_s=limit_s,
            stall_s=limit_s,
            reply_s=limit_s,
            answer_s=limit_s,
            is_proxied=parts.scheme == "https",  # a metadata server is never behind a proxy
        )
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        data = body.encode() if isinstance(body, str) else body
        try:
            answer = wire.request(
                method, target, headers or {}, body=None if data is None else BytesBody(data)
            )
        except StoreError as error:
            raise TransportError(error) from error
        finally:
            wire.close()
        return _TokenAnswer(answer.status, answer.headers, answer.body)


# ---------------------------------------------------------------- errors


@contextmanager
def _errors_of_credentials() -> Iterator[None]:
    """Turns what Google's credentials raise into an error of the contract."""
    what = "credentials for GCS"
    try:
        with named(what):
            yield
    except StoreError:
        raise
    except Exception as error:  # files of credentials may contain anything
        raise _classified(error, f"{what}: {error!s:.300}") from error


def _message(answer: Answer) -> str:
    code = one_line(xml_text(answer.body, "Code"), 80)
    reason = one_line(_reason(answer.body), 300)
    return " ".join(filter(None, (str(answer.status), code, reason)))


def _refusal(answer: Answer) -> StoreError:
    """The error of the contract for an answer that was no success."""
    status, code, message = answer.status, xml_text(answer.body, "Code"), _message(answer)
    hint = _HINTS.get(status, "")
    if status == 404:
        return NotFound(message, hint=hint if code in ("", "NoSuchBucket") else "")
    if status == 412:
        return Exists(message)
    is_over_soon = status in (408, 409, 429) or (status >= 500 and status != 501)
    if is_over_soon or code in ("BadDigest", "IncompleteBody"):
        return Transient(message, retry_after_s=retry_after_s(answer.headers))
    return (Forbidden if status == 403 else Permanent)(message, hint=hint)


def _reason(body: bytes) -> str:
    """The words of a refusal: in the JSON of one interface, the XML of the other, or as plain text."""
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
    """The error of the contract for what happened before or instead of an answer."""
    from google.auth.exceptions import GoogleAuthError, TransportError  # noqa: PLC0415

    if is_certificate_problem(error):
        return Permanent(message, hint="The store's certificate is not trusted on this VM")
    if isinstance(error, GoogleAuthError):
        # A token that could not be fetched because the metadata service was not reached.
        lost = isinstance(error, TransportError) or isinstance(error.__cause__, TransportError)
        return (
            Transient(message) if lost or error.retryable else Permanent(message, hint=_CREDENTIALS)
        )
    if isinstance(error, OSError):
        return Transient(message)
    return Permanent(message, hint=_CREDENTIALS)
