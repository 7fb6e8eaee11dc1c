# SPDX-License-Identifier: Apache-2.0
"""A strict S3 in memory: ``python -m testkit.emulators.s3_strict --port 0 --bucket NAME [--tls PEM]``.

It verifies what S3 verifies and other emulators do not: signatures, clocks, payload hashes, checksums in
headers, and preconditions.  It refuses all other requests with 501.
Control: see :mod:`testkit.emulators.store_control`, and::

    credentials?access_key=test&secret_key=test&session_token=
                                accept only these credentials; earlier ones have expired, or do not
                                exist any more if they had no token
    expire                      expire the present credentials, too
    clock?ahead_s=3600          advance the store's clock
    region?name=eu-west-1       region of all buckets: requests signed for another one are redirected
    bucket?name=NAME&lock=1     create an empty bucket; with Object Lock, and so with versioning
    role?policy=JSON            give the caller this policy instead of an administrator's rights
"""

from __future__ import annotations

import argparse
import hashlib
import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from urllib.parse import quote, unquote

from testkit.emulators.s3_bucket import Retention, S3Bucket, S3Object, retention_in, retention_of
from testkit.emulators.s3_documents import (
    deletions,
    document,
    of_setting,
    result_of_deletions,
)
from testkit.emulators.s3_policy import action_of, context_of, expect_allowed, parsed
from testkit.emulators.s3_request import Payload, S3Account, S3Error, named_checksum, payload_of
from testkit.emulators.store_control import (
    Call,
    ListingMode,
    StoreControl,
    StoreResponse,
    error_response,
)
from testkit.emulators.store_server import add_arguments, serve

_DOMAIN = "localhost"
"""Parent domain of bucket names, for virtual-host addressing."""
_STAMP = "%Y-%m-%dT%H:%M:%S.000Z"
_PAGE = 1000
_KNOWN_QUERIES = {
    "GET": {
        "list-type",
        "prefix",
        "max-keys",
        "continuation-token",
        "encoding-type",
        "lifecycle",
        "location",
        "x-id",
        "delimiter",
        "fetch-owner",
        "start-after",
        "versioning",
        "object-lock",
        "policy",
        "retention",
    },
    "PUT": {
        "x-id",
        "lifecycle",
        "versioning",
        "object-lock",
        "policy",
        "retention",
    },
    "POST": {"delete", "uploads"},
    "DELETE": {"x-id"},
}
_SETTINGS = {"lifecycle", "versioning", "object-lock", "policy"}  # fmt: skip


class S3:
    """The store.  With one lock, every request is atomic."""

    def __init__(self, buckets: Iterable[str]) -> None:
        self._lock = threading.RLock()
        self._buckets = {name: S3Bucket() for name in buckets}
        self._reset()

    def _reset(self) -> None:
        self.account = S3Account()
        self._role: dict[str, Any] | None = None
        self._region = "us-east-1"
        self._page = _PAGE
        self._listing = ListingMode()
        self._honour = True

    # ------------------------------------------------------------ control

    def order(self, name: str, call: Call) -> bool:
        with self._lock:
            match name:
                case "clear":
                    self._reset()
                case "credentials":
                    access_key = call.parameter("access_key") or "test"
                    was_session = {self.account.access_key} if self.account.session_token else set()
                    self.account = S3Account(
                        access_key,
                        call.parameter("secret_key") or "test",
                        call.parameter("session_token") or "",
                        former=(self.account.former | was_session) - {access_key},
                    )
                case "expire":
                    self.account.is_expired = True
                case "clock":
                    self.account.clock_ahead_s = float(call.parameter("ahead_s") or 0)
                case "region":
                    self._region = call.parameter("name") or "us-east-1"
                case "preconditions":
                    self._honour = call.parameter("honour") != "0"
                case "page":
                    self._page = int(call.parameter("size") or _PAGE)
                case "listing":
                    self._listing = ListingMode.ordered(call)
                case "bucket":
                    made = S3Bucket()
                    if call.parameter("lock") == "1":
                        made.versioning, made.has_object_lock = "Enabled", True
                    self._buckets[call.parameter("name") or ""] = made
                case "role":
                    self._role = parsed(call.parameter("policy") or "")
                case _:
                    return False
        return True

    # ------------------------------------------------------------ requests

    def respond(self, call: Call) -> StoreResponse:
        try:
            # Hashing needs no lock, only the change of state does.
            region = self.account.verify(call)
            payload = payload_of(call)
            with self._lock:
                response = self._routed(call, payload, region)
        except S3Error as refused:
            response = error_response(refused.status, refused.code, refused.message)
            response = StoreResponse(
                response.status, response.body, {**response.headers, **refused.headers}
            )
        headers = {
            **response.headers,
            "Date": format_datetime(self._now(), usegmt=True),
            "x-amz-request-id": hashlib.md5(call.target.encode()).hexdigest(),
        }
        if call.method == "HEAD" and response.status >= 300:
            return StoreResponse(response.status, b"", headers)
        return StoreResponse(response.status, response.body, headers)

    def _routed(self, call: Call, payload: Payload, region: str) -> StoreResponse:
        name, key = _address(call)
        names = {pair.partition("=")[0] for pair in call.query.split("&") if pair}
        if unknown := names - _KNOWN_QUERIES.get(call.method, set()):
            raise S3Error(501, "NotImplemented", f"{call.method} with {sorted(unknown)}")
        bucket = self._buckets.get(name)
        if bucket is None:
            raise S3Error(404, "NoSuchBucket")
        if region != self._region:
            where = {"x_amz_bucket_region": self._region}
            raise S3Error(301, "PermanentRedirect", f"it is in {self._region}", **where)
        if "delete" in names:  # has the rights of each object
            return self._delete_many(call, name, bucket)
        self._expect_allowed(action_of(call, names, key), name, key, context_of(call, names))
        if not key:
            return self._of_bucket(call, payload, name, bucket, names)
        if "retention" in names:
            return self._of_retention(call, payload, bucket, key)
        return self._of_object(call, payload, name, bucket, key)

    def _expect_allowed(self, action: str, name: str, key: str, context: Mapping[str, str]) -> None:
        resource = f"arn:aws:s3:::{name}/{key}" if key else f"arn:aws:s3:::{name}"
        expect_allowed(self._role, self._buckets[name].policy, action, resource, context)

    def _now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.account.clock_ahead_s)

    def _new_retention(self, call: Call, name: str, bucket: S3Bucket, key: str) -> Retention | None:
        """The retention that a new object gets; setting one needs a right of its own."""
        found = retention_of(call.headers, self._now())
        if found is not None:
            self._expect_allowed("s3:PutObjectRetention", name, key, {})
            if not bucket.has_object_lock:
                raise S3Error(400, "InvalidRequest", "Bucket is missing Object Lock Configuration")
        return found

    def _of_bucket(
        self, call: Call, payload: Payload, name: str, bucket: S3Bucket, names: set[str]
    ) -> StoreResponse:
        if names & _SETTINGS:
            return of_setting(call.method, min(names & _SETTINGS), payload.data, bucket)
        objects = bucket.objects
        match call.method:
            case "HEAD":
                return StoreResponse(200, b"", {"x-amz-bucket-region": self._region})
            case "GET" if "location" in names:
                return StoreResponse(
                    200, f"<LocationConstraint>{self._region}</LocationConstraint>".encode()
                )
            case "GET" if call.parameter("list-type") == "2" and "delimiter" not in names:
                return self._list(call, name, objects)
            case "GET" if call.parameter("list-type") == "2" and "start-after" not in names:
                return self._list_folders(call, name, objects)
        raise S3Error(501, "NotImplemented")

    def _of_object(
        self, call: Call, payload: Payload, name: str, bucket: S3Bucket, key: str
    ) -> StoreResponse:
        match call.method:
            case "PUT":
                self._hold_to_preconditions(call, bucket.objects.get(key))
                retention = self._new_retention(call, name, bucket, key)
                if retention is not None and not _has_integrity(call):
                    raise S3Error(
                        400,
                        "InvalidRequest",
                        "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object "
                        "requests with Object Lock parameters",
                    )
                etag = f'"{hashlib.md5(payload.data).hexdigest()}"'
                made = S3Object(payload.data, etag, payload.checksum, retention=retention)
                bucket.store(key, made)
                return StoreResponse(200, b"", _headers(made, with_checksum=True))
            case "GET" | "HEAD":
                return _content(call, bucket.find(key))
            case "DELETE":
                self._delete(name, bucket, key, call.headers.get("if-match"))
                return StoreResponse(204)
        raise S3Error(405, "MethodNotAllowed")

    def _of_retention(
        self, call: Call, payload: Payload, bucket: S3Bucket, key: str
    ) -> StoreResponse:
        """GetObjectRetention and PutObjectRetention of AmazonS3/latest/API."""
        if call.method == "PUT":
            if "content-md5" not in call.headers and named_checksum(call.headers) is None:
                raise S3Error(400, "InvalidRequest", "Missing required header: Content-MD5")
            wanted = retention_in(payload.data, self._now())
            bucket.set_retention(key, wanted, self._now())
            return StoreResponse(200)
        if not bucket.has_object_lock:
            raise S3Error(400, "InvalidRequest", "Bucket is missing Object Lock Configuration")
        found = bucket.find(key).retention
        if found is None:
            raise S3Error(404, "NoSuchObjectLockConfiguration")
        until = found.until.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        return document("Retention", [("Mode", found.mode), ("RetainUntilDate", until)])

    def _delete(self, name: str, bucket: S3Bucket, key: str, match: str | None) -> None:
        """Delete an object, or raise S3Error; AmazonS3/latest/userguide/conditional-deletes.html."""
        if match is not None and self._honour:
            self._expect_allowed("s3:GetObject", name, key, {})
            current = bucket.find(key)
            if match not in ("*", current.etag, current.etag.strip('"')):
                raise S3Error(412, "PreconditionFailed")
        bucket.delete(key)

    def _delete_many(self, call: Call, name: str, bucket: S3Bucket) -> StoreResponse:
        """DeleteObjects: the body needs a checksum; AmazonS3/latest/API/API_DeleteObjects.html."""
        if "content-md5" not in call.headers and named_checksum(call.headers) is None:
            raise S3Error(400, "InvalidRequest", "Missing required header: Content-MD5")
        items, is_quiet = deletions(call.body)
        done = []
        for key, match in items:
            try:
                context = {} if match is None else {"s3:if-match": match}
                self._expect_allowed("s3:DeleteObject", name, key, context)
                self._delete(name, bucket, key, match)
            except S3Error as refused:
                done.append(("Error", {"Key": key, "Code": refused.code, "Message": refused.code}))
            else:
                if not is_quiet:
                    done.append(("Deleted", {"Key": key}))
        return result_of_deletions(done)

    def _hold_to_preconditions(self, call: Call, current: S3Object | None) -> None:
        if not self._honour:
            return
        absent, match = call.headers.get("if-none-match"), call.headers.get("if-match")
        if absent not in (None, "*"):
            raise S3Error(501, "NotImplemented", "If-None-Match must be *")
        if absent and current is not None:
            raise S3Error(412, "PreconditionFailed")
        if match is not None:
            if current is None:
                raise S3Error(404, "NoSuchKey")
            if match.strip('"') != current.etag.strip('"'):
                raise S3Error(412, "PreconditionFailed")

    # ------------------------------------------------------------ listings

    def _list(self, call: Call, bucket: str, objects: dict[str, S3Object]) -> StoreResponse:
        prefix = call.parameter("prefix") or ""
        start = call.parameter("start-after") or ""
        found = [key for key in objects if key.startswith(prefix) and key > start]
        keys, facts = self._page_of(call, bucket, found)
        is_encoded = call.parameter("encoding-type") == "url"
        items = [
            [
                ("Key", quote(key) if is_encoded else key),
                ("LastModified", objects[key].modified.strftime(_STAMP)),
                ("ETag", objects[key].etag),
                ("Size", str(len(objects[key].data))),
                ("StorageClass", "STANDARD"),
            ]
            for key in keys
        ]
        return document("ListBucketResult", facts, "Contents", items)

    def _list_folders(self, call: Call, bucket: str, objects: dict[str, S3Object]) -> StoreResponse:
        """The common prefixes; the objects between them are left out, and S3 would list them."""
        prefix, delimiter = call.parameter("prefix") or "", call.parameter("delimiter") or "/"
        below = [key.removeprefix(prefix) for key in objects if key.startswith(prefix)]
        found = {
            prefix + key.partition(delimiter)[0] + delimiter for key in below if delimiter in key
        }
        names, facts = self._page_of(call, bucket, sorted(found))
        is_encoded = call.parameter("encoding-type") == "url"
        items = [[("Prefix", quote(name) if is_encoded else name)] for name in names]
        return document("ListBucketResult", facts, "CommonPrefixes", items)

    def _page_of(
        self, call: Call, bucket: str, found: list[str]
    ) -> tuple[list[str], list[tuple[str, str]]]:
        """The names of a page of a listing, and the elements before them."""
        after: str | None = None
        token = call.parameter("continuation-token")
        if token is not None:
            try:
                after = bytes.fromhex(token).decode()
            except ValueError:
                raise S3Error(400, "InvalidArgument", "the continuation token") from None
        limit = min(int(call.parameter("max-keys") or _PAGE), self._page)
        names, last = self._listing.page(found, after, limit)
        facts = [
            ("Name", bucket),
            ("Prefix", call.parameter("prefix") or ""),
            ("KeyCount", str(len(names))),
            ("MaxKeys", str(limit)),
            ("IsTruncated", str(last is not None).lower()),
        ]
        if call.parameter("encoding-type") == "url":
            facts.append(("EncodingType", "url"))
        if last is not None:
            facts.append(("NextContinuationToken", last.encode().hex()))
        return names, facts


def _has_integrity(call: Call) -> bool:
    """Whether a request has the checksum that Object Lock requires."""
    names = ("content-md5", "x-amz-sdk-checksum-algorithm")
    return any(name in call.headers for name in names) or named_checksum(call.headers) is not None


def _address(call: Call) -> tuple[str, str]:
    """Bucket and key, from the host name or the path."""
    host = call.headers.get("host", "").partition(":")[0]
    path = unquote(call.path).removeprefix("/")
    if host.endswith(f".{_DOMAIN}"):
        return host.removesuffix(f".{_DOMAIN}"), path
    bucket, _, key = path.partition("/")
    return bucket, key


def _headers(stored: S3Object, *, with_checksum: bool) -> dict[str, str]:
    headers = {"ETag": stored.etag}
    if stored.checksum and with_checksum:
        headers[stored.checksum.header] = stored.checksum.value
        headers["x-amz-checksum-type"] = "FULL_OBJECT"
    return headers


def _content(call: Call, stored: S3Object) -> StoreResponse:
    span = call.headers.get("range")
    headers = {
        "Content-Type": "application/octet-stream",
        "Accept-Ranges": "bytes",
        "Last-Modified": stored.modified.strftime("%a, %d %b %Y %H:%M:%S GMT"),
        **_headers(
            stored,
            with_checksum=span is None and call.headers.get("x-amz-checksum-mode") == "ENABLED",
        ),
    }
    size_bytes = len(stored.data)
    status, start, end = 200, 0, size_bytes - 1
    if span is not None:
        first, _, last = span.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, size_bytes - int(last))
        end = min(int(last), size_bytes - 1) if first and last else size_bytes - 1
        if start >= size_bytes or end < start:
            raise S3Error(416, "InvalidRange", Content_Range=f"bytes */{size_bytes}")
        status = 206
        headers["Content-Range"] = f"bytes {start}-{end}/{size_bytes}"
    if call.method == "HEAD":
        return StoreResponse(status, b"", {**headers, "Content-Length": str(end + 1 - start)})
    whole = (start, end + 1) == (0, size_bytes)
    return StoreResponse(status, stored.data if whole else stored.data[start : end + 1], headers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    s3 = S3(options.bucket)
    serve(options, StoreControl(s3.respond, (), s3.order))


if __name__ == "__main__":
    main()
