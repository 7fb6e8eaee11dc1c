# SPDX-License-Identifier: Apache-2.0
"""Google Cloud Storage: the contract in terms of its requests.

Bytes of shards and multipart uploads go over the wire to the store's XML interface; listing, metadata
and creating small objects through google-cloud-storage, whose own retries and transfer manager stay
unused: attempts, waiting and deadlines belong to the caller.  Google numbers the versions of an object
and calls that a generation too; here that is an *object generation*.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from urllib.parse import quote, urlencode
from xml.etree import ElementTree as ET

from swansongd.errors import Exists, NotFound, Permanent, StoreError, TooLarge, Transient
from swansongd.stores.base import (
    CRC32C_UNTOLD,
    GET_BYTES_MAX,
    WINDOW_BYTES,
    Body,
    ObjectInfo,
    OpenUpload,
    PartReceipt,
    Sink,
    Upload,
    bucket_and_prefix,
    expect_all_parts,
    expect_part,
    read_through,
)
from swansongd.stores.checksums import crc32c, crc32c_base64, crc32c_of_parts
from swansongd.stores.gcs_access import Forbidden, GcsAccess, errors_of, named
from swansongd.stores.gcs_answers import (
    age_of_s,
    date_of,
    goes_on,
    number_of,
    parsed,
    quoted,
    told_crc32c,
)
from swansongd.stores.wire import Answer

_HASH = "x-goog-hash"
_ABSENT = {"x-goog-if-generation-match": "0"}
"""For whole objects only: of multipart uploads the store supports no condition."""
_UNVERIFIED = "This store tells no CRC32C of what it took: use another endpoint"


class GcsStore:
    """A bucket, or a prefix in one.  For credentials see :class:`swansongd.stores.gcs_access.GcsAccess`.

    Args:
        url: ``gs://bucket/prefix``.
        endpoint: of an emulator or a private endpoint; without it STORAGE_EMULATOR_HOST, or Google's.
        connections: how many threads will call at once.
        ca_bundle: certificates to trust; without it REQUESTS_CA_BUNDLE, or the system's.
        connect_timeout_s: limit of making a connection.
        read_timeout_s: limit of one wait for an answer.
    """

    part_size_bytes_min = 5 * 2**20

    def __init__(
        self,
        url: str,
        endpoint: str | None = None,
        connections: int = 16,
        *,
        ca_bundle: str | None = None,
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 8.0,
    ) -> None:
        self.url = url
        self._bucket, self._prefix = bucket_and_prefix(url)
        self._local = threading.local()
        self._access = GcsAccess(
            self._bucket,
            endpoint=endpoint,
            connections=connections,
            ca_bundle=ca_bundle,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
        )

    # ------------------------------------------------------------ small objects

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        condition = self._creating(key) if if_absent else nullcontext()
        with condition, errors_of(f"put {key} in {self.url}"):
            self._access.channel().bucket.blob(self._prefix + key).upload_from_string(
                bytes(data),
                content_type="application/octet-stream",
                if_generation_match=0 if if_absent else None,
                checksum="crc32c",
                **self._access.once,
            )

    def get(self, key: str) -> bytes:
        kept = _Kept()
        self._xml(f"get {key}", "GET", key, sink=kept)
        return bytes(kept.data)

    def head(self, key: str) -> ObjectInfo | None:
        blob = self._metadata(key)
        return ObjectInfo(key, int(blob.size)) if blob is not None else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        token: str | None = None
        while True:
            blobs, token = self._list_page(self._prefix + prefix, page_token=token)
            for blob in blobs:
                yield ObjectInfo(blob.name.removeprefix(self._prefix), int(blob.size))
            if not token:
                return

    def delete(self, key: str) -> None:
        with suppress(NotFound), errors_of(f"delete {key} in {self.url}"):
            self._access.channel().bucket.blob(self._prefix + key).delete(**self._access.once)

    # ------------------------------------------------------------ shards

    def put_shard(self, key: str, body: Body) -> int:
        what = f"put {key}"
        try:
            with self._creating(key):
                return self._send(what, key, {}, body, condition=_ABSENT)[1]
        except Exists as taken:
            # Keys are not used twice: it is ours, carried out unheard, if it holds the same bytes.
            value, _ = read_through(body)
            if self._crc32c_of(what, key, body.size_bytes, taken) != value:
                raise
            return value

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if not size_bytes:
            return
        what = f"get {key}"
        span = f"{offset}-{offset + size_bytes - 1}"
        answer = self._xml(what, "GET", key, headers={"range": f"bytes={span}"}, sink=sink)
        range_ = answer.headers.get("content-range", "")
        if answer.status != 206 or not range_.startswith(f"bytes {span}/"):
            raise Permanent(f"{what} in {self.url}: bytes {span} are not within the object")

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        what = f"begin {key}"
        answer = self._xml(what, "POST", key, {"uploads": ""})
        upload_id = parsed(what, answer, "InitiateMultipartUploadResult").findtext("{*}UploadId")
        if not upload_id:
            raise Transient(f"{what}: the answer names no upload")
        return Upload(key, upload_id, size_bytes, part_size_bytes)

    def put_part(self, upload: Upload, number: int, body: Body) -> PartReceipt:
        expect_part(upload, number, body)
        what = f"part {number} of {upload.key}"
        parameters = {"partNumber": str(number), "uploadId": upload.upload_id}
        answer, value = self._send(what, upload.key, parameters, body)
        return PartReceipt(number, quoted(answer.headers["etag"]), value)

    def parts(self, upload: Upload) -> Sequence[PartReceipt]:
        what = f"parts of {upload.key}"
        found = []
        parameters = {"uploadId": upload.upload_id}
        while True:
            answer = self._xml(what, "GET", upload.key, parameters)
            page = parsed(what, answer, "ListPartsResult")
            for part in page.findall("{*}Part"):
                number, size_bytes = number_of(part, "PartNumber"), number_of(part, "Size")
                if size_bytes == upload.part_length_bytes(number):
                    etag = quoted(part.findtext("{*}ETag") or "")
                    found.append(PartReceipt(number, etag, CRC32C_UNTOLD))
            if not goes_on(page):
                return found
            parameters["part-number-marker"] = page.findtext("{*}NextPartNumberMarker") or ""

    def complete(self, upload: Upload, parts: Sequence[PartReceipt]) -> None:
        """See the contract.  NotFound also when the store put other bytes together than were sent."""
        expect_all_parts(upload, parts)
        if any(part.crc32c == CRC32C_UNTOLD for part in parts):
            raise Permanent(f"complete {upload.key}: wants the receipts of put_part")
        order = ET.Element("CompleteMultipartUpload")
        for part in parts:
            item = ET.SubElement(order, "Part")
            ET.SubElement(item, "PartNumber").text = str(part.number)
            ET.SubElement(item, "ETag").text = part.etag
        what = f"complete {upload.key}"
        body = _Bytes(memoryview(ET.tostring(order)))
        told: int | None = None
        try:
            answer = self._xml(what, "POST", upload.key, {"uploadId": upload.upload_id}, body=body)
            parsed(what, answer, "CompleteMultipartUploadResult")
            told = told_crc32c(answer.headers.get(_HASH, ""))
        except NotFound as unknown:
            # Was an earlier completion carried out, unheard?  The checksum tells it.
            told = self._crc32c_of(what, upload.key, upload.size_bytes, unknown)
        if told is None:
            absent = NotFound(f"{what}: the object is not there")
            told = self._crc32c_of(what, upload.key, upload.size_bytes, absent)
        self._expect_whole(what, upload, parts, told)

    def uploads(self, prefix: str) -> Iterator[OpenUpload]:
        what = f"uploads of {prefix}"
        parameters = {"uploads": "", "prefix": self._prefix + prefix}
        while True:
            answer = self._xml(what, "GET", None, parameters)
            page = parsed(what, answer, "ListMultipartUploadsResult")
            now = date_of(answer)
            for item in page.findall("{*}Upload"):
                key = (item.findtext("{*}Key") or "").removeprefix(self._prefix)
                age_s = age_of_s(item.findtext("{*}Initiated") or "", now)
                yield OpenUpload(key, item.findtext("{*}UploadId") or "", age_s)
            if not goes_on(page):
                return
            parameters["key-marker"] = page.findtext("{*}NextKeyMarker") or ""
            parameters["upload-id-marker"] = page.findtext("{*}NextUploadIdMarker") or ""

    def abort(self, key: str, upload_id: str) -> None:
        with suppress(NotFound):
            self._xml(f"abort {key}", "DELETE", key, {"uploadId": upload_id})

    # ------------------------------------------------------------ the bucket

    def check(self) -> None:
        self._list_page(self._prefix, page_size=1)

    def warm(self) -> None:
        self.renew_credentials()
        self.check()

    def renew_credentials(self) -> None:
        """Have a token that lasts for a while; raises Permanent where there are no credentials."""
        self._access.renew_credentials()

    # ------------------------------------------------------------ requests

    def _metadata(self, key: str) -> Any:
        """What the store tells of the object, in the library's words; None when there is none."""
        with errors_of(f"head {key} in {self.url}"):
            blob = self._access.channel().bucket.get_blob(self._prefix + key, **self._access.once)
        if blob is None:
            # The same 404 for object and bucket: ask whether it was the bucket that is missing.
            self._list_page(self._prefix + key, page_size=1)
        return blob

    def _list_page(
        self, prefix: str, *, page_token: str | None = None, page_size: int = 1000
    ) -> tuple[Sequence[Any], str | None]:
        with errors_of(f"list {prefix} in {self.url}"):
            channel = self._access.channel()
            listing = channel.client.list_blobs(
                channel.bucket,
                prefix=prefix,
                page_size=page_size,
                page_token=page_token,
                fields="items(name,size),nextPageToken",
                **self._access.once,
            )
            page = next(listing.pages, ())
            return list(page), listing.next_page_token

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
    ) -> Answer:
        """One request to the XML interface, about an object or, with None, the bucket."""
        target = f"/{self._bucket}"
        if key is not None:
            target += f"/{quote(self._prefix + key)}"
        if parameters:
            # A flag, which has no value, carries no "=" either.
            target += "?" + urlencode(parameters, quote_via=quote).replace("uploads=", "uploads", 1)
        with named(f"{what} in {self.url}"):
            return self._access.exchange(method, target, headers or {}, body=body, sink=sink)

    def _send(
        self,
        what: str,
        key: str,
        parameters: Mapping[str, str],
        body: Body,
        *,
        condition: Mapping[str, str] | None = None,
    ) -> tuple[Answer, int]:
        """PUT ``body``; returns the answer and the CRC32C that the store and we agree upon.

        A body of one window is hashed before it goes, and the store refuses it when it is not the same
        there; of a larger one the store's checksum is compared afterwards, so that it is read only once.
        """
        headers = dict(condition or {})
        if body.size_bytes <= WINDOW_BYTES:
            body = _Bytes(self._read(body))
            headers[_HASH] = f"crc32c={crc32c_base64(crc32c(body.data))}"
        answer = self._xml(what, "PUT", key, parameters, headers=headers, body=body)
        if not answer.headers.get("etag"):
            raise Transient(f"{what}: the store took it without a word")
        told = told_crc32c(answer.headers.get(_HASH, ""))
        if told is None and _HASH not in headers:
            raise Permanent(f"{what} in {self.url}: the store verifies nothing", hint=_UNVERIFIED)
        if told not in (None, answer.crc32c):
            raise Transient(f"{what} in {self.url}: the store has other bytes than were sent")
        return answer, answer.crc32c

    def _read(self, body: Body) -> memoryview:
        """The whole of a small body, until this thread reads the next one."""
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
        """Around a create-if-absent: Exists when the name is taken, whatever was looked at first.

        GCS counts overwriting as deleting: who may not do that may hear 403 instead of 412.
        """
        try:
            yield
        except Forbidden as error:
            if self._metadata(key) is None:
                raise
            raise Exists(str(error)) from error

    def _crc32c_of(self, what: str, key: str, size_bytes: int, absent: StoreError) -> int:
        """What the store says of an object; raises ``absent`` when there is none of that size."""
        blob = self._metadata(key)
        if blob is None or int(blob.size) != size_bytes:
            raise absent
        told = told_crc32c(f"crc32c={blob.crc32c}")
        if told is None:
            raise Permanent(f"{what}: nothing to verify it by", hint=_UNVERIFIED)
        return told

    def _expect_whole(
        self, what: str, upload: Upload, parts: Sequence[PartReceipt], told: int
    ) -> None:
        """Raises NotFound unless the object is what the parts make.

        Not Transient: the upload is gone, and completing it again would find an object of the right
        size.  Who is told that his upload is not there begins afresh under another key.
        """
        sizes = [(part.crc32c, upload.part_length_bytes(part.number)) for part in parts]
        if told != crc32c_of_parts(sizes):
            raise NotFound(f"{what} in {self.url}: the object has other bytes than were sent")


class _Bytes:
    """A small body that lies in memory."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.size_bytes = data.nbytes
        self._at = 0

    def rewind(self) -> None:
        self._at = 0

    def read_into(self, window: memoryview) -> None:
        window[:] = self.data[self._at : self._at + window.nbytes]
        self._at += window.nbytes


class _Kept:
    """A sink that keeps a small object."""

    def __init__(self) -> None:
        self.data = bytearray()

    def rewind(self) -> None:
        self.data.clear()

    def write(self, window: memoryview) -> None:
        if len(self.data) + window.nbytes > GET_BYTES_MAX:
            raise TooLarge(f"the object has more than {GET_BYTES_MAX} bytes")
        self.data += window
