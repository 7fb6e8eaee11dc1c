# SPDX-License-Identifier: Apache-2.0
"""S3 and what speaks its protocol: the contract in terms of its requests.

Bytes of shards go over the wire, control calls through boto3; neither tries anything twice: attempts,
waiting and deadlines belong to the caller.  Every write carries a CRC32C that the store verifies, and
the completion of an upload that of the whole object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from urllib3.exceptions import HTTPError

from swansongd.errors import Exists, NotFound, Permanent, TooLarge, Transient
from swansongd.stores.base import (
    GET_BYTES_MAX,
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
from swansongd.stores.checksums import (
    crc32c,
    crc32c_base64,
    crc32c_from_base64,
    crc32c_of_parts,
)
from swansongd.stores.s3_access import Addressing, S3Access, classified
from swansongd.stores.sigv4 import (
    EMPTY_PAYLOAD,
    UNSIGNED_PAYLOAD,
    UNSIGNED_TRAILER,
    encoded_path,
    encoded_query,
    signed_headers,
)
from swansongd.stores.wire import Answer

Checksums = Literal["trailer", "header"]

_CHECKSUM = "x-amz-checksum-crc32c"


class S3Store:
    """A bucket, or a prefix in one.

    Args:
        url: ``s3://bucket/prefix``.
        endpoint: of an S3-compatible store or a VPC endpoint.
        region: of the bucket; without it boto3's own configuration and the store's redirect decide.
        connections: how many threads will call at once.
        profile: of the AWS configuration files; without it the default chain decides.
        ca_bundle: certificates to trust; without it AWS_CA_BUNDLE, or the system's.
        addressing: where the bucket is named; ``auto`` is ``path`` with an endpoint, else AWS's own way.
        checksums: ``trailer`` sends the checksum behind the body, which is then read once;
            ``header`` before it, for stores that know no trailers, and always without TLS.
        connect_timeout_s: limit of making a connection.
        read_timeout_s: limit of one wait for an answer.
    """

    part_size_bytes_min = 5 * 2**20

    def __init__(
        self,
        url: str,
        endpoint: str | None = None,
        region: str | None = None,
        connections: int = 16,
        *,
        profile: str | None = None,
        ca_bundle: str | None = None,
        addressing: Addressing = "auto",
        checksums: Checksums = "trailer",
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 8.0,
    ) -> None:
        self.url = url
        bucket, self._prefix = bucket_and_prefix(url)
        self._checksums = checksums
        self._access = S3Access(
            bucket,
            endpoint=endpoint,
            region=region,
            connections=connections,
            profile=profile,
            ca_bundle=ca_bundle,
            addressing=addressing,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
        )

    # ------------------------------------------------------------ small objects

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        checksum = crc32c_base64(crc32c(data))
        self._call("put_object", key, Body=bytes(data), ChecksumCRC32C=checksum, **condition)

    def get(self, key: str) -> bytes:
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415

        answer = self._call("get_object", key)
        with answer["Body"] as body:
            size_bytes = int(answer["ContentLength"])
            if size_bytes > GET_BYTES_MAX:
                raise TooLarge(f"get {key}: {size_bytes} bytes are more than {GET_BYTES_MAX}")
            try:
                data: bytes = body.read()
            except (BotoCoreError, HTTPError, OSError) as error:
                raise classified(error, f"get {key}") from error
        if len(data) != size_bytes:
            raise Transient(f"get {key}: the answer ended early")
        return data

    def head(self, key: str) -> ObjectInfo | None:
        try:
            answer = self._call("head_object", key)
        except NotFound:
            # A HEAD says "404" and no more: ask whether it was the bucket that is missing.
            self._call("list_objects_v2", Prefix=self._prefix + key, MaxKeys=1)
            return None
        return ObjectInfo(key, int(answer["ContentLength"]))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        token: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=self._prefix + prefix, **token)
            for item in page.get("Contents", ()):
                yield ObjectInfo(item["Key"].removeprefix(self._prefix), int(item["Size"]))
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        self._call("delete_object", key)

    # ------------------------------------------------------------ shards

    def put_shard(self, key: str, body: Body) -> int:
        what = f"put {key}"
        try:
            return self._send(what, key, {}, body, condition={"if-none-match": "*"}).crc32c
        except Exists:
            # Keys are not used twice: it is ours, carried out unheard, if it holds the same bytes.
            value, _ = read_through(body)
            is_ours = self._holds(key, body.size_bytes, value)
            if is_ours is None:
                return self._send(what, key, {}, body).crc32c
            if not is_ours:
                raise
            return value

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if not size_bytes:
            return
        what = f"get {key}"
        span = f"{offset}-{offset + size_bytes - 1}"
        answer = self._exchange(what, "GET", key, {}, {"range": f"bytes={span}"}, sink=sink)
        range_ = answer.headers.get("content-range", "")
        if not range_.startswith(f"bytes {span}/"):  # some answer 200 with it
            raise Permanent(f"{what}: {size_bytes} bytes from {offset} are not within the object")

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        answer = self._call(
            "create_multipart_upload", key, ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT"
        )
        return Upload(key, answer["UploadId"], size_bytes, part_size_bytes)

    def put_part(self, upload: Upload, number: int, body: Body) -> PartReceipt:
        expect_part(upload, number, body)
        what = f"part {number} of {upload.key}"
        parameters = {"partNumber": str(number), "uploadId": upload.upload_id}
        answer = self._send(what, upload.key, parameters, body)
        return PartReceipt(number, answer.headers["etag"], answer.crc32c)

    def parts(self, upload: Upload) -> Sequence[PartReceipt]:
        found = []
        marker: dict[str, int] = {}
        while True:
            page = self._call("list_parts", upload.key, UploadId=upload.upload_id, **marker)
            for part in page.get("Parts", ()):
                with suppress(KeyError, ValueError):
                    value = crc32c_from_base64(part["ChecksumCRC32C"])
                    found.append(PartReceipt(int(part["PartNumber"]), part["ETag"], value))
            if not page.get("IsTruncated"):
                return found
            marker = {"PartNumberMarker": int(page["NextPartNumberMarker"])}

    def complete(self, upload: Upload, parts: Sequence[PartReceipt]) -> None:
        expect_all_parts(upload, parts)
        sizes = [(part.crc32c, upload.part_length_bytes(part.number)) for part in parts]
        whole = crc32c_of_parts(sizes)
        listed = [
            {
                "PartNumber": part.number,
                "ETag": part.etag,
                "ChecksumCRC32C": crc32c_base64(part.crc32c),
            }
            for part in parts
        ]
        try:
            self._call(
                "complete_multipart_upload",
                upload.key,
                UploadId=upload.upload_id,
                MultipartUpload={"Parts": listed},
                MpuObjectSize=upload.size_bytes,
                ChecksumType="FULL_OBJECT",
                ChecksumCRC32C=crc32c_base64(whole),
            )
        except NotFound:
            # Was an earlier completion carried out, unheard?
            if self._holds(upload.key, upload.size_bytes, whole) is False:
                raise

    def uploads(self, prefix: str) -> Iterator[OpenUpload]:
        marker: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Prefix=self._prefix + prefix, **marker)
            now = _date_of(page)
            for item in page.get("Uploads", ()):
                key = item["Key"].removeprefix(self._prefix)
                age_s = max(0.0, (now - item["Initiated"]).total_seconds())
                yield OpenUpload(key, item["UploadId"], age_s)
            if not page.get("IsTruncated"):
                return
            marker = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def abort(self, key: str, upload_id: str) -> None:
        with suppress(NotFound):
            self._call("abort_multipart_upload", key, UploadId=upload_id)

    # ------------------------------------------------------------ the bucket

    def check(self) -> None:
        self._call("list_objects_v2", Prefix=self._prefix, MaxKeys=1)

    def warm(self) -> None:
        self.renew_credentials()
        self._access.route()
        self.check()

    def renew_credentials(self) -> None:
        """Have credentials that last for a while; raises Permanent where there are none."""
        self._access.renew_credentials()

    def aborts_incomplete_uploads(self) -> bool:
        """Whether a rule of the bucket ends what interrupted uploads leave behind; for doctor."""
        try:
            answer = self._call("get_bucket_lifecycle_configuration")
        except NotFound:
            return False
        return any(
            "AbortIncompleteMultipartUpload" in rule
            and rule.get("Status") == "Enabled"
            and self._prefix.startswith(_rule_prefix(rule))
            for rule in answer.get("Rules", ())
        )

    # ------------------------------------------------------------ requests

    def _call(self, operation: str, key: str | None = None, **arguments: Any) -> Any:
        what = operation.replace("_", " ") + (f" {key}" if key is not None else "")
        if key is not None:
            arguments["Key"] = self._prefix + key
        return self._access.call(operation, f"{what} in {self.url}", **arguments)

    def _holds(self, key: str, size_bytes: int, value: int) -> bool | None:
        """Whether the store has an object of this name, size and CRC32C.

        None when it has one of the size, and does not tell the checksum of the whole.
        """
        try:
            answer = self._call("head_object", key, ChecksumMode="ENABLED")
        except NotFound:
            return False
        if int(answer["ContentLength"]) != size_bytes:
            return False
        told = answer.get("ChecksumCRC32C", "-")  # one with a dash is made of those of the parts
        return None if "-" in told else bool(told == crc32c_base64(value))

    def _send(
        self,
        what: str,
        key: str,
        parameters: Mapping[str, str],
        body: Body,
        *,
        condition: Mapping[str, str] | None = None,
    ) -> Answer:
        """PUT ``body``, with a checksum that the store verifies, and look at what it says it got."""
        is_tls = self._access.route().is_tls
        if is_tls and self._checksums == "trailer":
            headers = {
                "content-encoding": "aws-chunked",
                "x-amz-decoded-content-length": str(body.size_bytes),
                "x-amz-trailer": _CHECKSUM,
            }
            payload, trailer = UNSIGNED_TRAILER, _CHECKSUM
        else:
            value, sha256 = read_through(body, with_sha256=not is_tls)
            headers = {_CHECKSUM: crc32c_base64(value)}
            payload, trailer = sha256 or UNSIGNED_PAYLOAD, None
        headers.update(condition or {})
        answer = self._exchange(
            what, "PUT", key, parameters, headers, payload=payload, body=body, trailer=trailer
        )
        if not answer.headers.get("etag"):
            raise Transient(f"{what}: the store took it without a word")
        if answer.headers.get(_CHECKSUM, sent := crc32c_base64(answer.crc32c)) != sent:
            raise Transient(f"{what}: the store has other bytes than were sent")
        return answer

    def _exchange(
        self,
        what: str,
        method: str,
        key: str,
        parameters: Mapping[str, str],
        headers: Mapping[str, str],
        *,
        payload: str = EMPTY_PAYLOAD,
        body: Body | None = None,
        trailer: str | None = None,
        sink: Sink | None = None,
    ) -> Answer:
        """One signed request over the wire; raises unless the answer is 200 or 206."""
        route, identity = self._access.route(), self._access.identity()
        path = f"{route.base_path}/{encoded_path(self._prefix + key)}"
        query = encoded_query(parameters)
        signed = signed_headers(
            method,
            route.wire.host,
            path,
            query,
            headers,
            payload=payload,
            identity=identity,
            region=route.region,
            now=datetime.now(UTC),
        )
        target = f"{path}?{query}" if query else path
        answer = route.wire.request(method, target, signed, body=body, trailer=trailer, sink=sink)
        if answer.status not in (200, 206):
            raise self._access.refusal(answer, f"{what} in {self.url}", route, identity)
        return answer


def _date_of(page: Mapping[str, Any]) -> datetime:
    """The store's own time."""
    try:
        return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
    except (KeyError, ValueError):
        return datetime.now(UTC)


def _rule_prefix(rule: dict[str, Any]) -> str:
    """Prefix of the keys that a lifecycle rule is for; an older form has it outside of the filter."""
    return str(rule.get("Filter", rule).get("Prefix", ""))
