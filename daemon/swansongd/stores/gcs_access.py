# SPDX-License-Identifier: Apache-2.0
"""Who we are to Google Cloud Storage, where it is, and what its refusals mean."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from swansong import bounds
from swansong.bounds import BoundsError

from swansongd.errors import ConfigError, Exists, NotFound, Permanent, StoreError, Transient
from swansongd.http1 import retry_after_s
from swansongd.stores.answers import one_line, xml_text
from swansongd.stores.base import (
    RENEW_BELOW_S,
    Body,
    BytesBody,
    Sink,
    is_certificate_problem,
    named,
)
from swansongd.stores.wire import REFUSAL_BYTES_MAX, Answer, Wire

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
    404: "If it is the bucket that is missing: make it, or mend store.url",
}


class Forbidden(Permanent):
    """403: these credentials lack a right."""


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
        self._lock = threading.Lock()
        self._made_credentials: _Held | None = None
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
        with _errors_of_credentials():
            credentials = self._credentials()
            if credentials is not None and credentials.left_s() < RENEW_BELOW_S:
                credentials.renew(credentials.token)

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

        A token that the store refuses is renewed, by one thread for all, and the request is Transient;
        when it refuses the new one as well that is Permanent.
        """
        with _errors_of_credentials():
            credentials = self._credentials()
            token, identity = credentials.header() if credentials is not None else ("", {})
        answer = self._wire.request(method, target, {**headers, **identity}, body=body, sink=sink)
        if answer.status == 401 and credentials is not None:
            with _errors_of_credentials():
                if credentials.is_refused(token):
                    raise Transient("401: the token was not valid any more, and has been renewed")
        if answer.status >= 300:
            raise _refusal(answer)
        if credentials is not None:
            credentials.is_accepted(token)
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
        from google.oauth2.credentials import Credentials  # noqa: PLC0415
        from requests.exceptions import RequestException  # noqa: PLC0415

        with _errors_of_credentials():
            held = self._credentials()
            known = Credentials(held.header()[0]) if held is not None else AnonymousCredentials()
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

    def _credentials(self) -> _Held | None:
        """The credentials; None where requests are anonymous."""
        if self._endpoint.startswith("http:"):
            return None
        # The metadata server is asked over plain http, as the sources ask it.
        os.environ.setdefault("GCE_METADATA_MTLS_MODE", "none")
        import google.auth  # noqa: PLC0415 - a VM on another cloud need not load it
        from google.auth.exceptions import DefaultCredentialsError  # noqa: PLC0415

        with self._lock:
            if self._made_credentials is None:
                try:
                    found = google.auth.default(scopes=[_SCOPE], request=self._transport)[0]
                except DefaultCredentialsError as error:
                    if self._is_custom:
                        return None
                    # Not kept: the metadata service may answer the next time.
                    raise Permanent("there are none", hint=_CREDENTIALS) from error
                self._made_credentials = _Held(found, self._transport)
            return self._made_credentials


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


class _Held:
    """Google's credentials, that keep a token until it has expired or was refused.

    Google's own ask the metadata server minutes before that, in the middle of a request, and fail with
    it; but it may be dead by then, and the token is good.  Renewing in time is what ``warm()`` is for.
    """

    def __init__(self, inner: Any, transport: _Transport) -> None:
        self.token: str | None = None
        self.expiry: datetime | None = None
        self._inner = inner
        self._transport = transport
        self._renewing = threading.Lock()
        self._on_trial: str | None = None

    def left_s(self) -> float:
        """Life that the token has left; nothing where there is none yet."""
        if self.token is None:
            return 0.0
        if self.expiry is None:
            return math.inf
        return (self.expiry.replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds()

    def header(self) -> tuple[str, dict[str, str]]:
        """The token, renewed if it has expired, and the headers that carry it."""
        if self.left_s() <= 0:
            self.renew(self.token)
        token = self.token
        headers: dict[str, str] = {}
        self._inner.apply(headers, token)
        return token or "", headers

    def renew(self, known: str | None) -> None:
        """Have another token than ``known``; one thread fetches it, the others wait for that."""
        with self._renewing:
            if self.token == known:
                self._inner.refresh(self._transport)
                self.token, self.expiry = self._inner.token, self._inner.expiry

    def is_refused(self, token: str) -> bool:
        """The store refused ``token``.  True: there is a new one that it has not refused yet."""
        if token == self._on_trial:
            return False
        self.renew(token)
        self._on_trial = self.token
        return True

    def is_accepted(self, token: str) -> None:
        """The store took ``token``: if it is refused later, that is because its time is over."""
        if token == self._on_trial:
            self._on_trial = None


# ---------------------------------------------------------------- errors


@contextmanager
def _errors_of_credentials() -> Iterator[None]:
    """Turns what Google's credentials raise into an error of the contract."""
    from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415

    what = "credentials for GCS"
    try:
        with named(what):
            yield
    except (GoogleAuthError, OSError) as error:
        raise _classified(error, f"{what}: {error!s:.300}") from error


def _refusal(answer: Answer) -> StoreError:
    """The error of the contract for an answer that was no success."""
    status, code = answer.status, xml_text(answer.body, "Code")
    reason = one_line(_reason(answer.body), 300)
    message = " ".join(filter(None, (str(status), one_line(code, 80), reason)))
    hint = _HINTS.get(status, "")
    if status == 404:
        return NotFound(message, hint=hint if code in ("", "NoSuchBucket") else "")
    if status == 412:
        return Exists(message)
    if status in (408, 409, 429) or status >= 500 or code in ("BadDigest", "IncompleteBody"):
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
    return Transient(message)
