# SPDX-License-Identifier: Apache-2.0
"""The contract of an object store.  ``tests/contract/`` holds it to every backend.

A backend holds no policy: it does not retry, does not wait longer than its timeouts, and never
overwrites unless told to.  Retry, deadline, throttle and metrics are wrappers with the same interface.

Keys are relative to the prefix of the store's URL, contain no ``..`` and do not begin with ``/``.
Every method may be called from many threads at once, and raises only:

- :class:`~swansongd.errors.Transient` when trying again may help (timeout, reset, 5xx, 429, 409),
- :class:`~swansongd.errors.NotFound` when the key, the upload or the bucket does not exist,
- :class:`~swansongd.errors.Exists` when a create-if-absent found the name taken,
- :class:`~swansongd.errors.TooLarge` when an object is too large to be returned whole,
- :class:`~swansongd.errors.Permanent` for everything else (no permission, wrong region, bad request).

Errors are classified by code or type, never by message text.  The functions at the end are what the
backends share.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from swansongd.digests import part_count
from swansongd.errors import ConfigError, NotFound, Permanent, StoreError, TooLarge, Transient
from swansongd.stores.checksums import crc32c

WINDOW_BYTES = 2**20
"""Bodies and sinks move in windows of at most this many bytes, so that what is hashed is still in the
processor's cache when it is sent or written.  A store holds one for each request under way, and this
bounds the memory of a flush or a restore: connections times this, whatever the files measure."""
RENEW_BELOW_S = 900.0
"""Credentials with less life than this are renewed by :meth:`ObjectStore.warm`."""
CRC32C_UNKNOWN = -1
"""In receipts of :meth:`ObjectStore.parts`: this store tells no checksum of its parts."""
GET_BYTES_MAX = 64 * 2**20
"""The largest object that :meth:`ObjectStore.get` returns."""
LISTED_MAX = 1_000_000
"""Entries of one listing, which is held in memory: 20,000 files of each of 50 VMs."""
_PAGES_MAX = 20_000
_SCRATCH_BYTES = 256 * 2**10

Item = TypeVar("Item")
Token = TypeVar("Token", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing or a HEAD tells of an object."""

    key: str
    size_bytes: int


class Page(NamedTuple):
    """A part of a listing."""

    infos: Sequence[ObjectInfo]
    """In any order, and some perhaps on other pages as well."""
    token: str | None
    """Asks for the next page; None: this is the last one."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload under way.  Only :meth:`ObjectStore.complete` makes the object visible."""

    key: str
    upload_id: str
    size_bytes: int
    part_size_bytes: int

    def part_length_bytes(self, number: int) -> int:
        """Length of part ``number`` (from 1); the last one is what is left."""
        return min(self.part_size_bytes, self.size_bytes - (number - 1) * self.part_size_bytes)


@dataclass(frozen=True, slots=True)
class PartReceipt:
    """The store's word that it has a part.  Those of one number and ETag are of the same bytes."""

    number: int
    """From 1."""
    etag: str
    """Opaque: what the backend wants back at completion.  Keep it whole."""
    crc32c: int = field(compare=False)
    """Of the part's bytes, as they were sent."""


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    age_s: float
    """Since it was begun, by the store's own clock."""


class Body(Protocol):
    """The bytes of one part or one whole shard, read front to back, a window at a time.

    A store may read it several times (a signed payload is hashed first, a request is repeated), and
    calls ``rewind`` before each pass.  What a body learns on the way, such as a digest, is that of the
    last pass: exactly the bytes that the store acknowledged.  Bodies are used by one thread at a time.
    """

    size_bytes: int

    def rewind(self) -> None:
        """Begin again at the first byte."""

    def read_into(self, window: memoryview) -> None:
        """Fill ``window`` with the next bytes; never asked for more than there are.

        What it raises ends the request and goes to the caller of the store unchanged.
        """


class Sink(Protocol):
    """Takes the bytes of one range, front to back, a window at a time.

    ``rewind`` is called before each attempt: what was written before it does not count.
    """

    def rewind(self) -> None:
        """The range comes again, from its first byte."""

    def write(self, window: memoryview) -> None:
        """The next bytes; the window is reused afterwards."""


class ObjectStore(Protocol):
    """Where checkpoints go."""

    url: str
    """As configured, for logs; never contains a credential."""
    part_size_bytes_min: int
    """The smallest legal part, the last one of an upload excepted."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """Store a small object in one request.

        With ``if_absent`` the object is created only when no object of that name exists, decided by
        the store; raises Exists otherwise.  After a Transient error the object may exist all the
        same: the caller reads it back and compares.
        """

    def get(self, key: str) -> bytes:
        """The whole of a small object (a manifest, a claim).  At most 64 MiB; raises TooLarge beyond."""

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        """Hand ``size_bytes`` bytes of the object, from ``offset``, to ``sink``.

        Raises Transient when the answer ends early, NotFound when the object is gone, Permanent when
        the range is not within the object.  When ``size_bytes`` is 0 no request is made.
        """

    def head(self, key: str) -> ObjectInfo | None:
        """Size of the object, or None when there is none.  A missing *bucket* raises NotFound."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with ``prefix``: each key once, in any order.

        It ends only at the page that the store marks as the last one.  Raises Permanent beyond
        :data:`LISTED_MAX`, and when the store's pages go round in a circle.
        """

    def page(self, prefix: str, token: str | None) -> Page:
        """One page of that listing; ``token`` is that of the page before, None for the first."""

    def delete(self, key: str) -> None:
        """Remove the object.  Removing what is not there is no error."""

    def put_shard(self, key: str, body: Body) -> int:
        """Store a whole shard in one request, and return the CRC32C of its bytes.

        The store verifies that checksum where it can.  Only for keys that carry a nonce: an object of
        this name that has these bytes is ours, from an attempt whose reply was lost.  Raises Exists when
        it has others; a store that does not know create-if-absent replaces it.
        """

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        """Start a multipart upload of an object of exactly ``size_bytes``."""

    def put_part(self, upload: Upload, number: int, body: Body) -> PartReceipt:
        """Store part ``number`` (from 1), that is the bytes from ``(number - 1) * part_size_bytes``.

        The store verifies a checksum of the part where it can.  Sending a part again replaces it.
        """

    def parts(self, upload: Upload) -> Sequence[PartReceipt]:
        """The parts that the store has, by number: a receipt kept from earlier holds if it is among them.

        Raises NotFound when the upload is unknown.  The checksum is that which the store knows, or
        :data:`CRC32C_UNKNOWN`; so hand the receipts that were kept to ``complete``, not these.  A part of
        the wrong length is left out.
        """

    def complete(self, upload: Upload, parts: Sequence[PartReceipt]) -> None:
        """Make the object visible, whole.  ``parts`` are all of them, in order.

        Completing an upload whose completion already took effect (a lost reply) is no error when the
        object is there with the size of the upload, and with its checksum where the store tells that;
        raises NotFound when the upload is unknown and the object is not there.
        """

    def uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """All multipart uploads under way of keys that start with ``prefix``."""

    def abort(self, key: str, upload_id: str) -> None:
        """Forget the upload and its parts.  Aborting what is unknown is no error."""

    def check(self) -> None:
        """Ask the store one cheap question; raises as above when bucket, rights or address are wrong."""

    def warm(self) -> None:
        """Make ready what a flush will need: renew credentials that are soon to expire, ask ``check()``.

        Cheap: no credential is fetched that will not be needed within :data:`RENEW_BELOW_S`.  Once
        warm, requests ask nobody for credentials until those have expired.
        """


def bucket_and_prefix(url: str) -> tuple[str, str]:
    """Bucket and key prefix (empty, or with a ``/`` at its end) of ``scheme://bucket/prefix``.

    Raises:
        ConfigError: no bucket is named, or there is more in the URL than bucket and prefix.
    """
    parts = urlsplit(url)
    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc or parts.query:
        raise ConfigError([f"store.url: must read {parts.scheme}://bucket/prefix"])
    prefix = parts.path.strip("/")
    return parts.netloc, f"{prefix}/" if prefix else ""


def read_through(body: Body, *, with_sha256: bool = False) -> tuple[int, str]:
    """CRC32C of ``body``, and its SHA-256 in hex or an empty string in its place."""
    body.rewind()
    scratch = memoryview(bytearray(min(body.size_bytes, _SCRATCH_BYTES)))
    value, sha256 = 0, hashlib.sha256()
    left_bytes = body.size_bytes
    while left_bytes:
        window = scratch[:left_bytes]
        body.read_into(window)
        value = crc32c(window, value)
        if with_sha256:
            sha256.update(window)
        left_bytes -= window.nbytes
    return value, sha256.hexdigest() if with_sha256 else ""


def listed(prefix: str, page: Callable[[str | None], Page]) -> Iterator[ObjectInfo]:
    """A whole listing from its pages, each key once; see :meth:`ObjectStore.list`.

    Args:
        page: asks for the page of a token.
    """
    seen: set[str] = set()
    for info in all_pages(f"list {prefix}", page):
        if info.key not in seen:
            seen.add(info.key)
            yield info


def all_pages(
    what: str, page: Callable[[Token | None], tuple[Sequence[Item], Token | None]]
) -> Iterator[Item]:
    """The items of all pages of a listing, in the store's order, some perhaps several times.

    Args:
        page: asks for the page of a token; returns its items, and the token of the next page or None.

    Raises:
        Permanent: the listing does not end, or is larger than any that is wanted.
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


def expect_part(upload: Upload, number: int, body: Body) -> None:
    """Raises Permanent when ``body`` cannot be part ``number``: sent on, it would spoil the object."""
    wanted_bytes = upload.part_length_bytes(number)
    if number < 1 or body.size_bytes != wanted_bytes:
        raise Permanent(
            f"part {number} of {upload.key} has {body.size_bytes} bytes instead of {wanted_bytes}"
        )


def expect_all_parts(upload: Upload, parts: Sequence[PartReceipt]) -> None:
    """Raises Permanent unless ``parts`` are the receipts of all of them, in order.

    Stores accept gaps in silence.  What a listing returned may lack the checksum.
    """
    if any(part.crc32c == CRC32C_UNKNOWN for part in parts):
        raise Permanent(f"{upload.key}: its completion wants the receipts of put_part")
    count = part_count(upload.size_bytes, upload.part_size_bytes)
    if [part.number for part in parts] != list(range(1, count + 1)):
        raise Permanent(f"{upload.key} wants its {count} parts in order, got {len(parts)} others")


def confirm_completion(store: ObjectStore, upload: Upload, unknown: NotFound) -> None:
    """Decide a completion that found its upload unknown: was an earlier one carried out, unheard?

    Raises ``unknown`` unless the object is there with the size of the upload.
    """
    info = store.head(upload.key)
    if info is None or info.size_bytes != upload.size_bytes:
        raise unknown


@contextmanager
def named(what: str) -> Iterator[None]:
    """Errors of the contract name ``what``, the operation that failed; all others pass."""
    try:
        yield
    except Transient as error:
        message = f"{what}: {error}"
        raise Transient(message, hint=error.hint, retry_after_s=error.retry_after_s) from error
    except StoreError as error:
        raise type(error)(f"{what}: {error}", hint=error.hint) from error


class BytesBody:
    """A small body that lies in memory."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = memoryview(data).cast("B")
        self.size_bytes = self.data.nbytes
        self._at = 0

    def rewind(self) -> None:
        self._at = 0

    def read_into(self, window: memoryview) -> None:
        window[:] = self.data[self._at : self._at + window.nbytes]
        self._at += window.nbytes


class BytesSink:
    """Collects a small object; raises TooLarge beyond ``max_bytes``."""

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
    """Whether a TLS certificate that nobody here trusts is at the bottom of ``error``."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None
