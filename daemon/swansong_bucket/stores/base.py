# SPDX-License-Identifier: Apache-2.0
"""The contract of an object store.  The tests in ``tests/contract/`` check every backend against it.

A backend has no policy: it does not retry what failed, and it does not wait longer than its timeouts.
Retries, deadlines and the rate limit are wrappers with the same interface.

Keys are relative to the prefix of the store's URL, contain no ``..`` and do not begin with ``/``.
Every method is safe to call from many threads at the same time, and raises only:

- :class:`~swansong_bucket.errors.Transient` when trying again may help (timeout, reset, 5xx, 429, 409),
- :class:`~swansong_bucket.errors.NotFound` when the key or the bucket does not exist,
- :class:`~swansong_bucket.errors.Exists` when a create-if-absent found an object under the key,
- :class:`~swansong_bucket.errors.Changed` when a conditional delete found another object under the key,
- :class:`~swansong_bucket.errors.Locked` when a retention protects the object,
- :class:`~swansong_bucket.errors.TooLarge` when an object is too large to be returned whole,
- :class:`~swansong_bucket.errors.Permanent` for everything else (no permission, wrong region, bad request).

Errors are classified by code or type, never by message text.  The backends share the functions at the end.
"""

from __future__ import annotations

import copy
import hashlib
import ssl
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from swansong_bucket.errors import Changed, Locked, Permanent, StoreError, TooLarge
from swansong_bucket.stores.checksums import crc32c
from swansong_bucket.util.threads import parallel

WINDOW_BYTES = 2**20
"""Bodies and sinks move in windows of at most this many bytes: a window that was hashed is still in the
processor's cache when it is sent or written.  A restore holds one window for each request in flight."""
RENEW_BELOW_S = 900.0
"""Credentials that expire sooner are renewed by :meth:`ObjectStore.warm`."""
GET_BYTES_MAX = 64 * 2**20
"""The largest object that :meth:`ObjectStore.get` returns."""
DELETED_MAX = 1000
"""Objects of one :meth:`ObjectStore.delete_many`: the limit of one request of S3."""
LISTED_MAX = 1_000_000
"""Entries of one listing, which is in memory: 20,000 files of each of 50 VMs."""
_PAGES_MAX = 20_000
_STORED_PAGES_MAX = 100_000
_DELETE_THREADS = 8

Item = TypeVar("Item")
Token = TypeVar("Token", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Key and size of an object, from a listing or a HEAD."""

    key: str
    size_bytes: int
    age_s: float | None = field(default=None, compare=False)
    """Since the object was written, by the store's own clock; None: unknown, so treat it as young."""
    tag: str = field(default="", compare=False)
    """Identifies these bytes under this key, for a conditional delete; empty: the store has no tags.

    S3 may give an equal tag to equal bytes that are written again; other stores give another one.
    """

    @property
    def identity(self) -> tuple[str, int, str]:
        """The same for the same bytes under the same key."""
        return self.key, self.size_bytes, self.tag


class Folders(NamedTuple):
    """A page of a listing of folders."""

    names: Sequence[str]
    """In any order, without the prefix and the slash; a name can be on several pages."""
    token: str | None
    """Requests the next page; None on the last page."""


class Page(NamedTuple):
    """A page of a listing."""

    infos: Sequence[ObjectInfo]
    """In any order; an object can be on several pages."""
    token: str | None
    """Requests the next page; None on the last page."""


Moved = Callable[[int], None]
"""Takes the length of each window before it is sent, and a negative number before bytes are sent again.

It may wait.  Its exceptions end the request and reach the caller of the store unchanged.
"""


def ignore_moved(_size_bytes: int) -> None:
    """A :data:`Moved` that does nothing."""


class Body:
    """Bytes in memory as the body of requests.  One thread uses a body at a time.

    Args:
        data: the bytes; they stay as they are until the last request has ended.
        moved: see :data:`Moved`.
        crc32c: of the bytes, if it is known; otherwise computed at the first request.

    Attributes:
        pace: called like ``moved``, after it and never with a negative number: it limits the rate.
    """

    def __init__(
        self, data: bytes | memoryview, moved: Moved = ignore_moved, crc32c: int | None = None
    ) -> None:
        self.data = memoryview(data).cast("B")
        self.size_bytes = self.data.nbytes
        self._moved = moved
        self._crc32c = crc32c
        self._done_bytes = 0
        self.pace: Moved = ignore_moved

    @cached_property
    def crc32c(self) -> int:
        """CRC32C of the bytes."""
        return crc32c(self.data) if self._crc32c is None else self._crc32c

    def sha256(self) -> str:
        """SHA-256 of the bytes, in hex."""
        return hashlib.sha256(self.data).hexdigest()

    def rewind(self) -> None:
        """Begin a pass over the bytes.

        Raises:
            Permanent: they have changed since an earlier pass, so the store would refuse them each time.
        """
        done_bytes, self._done_bytes = self._done_bytes, 0
        if done_bytes:
            self._moved(-done_bytes)
            if crc32c(self.data) != self.crc32c:
                raise Permanent(
                    "the bytes changed in memory after they were read",
                    hint="Test the memory of this VM",
                )

    def next_window(self, size_bytes: int = WINDOW_BYTES) -> memoryview:
        """The next bytes to send, up to this number; empty after the last one."""
        window = self.data[self._done_bytes : self._done_bytes + size_bytes]
        if window:
            self._moved(window.nbytes)
            self._done_bytes += window.nbytes
            self.pace(window.nbytes)
        return window


class Sink(Protocol):
    """Receives the bytes of one range, from the first to the last, a window at a time."""

    def rewind(self) -> None:
        """Discard all bytes: the range follows from its first byte.  Called before each attempt."""

    def write(self, window: memoryview) -> None:
        """Take the next bytes; the caller reuses the window afterwards."""


class ObjectStore(Protocol):
    """The store that receives checkpoints."""

    url: str
    """As configured, for logs; never contains a credential."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """Store a small object in one request.

        With ``if_absent`` the store creates the object only if the key has none, else this raises Exists.
        After a Transient error the object may exist: the caller reads it back and compares.
        """

    def get(self, key: str) -> bytes:
        """Return a small object (a manifest, a claim); raises TooLarge above 64 MiB."""

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        """Write ``size_bytes`` bytes of the object, from ``offset``, to ``sink``.

        Raises Transient when the response ends early, NotFound when there is no object, Permanent when
        the range is not within the object.  No request is sent for a range of 0 bytes.
        """

    def head(self, key: str) -> ObjectInfo | None:
        """Size of the object, or None if there is none.  A missing *bucket* raises NotFound."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """List all objects whose key starts with ``prefix``: each key once, in any order.

        With ``after`` only keys that are greater, in byte order.  The store skips the others where it can.  A
        store that sorts by directory (SeaweedFS) leaves out further keys: those below ``after/``, and those
        that are not greater when keys are compared name by name.

        The listing ends only at the page that the store marks as the last one.  Raises Permanent above
        :data:`LISTED_MAX` entries, and when a page leads back to an earlier page.
        """
        return listed(prefix, lambda token: self.page(prefix, token, after=after), after)

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        """Return one page of that listing; ``token`` is that of the previous page, None for the first.

        The page may contain keys up to ``after``.
        """

    def folders(self, prefix: str, token: str | None) -> Folders:
        """Return one page of the names between ``prefix`` and the next slash of all keys.

        ``prefix`` is empty or ends with a slash.  One page has up to 1,000 names, for any number of keys.  A
        directory may contain further names, of folders without objects.
        """

    def delete(self, key: str, *, if_tag: str = "") -> None:
        """Delete the object.  A missing object is not an error.

        With ``if_tag`` only the object with this tag is deleted; raises Changed if the key has another one.
        S3, GCS and Azure compare atomically.  A directory compares first and deletes then.  A compatible
        store without conditional deletes ignores the tag: never delete a key that can be written again.

        Raises Locked, and deletes nothing, while a retention protects the object.  Raises Permanent when the
        credentials lack the right to read the retention: unknown is not unlocked.
        """

    def delete_many(self, infos: Sequence[ObjectInfo]) -> Mapping[str, str]:
        """Delete up to :data:`DELETED_MAX` objects, each as :meth:`delete` with its tag.

        Sends one request where the store can.  Returns the keys that remain, each with the reason; they are
        not an error.  Raises when the store did not process the request: objects may then be deleted or not.
        """
        expect_few(infos)
        remaining: dict[str, str] = {}

        def delete(info: ObjectInfo) -> None:
            try:
                self.delete(info.key, if_tag=info.tag)
            except (Changed, Locked) as error:
                remaining[info.key] = str(error)

        parallel(infos, delete, threads=_DELETE_THREADS)
        return remaining

    def lock(self, key: str) -> float | None:  # noqa: ARG002 - for stores with retentions
        """Extend the retention of an object, as if it were written now; returns its end in Unix seconds.

        None, and no request, if the store gives objects with this key no retention.
        """
        return None

    def create(self, key: str, body: Body) -> None:
        """Store a chunk under a new key, in one request.

        The store verifies the CRC32C of the bytes where it can.  Only for keys that contain a nonce: an
        existing object with these bytes is ours, from an attempt whose reply was lost.  Raises Exists when
        the object has other bytes.  A store without create-if-absent replaces the object.
        """

    def check(self) -> None:
        """Send one cheap request; raises as above when the bucket, the rights or the address are wrong."""

    def warm(self) -> None:
        """Prepare for a flush: renew credentials that expire within :data:`RENEW_BELOW_S`, and :meth:`check`.

        After this, requests use the credentials that are in memory until those expire.
        """


def bucket_and_prefix(url: str) -> tuple[str, str]:
    """Bucket and key prefix (empty, or with a ``/`` at its end) of ``scheme://bucket/prefix``."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    return parts.netloc, f"{prefix}/" if prefix else ""


def account_container_and_prefix(url: str) -> tuple[str, str, str]:
    """Account, container and key prefix (empty, or with a ``/`` at its end) of an ``az://`` URL."""
    parts = urlsplit(url)
    container, _, rest = parts.path.removeprefix("/").partition("/")
    prefix = rest.strip("/")
    return parts.netloc, container, f"{prefix}/" if prefix else ""


def listed(
    prefix: str, page: Callable[[str | None], Page], after: str = ""
) -> Iterator[ObjectInfo]:
    """All objects of a listing, each key once; see :meth:`ObjectStore.list`.

    Args:
        page: requests the page of a token.
    """
    seen: set[str] = set()
    for info in all_pages(f"list {prefix}", page):
        if info.key not in seen and info.key > after:
            seen.add(info.key)
            yield info


def all_pages(
    what: str, page: Callable[[Token | None], tuple[Sequence[Item], Token | None]]
) -> Iterator[Item]:
    """The items of all pages of a listing, in the store's order; an item can occur several times.

    Args:
        page: requests the page of a token; returns its items, and the token of the next page or None.

    Raises:
        Permanent: the listing does not end, or has more than :data:`LISTED_MAX` entries.
    """
    tokens: set[Token] = set()
    token: Token | None = None
    count = 0
    while True:
        found, token = page(token)
        count += len(found)
        if count > LISTED_MAX:
            raise Permanent(f"{what}: the store lists more than {LISTED_MAX} entries")
        yield from found
        if token is None:
            return
        if token in tokens or len(tokens) >= _PAGES_MAX:
            raise Permanent(f"{what}: the pages of the store's listing do not end")
        tokens.add(token)


def stored_objects(store: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
    """The objects whose key starts with ``prefix``, page by page; an object can occur twice.

    Unlike :meth:`ObjectStore.list`, it has no limit of the entries and remembers no key.
    """
    token: str | None = None
    for _ in range(_STORED_PAGES_MAX):
        infos, token = store.page(prefix, token)
        yield from infos
        if token is None:
            return
    raise Permanent(f"list {prefix}: the pages of the store's listing do not end")


def expect_few(infos: Sequence[ObjectInfo]) -> None:
    """Raise Permanent if there are more objects than one request may name."""
    if len(infos) > DELETED_MAX:
        raise Permanent(f"delete {len(infos)} objects: one request has at most {DELETED_MAX}")


@contextmanager
def named(what: str) -> Iterator[None]:
    """Add ``what``, the operation that failed, to errors of the contract; other errors pass unchanged."""
    try:
        yield
    except StoreError as error:
        found = copy.copy(error)  # with its hint and its other attributes
        found.args = (f"{what}: {error}",)
        raise found from error


class BytesSink:
    """Collects a small object in memory; raises TooLarge above ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self.data = bytearray()
        self._max_bytes = max_bytes

    def rewind(self) -> None:
        self.data.clear()

    def write(self, window: memoryview) -> None:
        if len(self.data) + window.nbytes > self._max_bytes:
            raise TooLarge(f"the object has more than {self._max_bytes} bytes")
        self.data += window


def is_certificate_problem(error: BaseException | None) -> bool:
    """Whether ``error`` was caused by a TLS certificate that this VM does not trust."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None
