# SPDX-License-Identifier: Apache-2.0
"""Google Cloud Storage.  The only module that imports Google's libraries, when one is first needed.

Listing, metadata and creating small objects go through google-cloud-storage; reads and multipart
uploads, which carry the data, through the store's XML interface.  The library's own retries and its
transfer manager stay unused: attempts, waiting and deadlines belong to the caller.  Google numbers
the versions of an object and calls that a generation too; here that is an *object generation*.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema
from urllib3.exceptions import HTTPError

from swansongd.errors import Exists, NotFound, Permanent, StoreError, Transient
from swansongd.stores.base import (
    GET_BYTES_MAX,
    RENEW_BELOW_S,
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

_PUBLIC_ENDPOINT = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_WINDOW_BYTES = 2**20

_CREDENTIALS = (
    "Give the VM a service account with the storage scope, or set application default credentials"
)
_HINTS = {
    401: _CREDENTIALS,
    403: "Grant roles/storage.objectUser on the bucket to the VM's service account",
    404: "If it is the bucket that is missing: make it, or mend store.url",
}


class GcsStore:
    """A bucket, or a prefix in one.

    Args:
        url: ``gs://bucket/prefix``.
        endpoint: of an emulator or a private endpoint.  No token is ever sent over plain http, and an
            https endpoint is used anonymously when there are no default credentials.
        connections: how many threads will call at once; each has connections of its own.
        connect_timeout_s: limit of making a connection, and of one stalled write.
        read_timeout_s: limit of one wait for an answer.
    """

    part_size_bytes_min = 5 * 2**20

    def __init__(
        self,
        url: str,
        endpoint: str | None = None,
        connections: int = 16,
        *,
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 8.0,
    ) -> None:
        self.url = url
        self._bucket, self._prefix = bucket_and_prefix(url)
        self._is_custom = endpoint is not None
        self._endpoint = (endpoint or _PUBLIC_ENDPOINT).rstrip("/")
        self._connections = connections
        self._timeout_s = (connect_timeout_s, read_timeout_s)
        self._lock = threading.Lock()
        self._made_credentials: Any = None
        self._local = threading.local()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        with self._errors_of(f"put {key}"):
            self._channel().bucket.blob(self._prefix + key).upload_from_string(
                bytes(data),
                content_type="application/octet-stream",
                if_generation_match=0 if if_absent else None,
                checksum="crc32c",
                **self._once,
            )

    def get(self, key: str) -> bytes:
        with self._errors_of(f"get {key}"), self._xml("GET", key) as answer:
            size_bytes = int(answer.headers.get("Content-Length", "-1"))
            if not 0 <= size_bytes <= GET_BYTES_MAX:
                raise Permanent(f"{size_bytes} bytes are not within {GET_BYTES_MAX}")
            data = bytearray(size_bytes)
            _receive(answer, memoryview(data))
        return bytes(data)

    def get_range(self, key: str, offset: int, into: memoryview) -> None:
        if not into.nbytes:
            return
        span = f"{offset}-{offset + into.nbytes - 1}"
        with (
            self._errors_of(f"get {key}"),
            self._xml("GET", key, headers={"Range": f"bytes={span}"}) as answer,
        ):
            if not answer.headers.get("Content-Range", "").startswith(f"bytes {span}/"):
                raise Permanent(f"bytes {span} are not within the object")
            _receive(answer, into.cast("B"))

    def head(self, key: str) -> ObjectInfo | None:
        with self._errors_of(f"head {key}"):
            blob = self._channel().bucket.get_blob(self._prefix + key, **self._once)
        if blob is None:
            # The same 404 for object and bucket: ask whether it was the bucket that is missing.
            self._list_page(self._prefix + key, page_size=1)
            return None
        return ObjectInfo(key, int(blob.size))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        token: str | None = None
        while True:
            blobs, token = self._list_page(self._prefix + prefix, page_token=token)
            for blob in blobs:
                yield ObjectInfo(blob.name.removeprefix(self._prefix), int(blob.size))
            if not token:
                return

    def delete(self, key: str) -> None:
        with suppress(NotFound), self._errors_of(f"delete {key}"):
            self._channel().bucket.blob(self._prefix + key).delete(**self._once)

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        with self._errors_of(f"begin {key}"), self._xml("POST", key, query="uploads") as answer:
            upload_id = _parse(answer, "InitiateMultipartUploadResult").findtext("{*}UploadId")
            if not upload_id:
                raise Transient("the answer names no upload")
        return Upload(key, upload_id, size_bytes, part_size_bytes)

    def put_part(self, upload: Upload, number: int, data: memoryview) -> PartReceipt:
        expect_part(upload, number, data)
        query = f"partNumber={number}&uploadId={quote(upload.upload_id, safe='')}"
        headers = {"x-goog-hash": f"crc32c={crc32c(data)}"}
        with (
            self._errors_of(f"part {number} of {upload.key}"),
            self._xml("PUT", upload.key, query=query, headers=headers, body=data) as answer,
        ):
            return PartReceipt(number, answer.headers["ETag"])

    def complete(self, upload: Upload, parts: Sequence[PartReceipt]) -> None:
        expect_all_parts(upload, parts)
        order = ET.Element("CompleteMultipartUpload")
        for part in parts:
            item = ET.SubElement(order, "Part")
            ET.SubElement(item, "PartNumber").text = str(part.number)
            ET.SubElement(item, "ETag").text = part.etag
        query = f"uploadId={quote(upload.upload_id, safe='')}"
        body = memoryview(ET.tostring(order))
        try:
            with (
                self._errors_of(f"complete {upload.key}"),
                self._xml("POST", upload.key, query=query, body=body) as answer,
            ):
                _parse(answer, "CompleteMultipartUploadResult")
        except NotFound as unknown:
            settle_completion(self, upload, unknown)

    def abort(self, upload: Upload) -> None:
        query = f"uploadId={quote(upload.upload_id, safe='')}"
        with (
            suppress(NotFound),
            self._errors_of(f"abort {upload.key}"),
            self._xml("DELETE", upload.key, query=query),
        ):
            pass

    def check(self) -> None:
        self._list_page(self._prefix, page_size=1)

    def warm(self) -> None:
        self.renew_credentials()
        self.check()

    def renew_credentials(self) -> None:
        """Have a token that lasts for a while; raises Permanent where there are no credentials."""
        from google.auth.credentials import AnonymousCredentials  # noqa: PLC0415
        from google.auth.transport.requests import Request  # noqa: PLC0415

        with self._errors_of("credentials"):
            credentials = self._credentials()
            if not isinstance(credentials, AnonymousCredentials) and _left_s(credentials) < (
                RENEW_BELOW_S
            ):
                credentials.refresh(Request())

    # ------------------------------------------------------------ requests

    @property
    def _once(self) -> dict[str, Any]:
        """For each call of the library: one attempt, our timeouts."""
        return {"retry": None, "timeout": self._timeout_s}

    def _list_page(
        self, prefix: str, *, page_token: str | None = None, page_size: int = 1000
    ) -> tuple[Sequence[Any], str | None]:
        with self._errors_of(f"list {prefix}"):
            channel = self._channel()
            listing = channel.client.list_blobs(
                channel.bucket,
                prefix=prefix,
                page_size=page_size,
                page_token=page_token,
                fields="items(name,size),nextPageToken",
                **self._once,
            )
            page = next(listing.pages, ())
            return list(page), listing.next_page_token

    @contextmanager
    def _xml(
        self,
        method: str,
        key: str,
        *,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        body: memoryview | None = None,
    ) -> Iterator[requests.Response]:
        """One request to the XML interface; the answer is a success, and its body not read yet."""
        answer = self._channel().session.request(
            method,
            f"{self._endpoint}/{self._bucket}/{quote(self._prefix + key)}?{query}".rstrip("?"),
            data=_Body(body) if body is not None and body.nbytes else b"",
            headers={"Accept-Encoding": "identity", **(headers or {})},
            timeout=self._timeout_s,
            allow_redirects=False,
            stream=True,
        )
        with answer:
            if answer.status_code >= 300:
                raise _refusal(answer.status_code, _error_code(answer.content))
            yield answer

    @contextmanager
    def _errors_of(self, what: str) -> Iterator[None]:
        """Turns whatever a call raises into an error of the contract that says ``what`` it was."""
        from google.api_core.exceptions import GoogleAPICallError  # noqa: PLC0415
        from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415

        try:
            yield
        except StoreError as error:
            raise type(error)(f"{what} in {self.url}: {error}", hint=error.hint) from error
        except GoogleAPICallError as error:
            refusal = _refusal(int(error.code or 0), "")
            raise type(refusal)(
                f"{what} in {self.url}: {error!s:.300}", hint=refusal.hint
            ) from error
        except (GoogleAuthError, HTTPError, OSError) as error:
            raise _classified(error, f"{what} in {self.url}: {error!s:.300}") from error

    def _channel(self) -> _Channel:
        """This thread's session and client; made when it first asks."""
        channel: _Channel | None = getattr(self._local, "channel", None)
        if channel is None:
            channel = self._local.channel = self._open_channel()
        return channel

    def _open_channel(self) -> _Channel:
        # The library would fetch the bucket's metadata from threads of its own, for traces nobody reads.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        from google.auth.transport.requests import AuthorizedSession  # noqa: PLC0415
        from google.cloud.storage import Client  # noqa: PLC0415

        session = AuthorizedSession(self._credentials())
        session.mount(self._endpoint, HTTPAdapter(pool_maxsize=4, max_retries=0))
        client = Client(
            project=None,
            credentials=session.credentials,
            client_options={"api_endpoint": self._endpoint},
            _http=session,
        )
        return _Channel(session, client, client.bucket(self._bucket))

    def _credentials(self) -> Any:
        import google.auth  # noqa: PLC0415 - a VM on another cloud need not load it
        from google.auth.credentials import AnonymousCredentials  # noqa: PLC0415
        from google.auth.exceptions import DefaultCredentialsError  # noqa: PLC0415

        with self._lock:
            if self._made_credentials is None:
                if self._endpoint.startswith("http:"):
                    self._made_credentials = AnonymousCredentials()
                    return self._made_credentials
                try:
                    self._made_credentials = _held(google.auth.default(scopes=[_SCOPE])[0])
                except DefaultCredentialsError as error:
                    if not self._is_custom:
                        # Not kept: the metadata service may answer the next time.
                        raise Permanent("no credentials for GCS", hint=_CREDENTIALS) from error
                    self._made_credentials = AnonymousCredentials()
            return self._made_credentials


@dataclass(frozen=True, slots=True)
class _Channel:
    """What one thread talks through: requests sessions are not made to be shared."""

    session: Any
    client: Any
    bucket: Any


def _held(inner: Any) -> Any:
    """The same credentials, that keep a token until it has expired.

    Google's own ask the metadata server minutes before that, in the middle of a request, and fail with
    it; but it may be dead by then, and the token is good.  Renewing in time is what ``warm()`` is for.
    """
    from google.auth.credentials import Credentials, TokenState  # noqa: PLC0415

    class Held(Credentials):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.token: str | None = None
            self._renewing = threading.Lock()

        def refresh(self, request: Any) -> None:
            before = self.token
            with self._renewing:
                if self.token == before:  # else another thread has done it meanwhile
                    inner.refresh(request)
                    self.token, self.expiry = inner.token, inner.expiry

        def before_request(self, request: Any, method: str, url: str, headers: Any) -> None:
            del method, url
            if self.token_state is TokenState.INVALID:
                self.refresh(request)
            inner.apply(headers)

    return Held()


def _left_s(credentials: Any) -> float:
    """Life that the token has left; nothing where there is none yet."""
    if credentials.token is None:
        return 0.0
    if credentials.expiry is None:
        return math.inf
    expiry: datetime = credentials.expiry.replace(tzinfo=UTC)
    return (expiry - datetime.now(UTC)).total_seconds()


class _Body:
    """A part as requests wants it: sized, uncopied, and from its start again for each sending.

    google-auth sends a request again after it has renewed a token; a file would be at its end by then.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data.cast("B")

    def __len__(self) -> int:
        return self._data.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, self._data.nbytes, _WINDOW_BYTES):
            yield self._data[start : start + _WINDOW_BYTES]


def _receive(answer: requests.Response, into: memoryview) -> None:
    """Fill ``into`` from an answer's body, whose length is known to be the same."""
    done = 0
    while done < into.nbytes:
        count = answer.raw.readinto(into[done : done + _WINDOW_BYTES])
        if not count:
            raise Transient("the answer ended early")
        done += count


def _parse(answer: requests.Response, wanted: str) -> ET.Element:
    """The answer's document.  An error may come under status 200, when it came up late."""
    try:
        root = ET.fromstring(answer.content)  # noqa: S314 - the configured store's own words
    except ET.ParseError as error:
        raise Transient(f"an answer that is no XML: {error}") from error
    if root.tag.rpartition("}")[2] != wanted:
        raise Transient(f"an error under status 200: {_error_code(answer.content)}")
    return root


def _error_code(body: bytes) -> str:
    try:
        return ET.fromstring(body).findtext("{*}Code") or ""  # noqa: S314
    except ET.ParseError:
        return ""


def _refusal(status: int, code: str) -> StoreError:
    """The error of the contract for an answer that was no success."""
    message = f"{status} {code}".rstrip()
    hint = _HINTS.get(status, "")
    if status == 404:
        return NotFound(message, hint=hint if code in ("", "NoSuchBucket") else "")
    if status == 412:
        return Exists(message)
    if status in (408, 409, 429) or status >= 500 or code in ("BadDigest", "IncompleteBody"):
        return Transient(message)
    return Permanent(message, hint=hint)


def _classified(error: Exception, message: str) -> StoreError:
    """The error of the contract for what happened before or instead of an answer."""
    from google.auth.exceptions import GoogleAuthError, TransportError  # noqa: PLC0415

    if isinstance(error, (MissingSchema, InvalidSchema, InvalidURL)):
        return Permanent(message, hint="store.endpoint must be the URL of a store")
    if is_certificate_problem(error):
        return Permanent(message, hint="The store's certificate is not trusted on this VM")
    if isinstance(error, GoogleAuthError):
        # A token that could not be fetched because the metadata service was not reached.
        lost = isinstance(error, TransportError) or isinstance(error.__cause__, TransportError)
        return (
            Transient(message) if lost or error.retryable else Permanent(message, hint=_CREDENTIALS)
        )
    return Transient(message)
