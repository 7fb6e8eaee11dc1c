# SPDX-License-Identifier: Apache-2.0
"""The steps that are the same on S3, GCS and Azure.

The wire sends each request once; retries and deadlines belong to the caller.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import (
    ConfigError,
    Exists,
    Forbidden,
    Locked,
    NotFound,
    Permanent,
    StoreError,
    Transient,
)
from swansong_bucket.stores.base import (
    GET_BYTES_MAX,
    Body,
    BytesSink,
    ObjectStore,
    Page,
    Sink,
    is_certificate_problem,
    named,
)
from swansong_bucket.stores.clock import CLOCK_HINT, is_clock_problem
from swansong_bucket.stores.http.client import Response, Wire
from swansong_bucket.util.http1 import retry_after_s

ENDPOINT = re.compile(r"https?://([^/@?#:\[\]]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")

_STALL_S_MAX = 3.0


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


class RemoteStore(ObjectStore):
    """A bucket, or a prefix in one.

    Args:
        prefix: prefix of all keys: empty, or with a ``/`` at its end.
        renew_credentials: renews credentials that expire soon; raises Permanent if there are none.

    Raises:
        ConfigError: ``store.ca_bundle`` is not a file.
    """

    def __init__(
        self, config: StoreAccess, prefix: str, renew_credentials: Callable[[], None]
    ) -> None:
        if config.ca_bundle is not None and not config.ca_bundle.is_file():
            raise ConfigError(
                [f"store.ca_bundle: is not a file (got {str(config.ca_bundle)!r}); name a PEM file"]
            )
        self.url = config.url or ""
        self._prefix = prefix
        self.renew_credentials = renew_credentials

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._put(key, Body(data), if_absent=if_absent)

    def get(self, key: str) -> bytes:
        sink = BytesSink(GET_BYTES_MAX)
        response = self._read(key, {}, sink)
        if response.status != 200:
            raise Permanent(
                f"get {key} in {self.url}: HTTP {response.status} is not a complete object"
            )
        return bytes(sink.data)

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if not size_bytes:
            return
        span = f"{offset}-{offset + size_bytes - 1}"
        response = self._read(key, {"range": f"bytes={span}"}, sink)
        range_ = response.headers.get("content-range", "")
        # Some stores send a range with status 200.
        if response.status not in (200, 206) or not range_.startswith(f"bytes {span}/"):
            raise Permanent(f"get {key} in {self.url}: bytes {span} are not within the object")

    @abc.abstractmethod
    def page(
        self, prefix: str, token: str | None, *, after: str = "", items: int | None = None
    ) -> Page:
        """See the contract; a page has up to ``items`` objects, with None the usual number."""

    def create(self, key: str, body: Body) -> None:
        try:
            self._put(key, body, if_absent=True)
        except Exists:
            # If the bytes match, our write succeeded and only the reply was lost.
            is_ours = self._holds(key, body)
            if is_ours is None:
                self._put(key, body, if_absent=False)
            elif not is_ours:
                raise

    def check(self) -> None:
        self.page("", None, items=1)

    def warm(self) -> None:
        self.renew_credentials()
        self.check()

    @abc.abstractmethod
    def _read(self, key: str, headers: Mapping[str, str], sink: Sink) -> Response:
        """GET an object."""

    @abc.abstractmethod
    def _put(self, key: str, body: Body, *, if_absent: bool) -> None:
        """PUT an object with a checksum that the store verifies."""

    @abc.abstractmethod
    def _holds(self, key: str, body: Body) -> bool | None:
        """Whether the object has the size and the checksum of ``body``; None: the store shows none."""

    @contextmanager
    def _creating(self, key: str) -> Iterator[None]:
        """Around a create-if-absent: raise Exists if the object exists, in place of Forbidden and Locked.

        GCS and Azure require the right to delete or to write for an overwrite.  Without it, the status can be
        403 instead of 412 or 409.
        """
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


def refusal(
    response: Response, message: str, hint: str = "", *, is_transient: bool = False
) -> StoreError:
    """The error of the contract for an error response, by its status.

    Args:
        is_transient: the code of the response has a cause that a retry may not have.
    """
    status = response.status
    if status == 404:
        return NotFound(message, hint=hint)
    if status == 412:
        return Exists(message)
    if is_transient or status in (408, 409, 429) or (status >= 500 and status != 501):
        return Transient(message, hint=hint, retry_after_s=retry_after_s(response.headers))
    return (Forbidden if status == 403 else Permanent)(message, hint=hint)
