# SPDX-License-Identifier: Apache-2.0
"""The store contract on Google Cloud Storage.

The wire sends each request once; retries and deadlines belong to the caller.  Objects and multipart uploads
use the XML interface, listings and metadata the JSON interface.  Google also calls the version number of an
object its generation; here that is the *object generation*.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from urllib.parse import quote, urlencode
from xml.etree import ElementTree as ET

from swansongd.errors import Changed, Exists, Locked, NotFound, Permanent, StoreError, Transient
from swansongd.stores import responses
from swansongd.stores.base import (
    CRC32C_UNKNOWN,
    GET_BYTES_MAX,
    WINDOW_BYTES,
    Body,
    BytesBody,
    BytesSink,
    Folders,
    ObjectInfo,
    OpenUpload,
    Page,
    PartReceipt,
    Sink,
    Upload,
    all_pages,
    bucket_and_prefix,
    expect_all_parts,
    expect_few,
    expect_part,
    listed,
    named,
    read_through,
)
from swansongd.stores.checksums import crc32c, crc32c_base64, crc32c_of_parts
from swansongd.stores.gcs.access import Forbidden, GcsAccess
from swansongd.stores.gcs.retention import GcsRetention
from swansongd.stores.gcs.settings import GcsSettings
from swansongd.stores.http.client import Response
from swansongd.stores.options import GcsOptions
from swansongd.stores.retention import StoreClock
from swansongd.util.threads import parallel

_HASH = "x-goog-hash"
_INFO_FIELDS = "name,size,timeCreated,generation"
_ABSENT = {"x-goog-if-generation-match": "0"}
"""For whole objects only: the store supports no condition for multipart uploads."""
_DELETE_THREADS = 8
_UNVERIFIED = "This store returns no CRC32C of an upload: use another endpoint"


class GcsStore:
    """A bucket, or a prefix in one.  For credentials see :class:`swansongd.stores.gcs.access.GcsAccess`.

    Args:
        url: ``gs://bucket/prefix``.
    """

    part_size_bytes_min = 5 * 2**20

    def __init__(self, url: str, options: GcsOptions) -> None:
        self.url = url
        self._bucket, self._prefix = bucket_and_prefix(url)
        self._local = threading.local()
        self._access = GcsAccess(options)
        self._clock = StoreClock(self.check)
        self.settings = GcsSettings(self._bucket, self._prefix, self._exchange)
        self._retention = GcsRetention(
            options.lock, self._json, self.settings.has_lock, self._clock
        )

    # ------------------------------------------------------------ small objects

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        with self._creating(key) if if_absent else nullcontext():
            self._send(
                f"put {key}",
                key,
                {},
                BytesBody(data),
                condition=_ABSENT if if_absent else {},
            )

    def get(self, key: str) -> bytes:
        sink = BytesSink(GET_BYTES_MAX)
        response = self._xml(f"get {key}", "GET", key, sink=sink)
        if response.status != 200:
            raise Permanent(
                f"get {key} in {self.url}: HTTP {response.status} is not a complete object"
            )
        return bytes(sink.data)

    def head(self, key: str) -> ObjectInfo | None:
        found = self._metadata(key)
        return found[0] if found is not None else None

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return listed(prefix, lambda token: self.page(prefix, token, after=after), after)

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        return self._list_page(prefix, token, after=after)

    def folders(self, prefix: str, token: str | None) -> Folders:
        fields = {"delimiter": "/", "fields": "kind,prefixes,nextPageToken"}
        response = self._listing(prefix, token, fields)
        with responses.complete(f"list {prefix}"):
            return responses.json_folders(response, self._prefix, prefix)

    def delete(self, key: str, *, if_tag: str = "") -> None:
        if self._retention.may_lock():
            self._retention.expect_none(key)
        condition = {"ifGenerationMatch": if_tag} if if_tag else {}
        try:
            self._json(f"delete {key}", "DELETE", key, condition)
        except NotFound:
            return
        except Exists as other:
            if self._metadata(key) is not None:
                raise Changed(str(other)) from other

    def delete_many(self, infos: Sequence[ObjectInfo]) -> Mapping[str, str]:
        expect_few(infos)
        remaining: dict[str, str] = {}

        def delete(info: ObjectInfo) -> None:
            try:
                self.delete(info.key, if_tag=info.tag)
            except (Changed, Locked) as error:
                remaining[info.key] = str(error)

        parallel(infos, delete, threads=_DELETE_THREADS)
        return remaining

    def locked_until(self, key: str) -> float | None:
        return self._retention.until(key) if self._retention.may_lock() else None

    def lock(self, key: str) -> float | None:
        return self._retention.extend(key)

    # ------------------------------------------------------------ shards

    def put_shard(self, key: str, body: Body) -> int:
        what = f"put {key}"
        try:
            with self._creating(key):
                return self._send(what, key, {}, body, condition=_ABSENT)[1]
        except Exists as taken:
            # If the bytes match, our write succeeded and only the reply was lost.
            value, _ = read_through(body)
            if self._crc32c_of(what, key, body.size_bytes, taken) != value:
                raise
            return value

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if not size_bytes:
            return
        what = f"get {key}"
        span = f"{offset}-{offset + size_bytes - 1}"
        response = self._xml(what, "GET", key, headers={"range": f"bytes={span}"}, sink=sink)
        range_ = response.headers.get("content-range", "")
        if response.status != 206 or not range_.startswith(f"bytes {span}/"):
            raise Permanent(f"{what} in {self.url}: bytes {span} are not within the object")

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        what = f"begin {key}"
        headers = self._retention.headers(key)
        with self._retention.explained(key):
            response = self._xml(what, "POST", key, {"uploads": ""}, headers=headers)
        with responses.complete(what):
            return Upload(key, responses.begun(response), size_bytes, part_size_bytes)

    def put_part(self, upload: Upload, number: int, body: Body) -> PartReceipt:
        expect_part(upload, number, body)
        what = f"part {number} of {upload.key}"
        parameters = {"partNumber": str(number), "uploadId": upload.upload_id}
        response, value = self._send(what, upload.key, parameters, body)
        return PartReceipt(number, responses.quoted(response.headers["etag"]), value)

    def parts(self, upload: Upload) -> Sequence[PartReceipt]:
        what = f"parts of {upload.key}"

        def page(
            markers: responses.Markers | None,
        ) -> tuple[Sequence[responses.ListedPart], responses.Markers | None]:
            parameters = {"uploadId": upload.upload_id, **dict(markers or ())}
            response = self._xml(what, "GET", upload.key, parameters)
            with responses.complete(what):
                return responses.parts(response)

        return [
            PartReceipt(part.number, responses.quoted(part.etag), CRC32C_UNKNOWN)
            for part in all_pages(what, page)
            if part.size_bytes == upload.part_length_bytes(part.number)
        ]

    def complete(self, upload: Upload, parts: Sequence[PartReceipt]) -> None:
        """See the contract.  Also raises NotFound if the object has other bytes than the parts."""
        expect_all_parts(upload, parts)
        order = ET.Element("CompleteMultipartUpload")
        for part in parts:
            item = ET.SubElement(order, "Part")
            ET.SubElement(item, "PartNumber").text = str(part.number)
            ET.SubElement(item, "ETag").text = part.etag
        what = f"complete {upload.key}"
        body = BytesBody(ET.tostring(order))
        reported: int | None = None
        try:
            response = self._xml(
                what, "POST", upload.key, {"uploadId": upload.upload_id}, body=body
            )
            with responses.complete(what):
                responses.completed(response)
            reported = responses.hashed_crc32c(response.headers.get(_HASH, ""))
        except NotFound as unknown:
            # If the checksum matches, an earlier completion took effect and its reply was lost.
            reported = self._crc32c_of(what, upload.key, upload.size_bytes, unknown)
        if reported is None:
            absent = NotFound(f"{what}: the object does not exist")
            reported = self._crc32c_of(what, upload.key, upload.size_bytes, absent)
        self._expect_whole(what, upload, parts, reported)

    def uploads(self, prefix: str) -> Iterator[OpenUpload]:
        what = f"uploads of {prefix}"
        base = {"uploads": "", "prefix": self._prefix + prefix}

        def page(
            markers: responses.Markers | None,
        ) -> tuple[Sequence[OpenUpload], responses.Markers | None]:
            response = self._xml(what, "GET", None, {**base, **dict(markers or ())})
            with responses.complete(what):
                return responses.uploads(response, self._prefix, prefix)

        return all_pages(what, page)

    def abort(self, key: str, upload_id: str) -> None:
        with suppress(NotFound):
            self._xml(f"abort {key}", "DELETE", key, {"uploadId": upload_id})

    # ------------------------------------------------------------ the bucket

    def check(self) -> None:
        self._list_page("", page_size=1)

    def warm(self) -> None:
        self.renew_credentials()
        self.check()

    def renew_credentials(self) -> None:
        """Renew a token that expires soon; raises Permanent if there are no credentials."""
        self._access.renew_credentials()

    # ------------------------------------------------------------ requests

    def _metadata(self, key: str) -> tuple[ObjectInfo, int | None] | None:
        """The object and its CRC32C; None if it does not exist."""
        fields = {"fields": f"kind,{_INFO_FIELDS},crc32c"}
        try:
            response = self._json(f"head {key}", "GET", key, fields)
        except NotFound:
            # Object and bucket have the same 404: a listing raises NotFound if the bucket is missing.
            self._list_page(key, page_size=1)
            return None
        with responses.complete(f"head {key}"):
            return responses.json_metadata(response, self._prefix, key)

    def _list_page(
        self,
        prefix: str,
        token: str | None = None,
        *,
        after: str = "",
        page_size: int = responses.PAGE_ITEMS,
    ) -> Page:
        fields = {"fields": f"kind,items({_INFO_FIELDS}),nextPageToken"}
        if after:
            fields["startOffset"] = self._prefix + after  # also lists this key itself
        response = self._listing(prefix, token, fields, page_size)
        with responses.complete(f"list {prefix}"):
            return responses.json_objects(response, self._prefix, prefix)

    def _listing(
        self,
        prefix: str,
        token: str | None,
        more: Mapping[str, str],
        page_size: int = responses.PAGE_ITEMS,
    ) -> Response:
        parameters = {
            "prefix": self._prefix + prefix,
            "maxResults": str(page_size),
            **more,
        }
        if token is not None:
            parameters["pageToken"] = token
        return self._json(f"list {prefix}", "GET", None, parameters)

    def _json(
        self,
        what: str,
        method: str,
        key: str | None,
        parameters: Mapping[str, str] | None = None,
        *,
        body: Body | None = None,
    ) -> Response:
        """Send one request to the JSON interface for an object; with key None for the bucket's objects."""
        target = f"/storage/v1/b/{quote(self._bucket, safe='')}/o"
        if key is not None:
            target += f"/{quote(self._prefix + key, safe='')}"
        if parameters:
            target += "?" + urlencode(parameters, quote_via=quote)
        with named(f"{what} in {self.url}"):
            headers = {"content-type": "application/json"} if body is not None else {}
            return self._exchange(method, target, headers, body=body)

    def _xml(
        self,
        what: str,
        method: str,
        key: str | None,
        parameters: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        sink: Sink | None = None,
    ) -> Response:
        """Send one request to the XML interface for an object; with key None for the bucket."""
        target = f"/{self._bucket}"
        if key is not None:
            target += f"/{quote(self._prefix + key)}"
        if parameters:
            # A flag has no value, and no "=" either.
            target += "?" + urlencode(parameters, quote_via=quote).replace("uploads=", "uploads", 1)
        with named(f"{what} in {self.url}"):
            return self._exchange(method, target, headers, body=body, sink=sink)

    def _exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        *,
        body: Body | None = None,
        sink: Sink | None = None,
    ) -> Response:
        response = self._access.exchange(method, target, headers or {}, body=body, sink=sink)
        self._clock.observe(response.headers.get("date", ""))
        return response

    def _send(
        self,
        what: str,
        key: str,
        parameters: Mapping[str, str],
        body: Body,
        *,
        condition: Mapping[str, str] | None = None,
    ) -> tuple[Response, int]:
        """PUT ``body``; returns the response, and the CRC32C that was verified.

        A body in memory, or of one window, is sent with its checksum, which the store verifies.  The store's
        checksum of a larger body is compared afterwards, so that the body is read only once.
        """
        headers = dict(condition or {})
        if not isinstance(body, BytesBody) and body.size_bytes <= WINDOW_BYTES:
            body = BytesBody(self._read(body))
        if isinstance(body, BytesBody):
            headers[_HASH] = f"crc32c={crc32c_base64(crc32c(body.data))}"
        if "uploadId" not in parameters:
            headers.update(self._retention.headers(key))
        with self._retention.explained(key):
            response = self._xml(what, "PUT", key, parameters, headers=headers, body=body)
        with responses.complete(what):
            responses.etag_of(response.headers)
        reported = responses.hashed_crc32c(response.headers.get(_HASH, ""))
        if reported is None and _HASH not in headers:
            raise Permanent(
                f"{what} in {self.url}: the store returned no checksum", hint=_UNVERIFIED
            )
        if reported not in (None, response.crc32c):
            raise Transient(f"{what} in {self.url}: the store has other bytes than were sent")
        return response, response.crc32c

    def _read(self, body: Body) -> memoryview:
        """Read a small body into this thread's scratch window, which the next call overwrites."""
        scratch: memoryview | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = memoryview(bytearray(WINDOW_BYTES))
        window = scratch[: body.size_bytes]
        body.rewind()
        if window:
            body.read_into(window)
        return window

    @contextmanager
    def _creating(self, key: str) -> Iterator[None]:
        """Around a create-if-absent: raise Exists if the object exists, in place of Forbidden.

        GCS requires the right to delete for an overwrite.  Without it, the status can be 403 instead of 412.
        """
        try:
            yield
        except Forbidden as error:
            if self._metadata(key) is None:
                raise
            raise Exists(str(error)) from error

    def _crc32c_of(self, what: str, key: str, size_bytes: int, absent: StoreError) -> int:
        """The store's CRC32C of an object; raises ``absent`` if there is no object of that size."""
        found = self._metadata(key)
        if found is None or found[0].size_bytes != size_bytes:
            raise absent
        reported = found[1]
        if reported is None:
            raise Permanent(f"{what}: the store returned no checksum", hint=_UNVERIFIED)
        return reported

    def _expect_whole(
        self, what: str, upload: Upload, parts: Sequence[PartReceipt], reported: int
    ) -> None:
        """Raise NotFound unless the object has the checksum of the parts.

        Not Transient: the upload does not exist any more, and a retry would find an object of the right size.
        On NotFound the caller restarts the upload under a new key.
        """
        sizes = [(part.crc32c, upload.part_length_bytes(part.number)) for part in parts]
        if reported != crc32c_of_parts(sizes):
            raise NotFound(f"{what} in {self.url}: the object has other bytes than were sent")
