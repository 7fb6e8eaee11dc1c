# SPDX-License-Identifier: Apache-2.0
"""The requests and the steps that are the same on S3, GCS and Azure.

The wire sends each request once; retries and deadlines belong to the caller.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import (
    Changed,
    ConfigError,
    Exists,
    Forbidden,
    Locked,
    NotFound,
    Permanent,
    StoreError,
    Transient,
)
from swansong_bucket.stores import responses
from swansong_bucket.stores.base import (
    GET_BYTES_MAX,
    Body,
    BytesSink,
    Folders,
    ObjectInfo,
    ObjectStore,
    Page,
    Sink,
    is_certificate_problem,
    named,
)
from swansong_bucket.stores.clock import CLOCK_HINT, StoreClock, is_clock_problem
from swansong_bucket.stores.credentials import CredentialCache
from swansong_bucket.stores.http.client import Response, Wire
from swansong_bucket.stores.responses import ListedPage, one_line, xml_text
from swansong_bucket.stores.retention import Retention
from swansong_bucket.util.http1 import retry_after_s

ENDPOINT = re.compile(r"https?://([^/@?#:\[\]]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
REDIRECT_HINTS = dict.fromkeys(
    ("301", "302", "303", "307", "308"),
    "Redirects are not followed: set store.endpoint to the store's own address",
)

_STALL_S_MAX = 3.0
_KINDS_OF_STATUS: Mapping[int, type[StoreError]] = {
    403: Forbidden,
    404: NotFound,
    408: Transient,
    409: Transient,
    412: Exists,
    429: Transient,
    501: Permanent,
}


@dataclass(frozen=True, kw_only=True)
class WireLimits:
    """Limits of the connections to a store."""

    connections: int = 16
    """Threads that call the store at the same time."""
    connect_timeout_s: float = 3.0
    """Limit for opening a connection."""
    read_timeout_s: float = 8.0
    """Limit for one wait for a response."""


DEFAULT_LIMITS = WireLimits()


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A request before it is authorized."""

    method: str
    path: str
    """Percent-encoded."""
    parameters: Mapping[str, str]
    headers: Mapping[str, str]
    body: Body | None = None
    sink: Sink | None = None


class RemoteAccess(abc.ABC):
    """Authorized requests to one bucket, with its connections and credentials.

    Args:
        name: of the kind of store, for the log.
        check: sends a request, for the clock of the store.

    Attributes:
        bucket: its name.
        prefix: of all keys: empty, or with a ``/`` at its end.
        clock: of the store.
    """

    bucket: str
    prefix: str
    _credentials_codes: ClassVar[Collection[str]] = ()
    """Codes whose cause is the credentials: rotated keys, expired or revoked sessions."""
    _credentials_hint: ClassVar[str]
    _kinds: ClassVar[Mapping[str, type[StoreError]]]
    """The errors of the contract by the code or the status of a response, where the status does not tell."""
    _hints: ClassVar[Mapping[str, str]]
    """Fixes, by the same."""

    def __init__(self, name: str, config: StoreAccess, check: Callable[[], object]) -> None:
        self._url = config.url or ""
        self.clock = StoreClock(check)
        self._credentials: CredentialCache[Any] = CredentialCache(
            name,
            load=self._load_credentials,
            fetch=self._fetch_credentials,
            has_expired=self._has_expired,
        )

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
        """Send one request for an object, or with key None for the bucket; returns a success.

        Args:
            what: the operation, for errors.

        Raises:
            Transient: also if other credentials were found after a refusal.
            StoreError: the store refused the request; also if it redirects to another address.
        """
        path = self._path(key, is_data=method == "PUT" or sink is not None)
        request = StoreRequest(method, path, parameters or {}, headers or {}, body, sink)
        return self._exchange(what, request)

    def renew_credentials(self) -> None:
        """Renew credentials that expire soon; raises Permanent if there are none."""
        self._credentials.renew()

    def _exchange(self, what: str, request: StoreRequest) -> Response:
        with named(f"{what} in {self._url}"):
            used = self._authorization()
            response = self._answered(used, request)
            if 200 <= response.status < 300:
                self._credentials.accept(used)
                self.clock.observe(response.headers.get("date", ""))
                return response
            raise self._refusal(response, request, used)

    def _refusal(self, response: Response, request: StoreRequest, used: Any) -> StoreError:
        """The error of the contract for a response with an error status."""
        status, code = str(response.status), code_of(response)
        words = " ".join(filter(None, (status, one_line(code, 80))))
        reason = one_line(responses.reason_of(response.body), 300)
        message = ": ".join(filter(None, (words, reason)))
        is_certain = self._are_refused(response, code, request, used)
        if is_certain is not False:
            if self._credentials.replace(used, is_certain=is_certain is True):
                return Transient(f"{message}; other credentials were found")
            if is_certain:
                return Permanent(message, hint=self._hints.get(code, self._credentials_hint))
        hint = self._hints.get(code, self._hints.get(status, ""))
        kind = self._kinds.get(code) or self._kinds.get(status) or _kind_of(response.status)
        if kind is Transient:
            return Transient(message, hint=hint, retry_after_s=retry_after_s(response.headers))
        return kind(message, hint=hint)

    def _are_refused(
        self, response: Response, code: str, _request: StoreRequest, _used: Any
    ) -> bool | None:
        """Whether the credentials are the cause of a refusal; None: they may be, or lack a right."""
        return response.status == 401 or code in self._credentials_codes

    def _authorization(self) -> Any:
        """The credentials of the next request."""
        return self._credentials.get()

    @abc.abstractmethod
    def _path(self, key: str | None, *, is_data: bool) -> str:
        """Path of an object, or of the bucket; of its bytes with ``is_data``."""

    @abc.abstractmethod
    def _answered(self, used: Any, request: StoreRequest) -> Response:
        """Authorize a request, and send it."""

    @abc.abstractmethod
    def _load_credentials(self) -> Any:
        """The first source that has credentials."""

    @abc.abstractmethod
    def _fetch_credentials(self, source: Any) -> Any:
        """The credentials of this source, renewed if they expire soon."""

    @abc.abstractmethod
    def _has_expired(self, source: Any) -> bool:
        """Whether the credentials of this source have expired."""


class RemoteStore(ObjectStore):
    """A bucket, or a prefix in one.

    Args:
        retention: of its objects; None: Swansong gives them none.

    Raises:
        ConfigError: ``store.ca_bundle`` is not a file.
    """

    _checksum_header: ClassVar[str]
    """Name of the checksum in a PUT, in its response, and in the response to a HEAD."""
    _has_checksums: ClassVar[bool] = True
    """The store returns a checksum of each object that it takes."""
    _is_narrow: ClassVar[bool] = True
    """An overwrite needs a further right: without it, a create of an existing object can be 403."""
    _listing: ClassVar[Mapping[str, str]]
    """Parameters of each listing."""
    _size_name: ClassVar[str]
    """Parameter of the size of a page."""
    _token_name: ClassVar[str]
    """Parameter of the token of a page."""
    _page_items: ClassVar[int] = responses.PAGE_ITEMS
    _absent: ClassVar[Mapping[str, str]] = {"if-none-match": "*"}
    """Headers by which a PUT creates an object only if there is none."""
    _put_headers: ClassVar[Mapping[str, str]] = {}
    """Further headers of a PUT ..."""
    _checked_headers: ClassVar[Mapping[str, str]] = {}
    """... and of a HEAD that asks for the checksum."""

    def __init__(
        self, config: StoreAccess, access: RemoteAccess, retention: Retention | None = None
    ) -> None:
        if config.ca_bundle is not None and not config.ca_bundle.is_file():
            raise ConfigError(
                [f"store.ca_bundle: is not a file (got {str(config.ca_bundle)!r}); name a PEM file"]
            )
        self.url = config.url or ""
        self._prefix = access.prefix
        self._access = access
        self.renew_credentials = access.renew_credentials
        self._retention = retention

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._put(key, Body(data), if_absent=if_absent)

    def get(self, key: str) -> bytes:
        sink = BytesSink(GET_BYTES_MAX)
        response = self._access.call(f"get {key}", "GET", key, sink=sink)
        if response.status != 200:
            raise Permanent(
                f"get {key} in {self.url}: HTTP {response.status} is not a complete object"
            )
        return bytes(sink.data)

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if not size_bytes:
            return
        span = f"{offset}-{offset + size_bytes - 1}"
        headers = {"range": f"bytes={span}"}
        response = self._access.call(f"get {key}", "GET", key, headers=headers, sink=sink)
        range_ = response.headers.get("content-range", "")
        # Some stores send a range with status 200.
        if response.status not in (200, 206) or not range_.startswith(f"bytes {span}/"):
            raise Permanent(f"get {key} in {self.url}: bytes {span} are not within the object")

    def head(self, key: str) -> ObjectInfo | None:
        found = self._found(key)
        return None if found is None else found[0]

    def page(
        self, prefix: str, token: str | None, *, after: str = "", items: int | None = None
    ) -> Page:
        """See the contract; a page has up to ``items`` objects, with None the usual number."""
        infos, _, token = self._listed(prefix, token, self._start(token, after), items)
        return Page(infos, token)

    def folders(self, prefix: str, token: str | None) -> Folders:
        _, names, token = self._listed(prefix, token, {"delimiter": "/"})
        return Folders(names, token)

    def delete(self, key: str, *, if_tag: str = "") -> None:
        """See the contract.  In a bucket with versions the object's bytes remain as an older version."""
        if self._retention is not None:
            self._retention.expect_none(key)
        try:
            self._delete(key, if_tag)
        except (NotFound, Exists) as refused:
            # With a condition, S3 returns 404 for a missing object, and SeaweedFS 412.
            if self.head(key) is not None:
                raise Changed(str(refused)) from refused

    def lock(self, key: str) -> float | None:
        return None if self._retention is None else self._retention.extend(key)

    def create(self, key: str, body: Body) -> None:
        try:
            self._put(key, body, if_absent=True)
        except Exists:
            # If the bytes match, our write succeeded and only the reply was lost.
            found = self._found(key, is_checked=True)
            if found is None or found[0].size_bytes != body.size_bytes:
                raise
            if found[1] is None and not self._has_checksums:
                self._put(key, body, if_absent=False)
            elif found[1] != self._checksum(body):
                raise

    def check(self) -> None:
        self.page("", None, items=1)

    def warm(self) -> None:
        self.renew_credentials()
        self.check()

    # ------------------------------------------------------------ requests

    def _listed(
        self, prefix: str, token: str | None, more: Mapping[str, str], items: int | None = None
    ) -> ListedPage:
        """One page of a listing."""
        what = f"list {prefix}"
        parameters = {
            "prefix": self._prefix + prefix,
            **self._listing,
            self._size_name: str(items or self._page_items),
            **more,
            **({} if token is None else {self._token_name: token}),
        }
        response = self._access.call(what, "GET", None, parameters)
        with responses.complete(what):
            return self._parsed(response, self._prefix, prefix)

    @staticmethod
    @abc.abstractmethod
    def _parsed(response: Response, base: str, prefix: str) -> ListedPage:
        """Parse a page of a listing; see :func:`swansong_bucket.stores.responses.objects`."""

    def _start(self, token: str | None, after: str) -> Mapping[str, str]:  # noqa: ARG002 - for others
        """Parameters by which a listing starts near the key ``after``."""
        return {}

    def _found(self, key: str, *, is_checked: bool = False) -> tuple[ObjectInfo, str | None] | None:
        """The object, and with ``is_checked`` its checksum; None if there is none."""
        what = f"head {key}"
        try:
            return self._described(what, key, self._checked_headers if is_checked else {})
        except NotFound as error:
            self._expect_bucket(key, error)
            return None

    def _described(
        self, what: str, key: str, headers: Mapping[str, str]
    ) -> tuple[ObjectInfo, str | None]:
        response = self._access.call(what, "HEAD", key, headers=headers)
        with responses.complete(what):
            return responses.head_info(response, key), self._checksum_in(response.headers)

    def _expect_bucket(self, key: str, _error: NotFound) -> None:
        """Raise NotFound if the bucket is missing: object and bucket have the same 404."""
        self.page(key, None, items=1)

    def _put(self, key: str, body: Body, *, if_absent: bool) -> None:
        """PUT an object with a checksum that the store verifies."""
        what, checksum, retention = f"put {key}", self._checksum(body), self._retention
        headers = {self._checksum_header: checksum, **self._put_headers}
        headers |= self._absent if if_absent else {}
        headers |= {} if retention is None else retention.headers(key)
        with (
            self._creating(key) if if_absent and self._is_narrow else nullcontext(),
            nullcontext() if retention is None else retention.explained(key),
        ):
            response = self._access.call(what, "PUT", key, headers=headers, body=body)
        with responses.complete(what):
            responses.etag_of(response.headers)
        stored = self._checksum_in(response.headers)
        if stored is None and self._has_checksums:
            raise Permanent(
                f"{what} in {self.url}: the store returned no checksum",
                hint="This store returns no checksum of an upload: use another endpoint",
            )
        if stored not in (None, checksum):
            raise Transient(f"{what} in {self.url}: the store has other bytes than were sent")

    def _delete(self, key: str, if_tag: str) -> None:
        condition = {"if-match": if_tag} if if_tag else {}
        self._access.call(f"delete {key}", "DELETE", key, headers=condition)

    def _checksum_in(self, headers: Mapping[str, str]) -> str | None:
        return headers.get(self._checksum_header)

    @abc.abstractmethod
    def _checksum(self, body: Body) -> str:
        """The checksum of a body that the store verifies, as in the header."""

    @contextmanager
    def _creating(self, key: str) -> Iterator[None]:
        """Around a create-if-absent: raise Exists if the object exists, in place of Forbidden and Locked."""
        try:
            yield
        except (Forbidden, Locked) as error:
            if self.head(key) is None:
                raise
            raise Exists(str(error)) from error


def wire_to(endpoint: str, config: StoreAccess, limits: WireLimits, trusted: str | None) -> Wire:
    """The wire to a store.

    Args:
        trusted: file of certificates to trust unless the configuration names one; None: the system's.
    """
    return Wire(
        endpoint,
        connections=limits.connections,
        ca_bundle=str(config.ca_bundle) if config.ca_bundle is not None else trusted,
        connect_timeout_s=limits.connect_timeout_s,
        stall_s=min(_STALL_S_MAX, limits.read_timeout_s),
        first_byte_s=limits.read_timeout_s,
    )


@contextmanager
def translated(what: str, classified: Callable[[Exception, str], StoreError]) -> Iterator[None]:
    """Turn errors of a provider's library into errors of the contract.

    Args:
        classified: returns the error of the contract for one of the library, and its message.
    """
    try:
        with named(what):
            yield
    except StoreError:
        raise
    except Exception as error:  # a credentials file or a metadata service can contain anything
        message = f"{what}: {' '.join(str(error).split()):.300}"
        if is_certificate_problem(error):
            hint = "The certificate of the server of the credentials is not trusted on this VM"
            raise Permanent(message, hint=hint) from error
        if is_clock_problem(message):
            raise Permanent(message, hint=CLOCK_HINT) from error
        raise classified(error, message) from error


def code_of(response: Response) -> str:
    """The code of an error response; empty without one, as in each response to a HEAD of S3."""
    return response.headers.get("x-ms-error-code") or xml_text(response.body, "Code")


def _kind_of(status: int) -> type[StoreError]:
    return _KINDS_OF_STATUS.get(status, Transient if status >= 500 else Permanent)
