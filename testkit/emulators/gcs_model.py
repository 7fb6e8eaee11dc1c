# SPDX-License-Identifier: Apache-2.0
"""Google Cloud Storage as a function from request to response; emulators/gcs_server.py serves it.

Retention follows cloud.google.com/storage/docs/object-lock: it protects an object from deletion and
replacement, but with versioning a delete still makes it noncurrent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from urllib.parse import parse_qs, unquote

import google_crc32c

from testkit.emulators.store_control import (
    Call,
    ListingMode,
    StoreResponse,
    error_response,
)

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
class GcsRetention:
    mode: str
    """``Unlocked`` or ``Locked``; the XML interface calls them GOVERNANCE and COMPLIANCE."""
    until: datetime


@dataclass(frozen=True)
class GcsObject:
    data: bytes
    object_generation: int
    crc32c: str
    md5: str
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    retention: GcsRetention | None = None

    @property
    def etag(self) -> str:
        return f'"{self.object_generation:x}"'


@dataclass
class GcsBucket:
    objects: dict[str, GcsObject] = field(default_factory=dict)
    has_retention: bool = False
    has_versions: bool = False
    lifecycle: dict[str, Any] = field(default_factory=dict)


def checksum(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


class Gcs:
    """The store.  With one lock, every request is atomic."""

    def __init__(self, buckets: list[str]) -> None:
        self._lock = threading.RLock()
        self._buckets = {name: GcsBucket() for name in buckets}
        self._object_generation = 1_700_000_000_000_000
        self._reset()

    def _reset(self) -> None:
        self._token: str | None = None
        self._page = _PAGE
        self._listing = ListingMode()
        self._may_delete = True
        self._asks_rights_first = False
        self._delete_below: tuple[str, ...] = ("",)
        self._may_set_retention = True
        self._may_read_settings = True
        self._ahead_s = 0.0

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
                    self._delete_below = tuple((call.parameter("delete_below") or "").split(","))
                    self._may_set_retention = call.parameter("retention") != "0"
                    self._may_read_settings = call.parameter("settings") != "0"
                case "clock":
                    self._ahead_s = float(call.parameter("ahead_s") or 0)
                case "bucket":
                    self._buckets[call.parameter("name") or ""] = GcsBucket(
                        has_retention=call.parameter("retention") == "1",
                        has_versions=call.parameter("versioning") == "1",
                    )
                case _:
                    return False
        return True

    def respond(self, call: Call) -> StoreResponse:
        response = self._response(call)
        date = format_datetime(self._now(), usegmt=True)
        return replace(response, headers={**response.headers, "Date": date})

    def _response(self, call: Call) -> StoreResponse:
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

    # ------------------------------------------------------------ JSON interface

    def _json(self, call: Call, segments: list[str]) -> StoreResponse:
        match call.method, segments[2:]:
            case "GET", ["b", bucket]:
                return _json_response(_selected(self._settings(unquote(bucket)), call))
            case "PATCH", ["b", bucket]:
                self._settings(unquote(bucket))
                body = json.loads(call.body)
                if body.keys() != {"lifecycle"}:
                    raise GcsError(501, "NotImplemented")
                self._buckets[unquote(bucket)].lifecycle = body["lifecycle"]
                return _json_response(self._settings(unquote(bucket)))
            case "GET", ["b", bucket, "iam", "testPermissions"]:
                return self._test_permissions(unquote(bucket), call)
            case "GET", ["b", bucket, "o"]:
                return self._list(unquote(bucket), call)
            case "GET", ["b", bucket, "o", name]:
                found = self._find(unquote(bucket), unquote(name))
                facts = _metadata(unquote(bucket), unquote(name), found)
                return _json_response(_selected(facts, call))
            case "PATCH", ["b", bucket, "o", name]:
                return self._patch(unquote(bucket), unquote(name), call)
            case "DELETE", ["b", bucket, "o", name]:
                found = self._find(unquote(bucket), unquote(name))
                # docs/json_api/v1/objects/delete: 412 if the condition is not met.
                if call.parameter("ifGenerationMatch", str(found.object_generation)) != str(
                    found.object_generation
                ):
                    raise GcsError(412, "conditionNotMet")
                return self._delete(unquote(bucket), unquote(name))
        raise GcsError(501, "NotImplemented")

    def _settings(self, bucket: str) -> dict[str, Any]:
        """The settings of a bucket: storage/docs/json_api/v1/buckets#resource."""
        self._objects(bucket)
        if not self._may_read_settings:
            raise GcsError(403, "caller does not have storage.buckets.get access")
        found = self._buckets[bucket]
        facts: dict[str, Any] = {"kind": "storage#bucket", "name": bucket}
        if found.has_versions:
            facts["versioning"] = {"enabled": True}
        if found.has_retention:
            facts["objectRetention"] = {"mode": "Enabled"}
        return facts | ({"lifecycle": found.lifecycle} if found.lifecycle else {})

    def _test_permissions(self, bucket: str, call: Call) -> StoreResponse:
        """Rights of the caller, without a right: storage/docs/json_api/v1/buckets/testIamPermissions."""
        self._objects(bucket)
        wanted = parse_qs(call.query).get("permissions", [])
        lacking = {
            # A right with a condition on the name is not one on the bucket.
            "storage.objects.delete": not self._may_delete or self._delete_below != ("",),
            "storage.objects.setRetention": not self._may_set_retention,
            "storage.buckets.get": not self._may_read_settings,
        }
        held = [name for name in wanted if not lacking.get(name, False)]
        body: dict[str, Any] = {"kind": "storage#testIamPermissionsResponse"}
        return _json_response(body | ({"permissions": held} if held else {}))

    def _patch(self, bucket: str, name: str, call: Call) -> StoreResponse:
        """Change the retention of an object: storage/docs/json_api/v1/objects/patch."""
        found = self._find(bucket, name)
        body = json.loads(call.body)
        if body.keys() != {"retention"}:
            raise GcsError(501, "NotImplemented")
        wanted = self._retention(
            bucket, body["retention"].get("mode"), body["retention"].get("retainUntilTime")
        )
        old = found.retention
        if old is not None and wanted is not None and old.until > self._now():
            is_locked = old.mode == "Locked"
            if wanted.until < old.until or (is_locked and wanted.mode != "Locked"):
                raise GcsError(403, "overrideUnlockedRetention is needed")
        self._buckets[bucket].objects[name] = replace(found, retention=wanted)
        return _json_response(_metadata(bucket, name, self._find(bucket, name)))

    def _retention(self, bucket: str, mode: str | None, until: str | None) -> GcsRetention | None:
        """The retention that a request sets, or GcsError."""
        if mode is None and until is None:
            return None
        modes = {"GOVERNANCE": "Unlocked", "COMPLIANCE": "Locked"}
        mode = modes.get(mode or "", mode)
        try:
            instant = datetime.fromisoformat(until or "")
        except ValueError:
            raise GcsError(400, "invalid") from None
        if mode not in modes.values() or instant <= self._now():
            raise GcsError(400, "invalid")
        if not self._buckets[bucket].has_retention:
            raise GcsError(400, "invalid")  # Google documents no code
        if not self._may_set_retention:
            raise GcsError(403, "caller does not have storage.objects.setRetention access")
        return GcsRetention(mode, instant)

    def _now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self._ahead_s)

    def _list(self, bucket: str, call: Call) -> StoreResponse:
        if call.parameter("versions") == "true":
            raise GcsError(501, "NotImplemented")
        objects = self._objects(bucket)
        prefix = call.parameter("prefix") or ""
        if delimiter := call.parameter("delimiter"):
            return self._list_folders(call, objects, prefix, delimiter)
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

    def _list_folders(
        self, call: Call, objects: Iterable[str], prefix: str, delimiter: str
    ) -> StoreResponse:
        """The common prefixes; the objects between them are left out, and GCS would list them."""
        below = [name.removeprefix(prefix) for name in objects if name.startswith(prefix)]
        found = {
            prefix + name.partition(delimiter)[0] + delimiter for name in below if delimiter in name
        }
        limit = min(int(call.parameter("maxResults") or _PAGE), self._page)
        names, last = self._listing.page(sorted(found), call.parameter("pageToken"), limit)
        response: dict[str, Any] = {"kind": "storage#objects"}
        if names:
            response["prefixes"] = names
        if last is not None:
            response["nextPageToken"] = last
        return _json_response(_selected(response, call))

    # ------------------------------------------------------------ XML interface

    def _xml(self, call: Call) -> StoreResponse:
        bucket, _, rest = call.path.lstrip("/").partition("/")
        name = unquote(rest)
        self._objects(bucket)
        if not name or call.query:
            raise GcsError(501, "NotImplemented")
        match call.method:
            case "GET" | "HEAD":
                return _content(call, self._find(bucket, name))
            case "PUT":
                _verify(call.body, call.headers.get("x-goog-hash"))
                only_if = call.headers.get(_CONDITION)
                retention = self._new_retention(call, bucket)
                stored = self._store(bucket, name, call.body, only_if, retention)
                return StoreResponse(200, b"", _headers(stored))
            case "DELETE":
                self._find(bucket, name)
                return self._delete(bucket, name)
        raise GcsError(501, "NotImplemented")

    def _new_retention(self, call: Call, bucket: str) -> GcsRetention | None:
        """The retention of a new object: storage/docs/xml-api/reference-headers."""
        mode = call.headers.get("x-goog-object-lock-mode")
        if mode not in (None, "GOVERNANCE", "COMPLIANCE"):
            raise GcsError(400, "InvalidArgument")
        until = call.headers.get("x-goog-object-lock-retain-until-date")
        return self._retention(bucket, mode, until)

    # ------------------------------------------------------------ objects

    def _objects(self, bucket: str) -> dict[str, GcsObject]:
        if bucket not in self._buckets:
            raise GcsError(404, "NoSuchBucket")
        return self._buckets[bucket].objects

    def _find(self, bucket: str, name: str) -> GcsObject:
        found = self._objects(bucket).get(name)
        if found is None:
            raise GcsError(404, "NoSuchKey")
        return found

    def _delete(self, bucket: str, name: str) -> StoreResponse:
        if not self._may_delete_object(name):
            raise GcsError(403, "AccessDenied")
        held = self._objects(bucket)[name].retention
        is_locked = held is not None and held.until > self._now()
        if is_locked and not self._buckets[bucket].has_versions:
            raise GcsError(403, "retentionPolicyNotMet")
        del self._objects(bucket)[name]
        return StoreResponse(204)

    def _may_delete_object(self, name: str) -> bool:
        return self._may_delete and name.startswith(self._delete_below)

    def _store(
        self,
        bucket: str,
        name: str,
        data: bytes,
        only_if: str | None,
        retention: GcsRetention | None,
    ) -> GcsObject:
        objects = self._objects(bucket)
        current = objects[name].object_generation if name in objects else 0
        fails = only_if is not None and int(only_if) != current
        lacks_right = bool(current) and not self._may_delete_object(name)
        if lacks_right and (self._asks_rights_first or not fails):
            raise GcsError(403, "AccessDenied")
        if fails:
            raise GcsError(412, "PreconditionFailed")
        if current and not self._buckets[bucket].has_versions:
            held = objects[name].retention
            if held is not None and held.until > self._now():
                raise GcsError(403, "retentionPolicyNotMet")
        self._object_generation += 1
        objects[name] = GcsObject(
            data,
            self._object_generation,
            checksum(data),
            md5(data),
            retention=retention,
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
    facts: dict[str, Any] = {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(stored.data)),
        "generation": str(stored.object_generation),
        "metageneration": "1",
        "timeCreated": stored.created.strftime(_STAMP),
        "crc32c": stored.crc32c,
        "etag": stored.etag,
        "md5Hash": stored.md5,
    }
    if stored.retention is not None:
        until = stored.retention.until.isoformat().replace("+00:00", "Z")
        facts["retention"] = {"mode": stored.retention.mode, "retainUntilTime": until}
    return facts


def _headers(stored: GcsObject) -> dict[str, str]:
    return {
        "ETag": stored.etag,
        "x-goog-generation": str(stored.object_generation),
        "x-goog-hash": f"crc32c={stored.crc32c},md5={stored.md5}",
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
        selected["items"] = [
            {name: item[name] for name in names if name in item} for item in selected["items"]
        ]
    return selected


def _json_response(body: dict[str, Any], status: int = 200) -> StoreResponse:
    return StoreResponse(status, json.dumps(body).encode(), {"Content-Type": "application/json"})
