# SPDX-License-Identifier: Apache-2.0
"""Google Cloud Storage as a function from request to response; emulators/gcs_server.py serves it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import google_crc32c

from testkit.emulators.store_control import (
    Call,
    ListingMode,
    StoreResponse,
    error_response,
    flip_stored,
)

PART_SIZE_BYTES_MIN = 5 * 2**20
PARTS_MAX = 10_000
_PAGE = 1000
_STAMP = "%Y-%m-%dT%H:%M:%S.%fZ"
_CONDITION = "x-goog-if-generation-match"
PRECONDITIONS = (_CONDITION,)


class GcsError(Exception):
    """A request that the store refuses."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class GcsObject:
    data: bytes
    object_generation: int
    crc32c: str
    md5: str | None
    created: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def etag(self) -> str:
        return f'"{self.object_generation:x}"'


@dataclass
class GcsUpload:
    bucket: str
    name: str
    parts: dict[int, tuple[bytes, str]] = field(default_factory=dict)
    """Content and ETag by number."""
    begun: datetime = field(default_factory=lambda: datetime.now(UTC))


def checksum(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


class Gcs:
    """The store.  With one lock, every request is atomic."""

    def __init__(self, buckets: list[str]) -> None:
        self._lock = threading.RLock()
        self._buckets: dict[str, dict[str, GcsObject]] = {name: {} for name in buckets}
        self._multipart: dict[str, GcsUpload] = {}
        self._object_generation = 1_700_000_000_000_000
        self._reset()

    def _reset(self) -> None:
        self._token: str | None = None
        self._page = _PAGE
        self._listing = ListingMode()
        self._may_delete = True
        self._asks_rights_first = False

    def order(self, name: str, call: Call) -> bool:
        """Control commands of this store: see emulators/gcs_server.py."""
        with self._lock:
            match name:
                case "clear":
                    self._reset()
                case "token":
                    self._token = call.parameter("valid")
                case "page":
                    self._page = int(call.parameter("size") or _PAGE)
                case "listing":
                    self._listing = ListingMode.ordered(call)
                case "role":
                    self._may_delete = call.parameter("delete") != "0"
                    self._asks_rights_first = call.parameter("first") == "rights"
                case "forget":
                    self._multipart.clear()
                case _:
                    return False
        return True

    def respond(self, call: Call) -> StoreResponse:
        segments = call.path.lstrip("/").split("/")
        with self._lock:
            bearer = call.headers.get("authorization")
            if self._token is not None and bearer != f"Bearer {self._token}":
                return error_response(401, "AuthenticationRequired")
            if segments[0] == "storage":
                try:
                    return self._json(call, segments)
                except GcsError as refused:
                    error = {"code": refused.status, "message": refused.code}
                    return _json_response({"error": error}, refused.status)
            try:
                return self._xml(call)
            except GcsError as refused:
                response = error_response(refused.status, refused.code)
                return StoreResponse(response.status) if call.method == "HEAD" else response

    def corrupt(self, name: str) -> bool:
        with self._lock:
            return flip_stored(self._buckets, name)

    # ------------------------------------------------------------ JSON interface

    def _json(self, call: Call, segments: list[str]) -> StoreResponse:
        match call.method, segments[2:]:
            case "GET", ["b", bucket]:
                self._objects(unquote(bucket))
                return _json_response({"kind": "storage#bucket", "name": unquote(bucket)})
            case "GET", ["b", bucket, "o"]:
                return self._list(unquote(bucket), call)
            case "GET", ["b", bucket, "o", name]:
                found = self._find(unquote(bucket), unquote(name))
                facts = _metadata(unquote(bucket), unquote(name), found)
                return _json_response(_selected(facts, call))
            case "DELETE", ["b", bucket, "o", name]:
                found = self._find(unquote(bucket), unquote(name))
                # docs/json_api/v1/objects/delete: 412 if the condition is not met.
                if call.parameter("ifGenerationMatch", str(found.object_generation)) != str(
                    found.object_generation
                ):
                    raise GcsError(412, "conditionNotMet")
                return self._delete(unquote(bucket), unquote(name))
        raise GcsError(501, "NotImplemented")

    def _list(self, bucket: str, call: Call) -> StoreResponse:
        if call.parameter("delimiter") or call.parameter("versions") == "true":
            raise GcsError(501, "NotImplemented")
        objects = self._objects(bucket)
        prefix = call.parameter("prefix") or ""
        limit = min(int(call.parameter("maxResults") or _PAGE), self._page)
        start = call.parameter("startOffset") or ""
        found = [name for name in objects if name.startswith(prefix) and name >= start]
        names, last = self._listing.page(found, call.parameter("pageToken"), limit)
        items = [_metadata(bucket, name, objects[name]) for name in names]
        response: dict[str, Any] = {"kind": "storage#objects"}
        if items:
            response["items"] = items
        if last is not None:
            response["nextPageToken"] = last
        return _json_response(_selected(response, call))

    # ------------------------------------------------------------ XML interface

    def _xml(self, call: Call) -> StoreResponse:
        bucket, _, rest = call.path.lstrip("/").partition("/")
        name = unquote(rest)
        self._objects(bucket)
        if not name:
            if call.method == "GET" and call.parameter("uploads") is not None:
                return self._list_uploads(call, bucket)
            raise GcsError(501, "NotImplemented")
        upload_id = call.parameter("uploadId")
        if (upload_id or call.parameter("uploads") is not None) and _CONDITION in call.headers:
            # GCS supports no conditions on multipart uploads.
            raise GcsError(501, "NotImplemented")
        number = call.parameter("partNumber")
        match call.method:
            case "POST" if call.parameter("uploads") is not None:
                return self._initiate(bucket, name)
            case "PUT" if upload_id and number:
                return self._put_part(call, self._upload_of(bucket, name, upload_id), int(number))
            case "GET" if upload_id:
                return self._list_parts(call, self._upload_of(bucket, name, upload_id))
            case "POST" if upload_id:
                return self._complete(call, self._upload_of(bucket, name, upload_id), upload_id)
            case "DELETE" if upload_id:
                self._upload_of(bucket, name, upload_id)
                del self._multipart[upload_id]
                return StoreResponse(204)
            case "GET" | "HEAD" if not call.query:
                return _content(call, self._find(bucket, name))
            case "PUT" if not call.query:
                _verify(call.body, call.headers.get("x-goog-hash"))
                only_if = call.headers.get(_CONDITION)
                stored = self._store(bucket, name, call.body, only_if)
                return StoreResponse(200, b"", _headers(stored))
            case "DELETE" if not call.query:
                self._find(bucket, name)
                return self._delete(bucket, name)
        raise GcsError(501, "NotImplemented")

    def _initiate(self, bucket: str, name: str) -> StoreResponse:
        upload_id = uuid.uuid4().hex
        self._multipart[upload_id] = GcsUpload(bucket, name)
        return _xml_response(
            "InitiateMultipartUploadResult", {"Bucket": bucket, "Key": name, "UploadId": upload_id}
        )

    def _upload_of(self, bucket: str, name: str, upload_id: str) -> GcsUpload:
        upload = self._multipart.get(upload_id)
        if upload is None or (upload.bucket, upload.name) != (bucket, name):
            raise GcsError(404, "NoSuchUpload")
        return upload

    def _put_part(self, call: Call, upload: GcsUpload, number: int) -> StoreResponse:
        if not 1 <= number <= PARTS_MAX:
            raise GcsError(400, "InvalidArgument")
        _verify(call.body, call.headers.get("x-goog-hash"))
        etag = f'"{hashlib.md5(call.body).hexdigest()}"'
        upload.parts[number] = (call.body, etag)
        return StoreResponse(
            200, b"", {"ETag": etag, "x-goog-hash": f"crc32c={checksum(call.body)}"}
        )

    def _list_parts(self, call: Call, upload: GcsUpload) -> StoreResponse:
        """List the parts without checksums, as GCS does."""
        after = int(call.parameter("part-number-marker") or 0)
        numbers = sorted(number for number in upload.parts if number > after)
        limit = min(int(call.parameter("max-parts") or _PAGE), self._page)
        facts = {"Bucket": upload.bucket, "Key": upload.name}
        facts |= {"IsTruncated": str(len(numbers) > limit).lower()}
        if len(numbers) > limit:
            facts["NextPartNumberMarker"] = str(numbers[limit - 1])
        parts = []
        for number in numbers[:limit]:
            data, etag = upload.parts[number]
            parts.append({"PartNumber": str(number), "ETag": etag, "Size": str(len(data))})
        return _xml_response("ListPartsResult", facts, "Part", parts)

    def _list_uploads(self, call: Call, bucket: str) -> StoreResponse:
        prefix = call.parameter("prefix") or ""
        after = (call.parameter("key-marker") or "", call.parameter("upload-id-marker") or "")
        found = sorted(
            (upload.name, upload_id)
            for upload_id, upload in self._multipart.items()
            if upload.bucket == bucket and upload.name.startswith(prefix)
        )
        left = [pair for pair in found if (pair > after if after[1] else pair[0] > after[0])]
        limit = min(int(call.parameter("max-uploads") or _PAGE), self._page)
        facts = {"Bucket": bucket, "IsTruncated": str(len(left) > limit).lower()}
        if len(left) > limit:
            name, upload_id = left[limit - 1]
            facts |= {"NextKeyMarker": name, "NextUploadIdMarker": upload_id}
        uploads = [
            {
                "Key": name,
                "UploadId": upload_id,
                "Initiated": self._multipart[upload_id].begun.strftime(_STAMP),
            }
            for name, upload_id in left[:limit]
        ]
        return _xml_response("ListMultipartUploadsResult", facts, "Upload", uploads)

    def _complete(self, call: Call, upload: GcsUpload, upload_id: str) -> StoreResponse:
        try:
            order = [
                (
                    int(part.findtext("{*}PartNumber") or ""),
                    (part.findtext("{*}ETag") or "").strip('"'),
                )
                for part in ET.fromstring(call.body).findall("{*}Part")
            ]
        except (ET.ParseError, ValueError):
            raise GcsError(400, "MalformedCompleteMultipartUploadRequest") from None
        numbers = [number for number, _ in order]
        if numbers != sorted(set(numbers)):
            raise GcsError(400, "InvalidPartOrder")
        for number, etag in order:
            if number not in upload.parts or upload.parts[number][1].strip('"') != etag:
                raise GcsError(400, "InvalidPart")
        pieces = [upload.parts[number][0] for number in numbers]
        if not pieces or any(len(piece) < PART_SIZE_BYTES_MIN for piece in pieces[:-1]):
            raise GcsError(400, "EntityTooSmall" if pieces else "InvalidPart")
        data = b"".join(pieces)
        stored = self._store(upload.bucket, upload.name, data, None, composed=True)
        del self._multipart[upload_id]
        return _xml_response(
            "CompleteMultipartUploadResult",
            {"Bucket": upload.bucket, "Key": upload.name, "ETag": stored.etag},
            headers={"x-goog-hash": f"crc32c={stored.crc32c}"},
        )

    # ------------------------------------------------------------ objects

    def _objects(self, bucket: str) -> dict[str, GcsObject]:
        if bucket not in self._buckets:
            raise GcsError(404, "NoSuchBucket")
        return self._buckets[bucket]

    def _find(self, bucket: str, name: str) -> GcsObject:
        found = self._objects(bucket).get(name)
        if found is None:
            raise GcsError(404, "NoSuchKey")
        return found

    def _delete(self, bucket: str, name: str) -> StoreResponse:
        if not self._may_delete:
            raise GcsError(403, "AccessDenied")
        del self._objects(bucket)[name]
        return StoreResponse(204)

    def _store(
        self, bucket: str, name: str, data: bytes, only_if: str | None, *, composed: bool = False
    ) -> GcsObject:
        objects = self._objects(bucket)
        current = objects[name].object_generation if name in objects else 0
        fails = only_if is not None and int(only_if) != current
        lacks_right = bool(current) and not self._may_delete
        if lacks_right and (self._asks_rights_first or not fails):
            raise GcsError(403, "AccessDenied")
        if fails:
            raise GcsError(412, "PreconditionFailed")
        self._object_generation += 1
        objects[name] = GcsObject(
            data, self._object_generation, checksum(data), None if composed else md5(data)
        )
        return objects[name]


def _verify(data: bytes, hashes: str | None) -> None:
    for item in filter(None, (hashes or "").split(",")):
        kind, _, value = item.strip().partition("=")
        if kind not in ("crc32c", "md5"):
            raise GcsError(400, "InvalidDigest")
        if value != (checksum(data) if kind == "crc32c" else md5(data)):
            raise GcsError(400, "BadDigest")


def _metadata(bucket: str, name: str, stored: GcsObject) -> dict[str, Any]:
    facts = {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(stored.data)),
        "generation": str(stored.object_generation),
        "metageneration": "1",
        "timeCreated": stored.created.strftime(_STAMP),
        "crc32c": stored.crc32c,
        "etag": stored.etag,
    }
    return facts if stored.md5 is None else {**facts, "md5Hash": stored.md5}


def _headers(stored: GcsObject) -> dict[str, str]:
    hashes = f"crc32c={stored.crc32c}" + (f",md5={stored.md5}" if stored.md5 else "")
    return {
        "ETag": stored.etag,
        "x-goog-generation": str(stored.object_generation),
        "x-goog-hash": hashes,
        "x-goog-stored-content-length": str(len(stored.data)),
    }


def _content(call: Call, stored: GcsObject) -> StoreResponse:
    headers = {**_headers(stored), "Content-Type": "application/octet-stream"}
    span = call.headers.get("range")
    if span is None:
        return StoreResponse(200, stored.data, headers)
    size_bytes = len(stored.data)
    first, _, last = span.removeprefix("bytes=").partition("-")
    try:
        start = int(first) if first else max(0, size_bytes - int(last))
        end = min(int(last), size_bytes - 1) if first and last else size_bytes - 1
    except ValueError:
        raise GcsError(400, "InvalidArgument") from None
    if start >= size_bytes or end < start:
        raise GcsError(416, "InvalidRange")
    headers["Content-Range"] = f"bytes {start}-{end}/{size_bytes}"
    return StoreResponse(206, stored.data[start : end + 1], headers)


def _selected(body: dict[str, Any], call: Call) -> dict[str, Any]:
    """The fields of the outermost object that the query selects."""
    fields = call.parameter("fields")
    if fields is None:
        return body
    wanted = {name.strip() for name in re.sub(r"\([^)]*\)", "", fields).split(",")}
    selected = {name: value for name, value in body.items() if name in wanted}
    of_items = re.search(r"items\(([^)]*)\)", fields)
    if of_items and "items" in selected:
        names = of_items[1].split(",")
        selected["items"] = [{name: item[name] for name in names} for item in selected["items"]]
    return selected


def _json_response(body: dict[str, Any], status: int = 200) -> StoreResponse:
    return StoreResponse(status, json.dumps(body).encode(), {"Content-Type": "application/json"})


def _xml_response(
    tag: str,
    values: dict[str, str],
    item_tag: str = "",
    items: Sequence[dict[str, str]] = (),
    headers: Mapping[str, str] | None = None,
) -> StoreResponse:
    root = ET.Element(tag, {"xmlns": "http://s3.amazonaws.com/doc/2006-03-01/"})
    for name, value in values.items():
        ET.SubElement(root, name).text = value
    for item in items:
        element = ET.SubElement(root, item_tag)
        for name, value in item.items():
            ET.SubElement(element, name).text = value
    return StoreResponse(
        200, ET.tostring(root), {"Content-Type": "application/xml", **(headers or {})}
    )
