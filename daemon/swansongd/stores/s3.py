# SPDX-License-Identifier: Apache-2.0
"""S3 and what speaks its protocol.  The only module that imports boto3, when a client is first needed.

Single client calls, no transfer manager and no retries of botocore's: attempts, waiting and deadlines
belong to the caller.  Every write carries a CRC32C that the store verifies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from urllib3.exceptions import HTTPError

from swansongd.errors import Exists, NotFound, Permanent, StoreError, Transient
from swansongd.stores.base import (
    GET_BYTES_MAX,
    ObjectInfo,
    PartReceipt,
    Upload,
    bucket_and_prefix,
    expect_all_parts,
    expect_part,
    is_certificate_problem,
    settle_completion,
)
from swansongd.stores.checksums import crc32c

_WINDOW_BYTES = 2**20

# Refusals with a status of 400 that are about this one attempt, not about what was asked.
_TRANSIENT_CODES = {
    "RequestTimeout", "IncompleteBody", "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch", "SlowDown", "Throttling", "ThrottlingException", "InternalError",
}  # fmt: skip
_CREDENTIALS = (
    "Give the VM an instance role for the bucket, or put credentials where boto3 looks for them"
)
_REGION = "Set store.region to the region of the bucket"
_HINTS = {
    "NoSuchBucket": "Make the bucket, or mend store.url",
    "RequestTimeTooSkewed": "The clock of this VM is wrong: mend time synchronisation",
    "AccessDenied": "Allow s3:ListBucket, GetObject, PutObject and AbortMultipartUpload on store.url",
    "403": "Allow s3:ListBucket, GetObject, PutObject and AbortMultipartUpload on store.url",
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
}


class S3Store:
    """A bucket, or a prefix in one.

    Args:
        url: ``s3://bucket/prefix``.
        endpoint: of an S3-compatible store or a VPC endpoint; addressed path-style.
        region: of the bucket; without it boto3's own configuration and the store's redirect decide.
        connections: how many threads will call at once.
        connect_timeout_s: limit of making a connection, and of one stalled write.
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
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 8.0,
    ) -> None:
        self.url = url
        self._bucket, self._prefix = bucket_and_prefix(url)
        self._endpoint = endpoint
        self._region = region
        self._connections = connections
        self._timeouts_s = (connect_timeout_s, read_timeout_s)
        self._lock = threading.Lock()
        self._made_client: Any = None
        self._credentials: Any = None

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        view = memoryview(data).cast("B")
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        self._call(
            "put_object",
            key,
            Body=_PartBody(view),
            ContentLength=view.nbytes,
            ChecksumCRC32C=crc32c(view),
            **condition,
        )

    def get(self, key: str) -> bytes:
        answer = self._call("get_object", key)
        size_bytes = int(answer["ContentLength"])
        if size_bytes > GET_BYTES_MAX:
            answer["Body"].close()
            raise Permanent(f"get {key}: {size_bytes} bytes are more than {GET_BYTES_MAX}")
        data = bytearray(size_bytes)
        self._receive(answer["Body"], memoryview(data), key)
        return bytes(data)

    def get_range(self, key: str, offset: int, into: memoryview) -> None:
        if not into.nbytes:
            return
        answer = self._call("get_object", key, Range=f"bytes={offset}-{offset + into.nbytes - 1}")
        wanted = f"bytes {offset}-{offset + into.nbytes - 1}/"
        if not str(answer.get("ContentRange", "")).startswith(wanted):
            answer["Body"].close()
            raise Permanent(
                f"get {key}: {into.nbytes} bytes from {offset} are not within the object"
            )
        self._receive(answer["Body"], into.cast("B"), key)

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

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        answer = self._call("create_multipart_upload", key, ChecksumAlgorithm="CRC32C")
        return Upload(key, answer["UploadId"], size_bytes, part_size_bytes)

    def put_part(self, upload: Upload, number: int, data: memoryview) -> PartReceipt:
        expect_part(upload, number, data)
        checksum = crc32c(data)
        answer = self._call(
            "upload_part",
            upload.key,
            UploadId=upload.upload_id,
            PartNumber=number,
            Body=_PartBody(data),
            ContentLength=data.nbytes,
            ChecksumCRC32C=checksum,
        )
        # Completion must name the checksums again: the receipt carries both.
        return PartReceipt(number, f"{answer['ETag']} {checksum}")

    def complete(self, upload: Upload, parts: Sequence[PartReceipt]) -> None:
        expect_all_parts(upload, parts)
        listed = []
        for part in parts:
            etag, _, checksum = part.etag.partition(" ")
            listed.append({"PartNumber": part.number, "ETag": etag, "ChecksumCRC32C": checksum})
        try:
            self._call(
                "complete_multipart_upload",
                upload.key,
                UploadId=upload.upload_id,
                MultipartUpload={"Parts": listed},
                MpuObjectSize=upload.size_bytes,
            )
        except NotFound as unknown:
            settle_completion(self, upload, unknown)

    def abort(self, upload: Upload) -> None:
        with suppress(NotFound):
            self._call("abort_multipart_upload", upload.key, UploadId=upload.upload_id)

    def check(self) -> None:
        self._call("list_objects_v2", Prefix=self._prefix, MaxKeys=1)

    def warm(self) -> None:
        self.renew_credentials()
        self.check()

    def renew_credentials(self) -> None:
        """Have credentials that last for a while; raises Permanent where there are none."""
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415

        try:
            self._client()
            self._credentials.renew()
        except (BotoCoreError, OSError, RuntimeError) as error:
            raise _classified(error, f"credentials for {self.url}") from error

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

    # ------------------------------------------------------------ the client

    def _client(self) -> Any:
        import boto3  # noqa: PLC0415 - a VM on another cloud need not load it
        import botocore.session  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        with self._lock:
            if self._made_client is None:
                base = botocore.session.get_session()
                found = base.get_component("credential_provider").load_credentials()
                if found is None:
                    # Not kept: the metadata service may answer the next time.
                    raise Permanent("no credentials for S3", hint=_CREDENTIALS)
                self._credentials = _held(found)
                base.register_component("credential_provider", _Holder(self._credentials))
                session = boto3.Session(botocore_session=base, region_name=self._region)
                s3: Any = {"addressing_style": "path" if self._endpoint else "auto"}
                if not (self._endpoint or "https:").startswith("http:"):
                    # TLS and our checksum protect the body; signing it would read every part twice.
                    s3["payload_signing_enabled"] = False
                self._made_client = session.client(
                    "s3",
                    endpoint_url=self._endpoint,
                    config=Config(
                        signature_version="s3v4",
                        max_pool_connections=self._connections + 4,
                        connect_timeout=self._timeouts_s[0],
                        read_timeout=self._timeouts_s[1],
                        tcp_keepalive=True,
                        retries={"mode": "standard", "total_max_attempts": 1},
                        request_checksum_calculation="when_required",
                        response_checksum_validation="when_required",
                        s3=s3,
                    ),
                )
            return self._made_client

    def _call(self, operation: str, key: str | None = None, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
        from botocore.parsers import ResponseParserError  # noqa: PLC0415

        if key is not None:
            arguments["Key"] = self._prefix + key
        try:
            return getattr(self._client(), operation)(Bucket=self._bucket, **arguments)
        except (ClientError, BotoCoreError, ResponseParserError, HTTPError, OSError) as error:
            what = operation.replace("_", " ") + (f" {key}" if key is not None else "")
            raise _classified(error, f"{what} in {self.url}") from error

    def _receive(self, body: Any, into: memoryview, key: str) -> None:
        """Fill ``into`` from an answer's body, whose length is known to be the same."""
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415

        done = 0
        try:
            while done < into.nbytes:
                count = body.readinto(into[done : done + _WINDOW_BYTES])
                if not count:
                    raise Transient(f"get {key}: the answer ended early")
                done += count
        except (BotoCoreError, HTTPError, OSError) as error:
            raise _classified(error, f"get {key}") from error
        finally:
            body.close()


def _classified(error: Exception, what: str) -> StoreError:
    """The error of the contract for one of botocore's, by its code or its type."""
    from botocore import exceptions as of  # noqa: PLC0415
    from botocore.parsers import ResponseParserError  # noqa: PLC0415

    message = f"{what}: {error!s:.300}"
    if isinstance(error, of.ClientError):
        answer = error.response
        code = str(answer.get("Error", {}).get("Code", ""))
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        hint = _HINTS.get(code, "")
        message = f"{what}: {status} {code}: {answer.get('Error', {}).get('Message', ''):.200}"
        if status == 404 or code in ("NoSuchBucket", "NoSuchKey", "NoSuchUpload"):
            return NotFound(message, hint=hint)
        if status == 412 or code == "PreconditionFailed":
            return Exists(message)
        if code in _TRANSIENT_CODES or status in (408, 409, 429) or status >= 500:
            return Transient(message, hint=hint)
        return Permanent(message, hint=hint)
    if is_certificate_problem(error):
        return Permanent(message, hint="The store's certificate is not trusted on this VM")
    network = (
        of.HTTPClientError, of.ConnectionError, of.IncompleteReadError, ResponseParserError,
        of.MetadataRetrievalError, HTTPError, OSError,
    )  # fmt: skip
    if isinstance(error, network):
        return Transient(message)
    if isinstance(
        error, (of.NoCredentialsError, of.PartialCredentialsError, of.CredentialRetrievalError)
    ):
        return Permanent(message, hint=_CREDENTIALS)
    return Permanent(message)


def _held(inner: Any) -> Any:
    """The same credentials, asked for anew only by ``renew`` or once they have expired.

    botocore's own ask the metadata service a quarter of an hour before that, in the middle of a
    request, and fail with it; but it may be dead by then, and the credentials are good.
    """
    from botocore.credentials import Credentials  # noqa: PLC0415

    class Held(Credentials):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__("", "")
            self._frozen: Any = None
            self._renewing = threading.Lock()

        def renew(self) -> None:
            """Fetch new ones where less than 15 minutes are left: that is botocore's own rule."""
            with self._renewing:
                self._frozen = inner.get_frozen_credentials()

        def get_frozen_credentials(self) -> Any:
            if self._frozen is None or self._has_expired():
                self.renew()
            return self._frozen

        def _has_expired(self) -> bool:
            refresh_needed = getattr(inner, "refresh_needed", None)
            return refresh_needed is not None and bool(refresh_needed(refresh_in=0))

    return Held()


class _Holder:
    """Hands botocore the credentials that are to be used."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def load_credentials(self) -> Any:
        return self._credentials


def _rule_prefix(rule: dict[str, Any]) -> str:
    """Prefix of the keys that a lifecycle rule is for; an older form has it outside of the filter."""
    return str(rule.get("Filter", rule).get("Prefix", ""))


class _PartBody:
    """A body as the file that botocore wants, without a copy.

    ``read`` hands out more than it is asked for: http.client asks for 16 KiB at a time, and a call and
    a TLS record each for so little costs more than the sending.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data.cast("B")
        self._position = 0

    def __len__(self) -> int:
        return self._data.nbytes

    def read(self, size: int = -1) -> memoryview:
        count = self._data.nbytes if size < 0 else max(size, _WINDOW_BYTES)
        piece = self._data[self._position : self._position + count]
        self._position += piece.nbytes
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        start = (0, self._position, self._data.nbytes)[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position
