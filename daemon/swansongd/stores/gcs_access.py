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

from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from swansongd.errors import ConfigError, Exists, NotFound, Permanent, StoreError, Transient
from swansongd.stores.base import RENEW_BELOW_S, Body, Sink, is_certificate_problem
from swansongd.stores.http1 import retry_after_s, xml_text
from swansongd.stores.wire import Answer, Wire

_PUBLIC_ENDPOINT = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_ENDPOINT = re.compile(r"https?://([^/@?#:\[\]]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_STALL_S_MAX = 3.0

_CREDENTIALS = (
    "Give the VM a service account with the storage scope, or set application default credentials"
)
_HINTS = {
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
        bucket: str,
        *,
        endpoint: str | None,
        connections: int,
        ca_bundle: str | None,
        connect_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        self._bucket = bucket
        endpoint = endpoint or _emulator()
        self._is_custom = endpoint is not None
        self._endpoint = (endpoint or _PUBLIC_ENDPOINT).rstrip("/")
        if not _ENDPOINT.fullmatch(self._endpoint):
            raise ConfigError([f"store.endpoint: {endpoint!r:.80} must read https://host[:port]"])
        self._ca_bundle = ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE") or None
        self._timeout_s = (connect_timeout_s, read_timeout_s)
        self._lock = threading.Lock()
        self._made_credentials: Any = None
        self._local = threading.local()
        self._wire = Wire(
            self._endpoint,
            connections=connections,
            ca_bundle=self._ca_bundle,
            connect_timeout_s=connect_timeout_s,
            stall_s=min(_STALL_S_MAX, read_timeout_s),
            reply_s=read_timeout_s,
        )

    @property
    def once(self) -> dict[str, Any]:
        """For each call of the library: one attempt, our timeouts."""
        return {"retry": None, "timeout": self._timeout_s}

    def channel(self) -> Channel:
        """This thread's client of the library; made when it first asks."""
        channel: Channel | None = getattr(self._local, "channel", None)
        if channel is None:
            channel = self._local.channel = self._open_channel()
        return channel

    def renew_credentials(self) -> None:
        """Have a token that lasts for a while; raises Permanent where there are no credentials."""
        with errors_of("credentials for GCS"):
            credentials = self._credentials()
            if credentials is not None and _left_s(credentials) < RENEW_BELOW_S:
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
        """One request to the XML interface; the answer is a success.

        A token that the store refuses is renewed, by one thread for all, and the request is Transient;
        when it refuses the new one as well that is Permanent.
        """
        with errors_of("credentials for GCS"):
            credentials = self._credentials()
            token, identity = credentials.header() if credentials is not None else (None, {})
        answer = self._wire.request(method, target, {**headers, **identity}, body=body, sink=sink)
        if answer.status == 401 and token is not None:
            with errors_of("credentials for GCS"):
                if credentials.is_refused(token):
                    raise Transient("401: the token was not valid any more, and has been renewed")
        if answer.status >= 300:
            raise refusal(
                answer.status, xml_text(answer.body, "Code"), retry_after_s(answer.headers)
            )
        if token is not None:
            credentials.is_accepted(token)
        return answer

    def _open_channel(self) -> Channel:
        # The library would fetch the bucket's metadata from threads of its own, for traces nobody reads.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        from google.auth.credentials import AnonymousCredentials  # noqa: PLC0415
        from google.auth.transport.requests import AuthorizedSession  # noqa: PLC0415
        from google.cloud.storage import Client  # noqa: PLC0415

        session = AuthorizedSession(self._credentials() or AnonymousCredentials())
        session.mount(self._endpoint, _Adapter(self._ca_bundle))
        client = Client(
            project=None,
            credentials=session.credentials,
            client_options={"api_endpoint": self._endpoint},
            _http=session,
        )
        return Channel(client, client.bucket(self._bucket))

    def _credentials(self) -> Any:
        """The credentials; None where requests are anonymous."""
        if self._endpoint.startswith("http:"):
            return None
        import google.auth  # noqa: PLC0415 - a VM on another cloud need not load it
        from google.auth.exceptions import DefaultCredentialsError  # noqa: PLC0415

        with self._lock:
            if self._made_credentials is None:
                try:
                    found = google.auth.default(scopes=[_SCOPE])[0]
                except DefaultCredentialsError as error:
                    if self._is_custom:
                        return None
                    # Not kept: the metadata service may answer the next time.
                    raise Permanent("there are none", hint=_CREDENTIALS) from error
                self._made_credentials = _held(found, self._timeout_s[1])
            return self._made_credentials


@dataclass(frozen=True, slots=True)
class Channel:
    """What one thread talks to the library through: requests sessions are not made to be shared."""

    client: Any
    bucket: Any


class _Adapter(HTTPAdapter):
    """One attempt a request, trusting ``ca_bundle``, whatever the environment says of others."""

    def __init__(self, ca_bundle: str | None) -> None:
        super().__init__(pool_maxsize=4, max_retries=0)
        self._ca_bundle = ca_bundle

    def send(self, *args: Any, **options: Any) -> Any:
        if self._ca_bundle is not None:
            options["verify"] = self._ca_bundle
        return super().send(*args, **options)


def _emulator() -> str | None:
    """What STORAGE_EMULATOR_HOST names, as an URL."""
    named = os.environ.get("STORAGE_EMULATOR_HOST")
    return named if not named or "://" in named else f"http://{named}"


def _held(inner: Any, timeout_s: float) -> Any:
    """The same credentials, that keep a token until it has expired or was refused.

    Google's own ask the metadata server minutes before that, in the middle of a request, and fail with
    it; but it may be dead by then, and the token is good.  Renewing in time is what ``warm()`` is for.
    """
    from google.auth.credentials import Credentials, TokenState  # noqa: PLC0415
    from google.auth.transport.requests import Request  # noqa: PLC0415

    class Bounded(Request):  # type: ignore[misc,unused-ignore]
        """A question for a token that nobody waits two minutes for, as would be the default."""

        def __call__(self, *args: Any, **options: Any) -> Any:
            return super().__call__(*args, **{"timeout": timeout_s, **options})

    class Held(Credentials):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.token: str | None = None
            self._renewing = threading.Lock()
            self._on_trial: str | None = None
            self._used = threading.local()

        def header(self) -> tuple[str, dict[str, str]]:
            """The token, renewed if it has expired, and the headers that carry it."""
            if self.token_state is TokenState.INVALID:
                self.renew(self.token)
            token = self.token
            headers: dict[str, str] = {}
            inner.apply(headers, token)
            return token or "", headers

        def renew(self, known: str | None) -> None:
            """Have another token than ``known``; one thread fetches it, the others wait for that."""
            with self._renewing:
                if self.token == known:
                    inner.refresh(Bounded())
                    self.token, self.expiry = inner.token, inner.expiry

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

        # ------------------------------------------------ as google's sessions call it

        def before_request(self, request: Any, method: str, url: str, headers: Any) -> None:
            del request, method, url
            self._used.token, fields = self.header()
            headers.update(fields)

        def refresh(self, request: Any) -> None:
            del request
            self.renew(getattr(self._used, "token", self.token))

    return Held()


def _left_s(credentials: Any) -> float:
    """Life that the token has left; nothing where there is none yet."""
    if credentials.token is None:
        return 0.0
    if credentials.expiry is None:
        return math.inf
    expiry: datetime = credentials.expiry.replace(tzinfo=UTC)
    return (expiry - datetime.now(UTC)).total_seconds()


# ---------------------------------------------------------------- errors


@contextmanager
def errors_of(what: str) -> Iterator[None]:
    """Turns whatever Google's libraries raise into an error of the contract that says ``what`` it was."""
    from google.api_core.exceptions import GoogleAPICallError  # noqa: PLC0415
    from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415

    try:
        with named(what):
            yield
    except GoogleAPICallError as error:
        headers = getattr(error.response, "headers", None) or {}
        wait_s = retry_after_s({name.lower(): value for name, value in headers.items()})
        refused = refusal(int(error.code or 0), "", wait_s, f"{what}: {error!s:.300}")
        raise refused from error
    except (GoogleAuthError, HTTPError, OSError) as error:
        raise _classified(error, f"{what}: {error!s:.300}") from error


@contextmanager
def named(what: str) -> Iterator[None]:
    """Errors of the contract say ``what`` it was that failed; all others pass."""
    try:
        yield
    except Transient as error:
        message = f"{what}: {error}"
        raise Transient(message, hint=error.hint, retry_after_s=error.retry_after_s) from error
    except StoreError as error:
        raise type(error)(f"{what}: {error}", hint=error.hint) from error


def refusal(status: int, code: str, wait_s: float | None, message: str = "") -> StoreError:
    """The error of the contract for an answer that was no success.

    Args:
        code: what the body calls it; empty where that is not known.
        wait_s: how long the store wants to be left alone.
    """
    message = message or f"{status} {code}".rstrip()
    hint = _HINTS.get(status, "")
    if status == 404:
        return NotFound(message, hint=hint if code in ("", "NoSuchBucket") else "")
    if status == 412:
        return Exists(message)
    if status in (408, 409, 429) or status >= 500 or code in ("BadDigest", "IncompleteBody"):
        return Transient(message, retry_after_s=wait_s)
    return (Forbidden if status == 403 else Permanent)(message, hint=hint)


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
