# SPDX-License-Identifier: Apache-2.0
"""The buckets to which ``swansong export`` writes plain files.

Speed does not matter here, so the SDKs of the clouds move the bytes, with their own credentials, retries and
checksums.  Each file carries its identity, so that an interrupted export continues.
"""

from __future__ import annotations

import abc
import hashlib
import io
import mimetypes
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swansong_bucket.errors import ConfigError, StagingError, Stopped, StoreError
from swansong_bucket.model import StoredShard
from swansong_bucket.stores.base import bucket_and_prefix
from swansong_bucket.transfer.restore import bytes_of
from swansongd.config.config import Config

_IDENTITY = "swansong-content"
"""Name of the metadata of an exported object."""


def opened(url: str) -> PlainFiles | None:
    """The bucket that ``--to`` names; None for a directory.

    Raises:
        ConfigError: it is no bucket and no directory.
        StoreError: there are no credentials.
    """
    scheme, colon, place = url.partition(":")
    if not colon or "/" in scheme:
        return None
    opens = {"s3": _S3Files, "gs": _GcsFiles}.get(scheme)
    is_place = re.fullmatch(r"//[A-Za-z0-9._-]+(/[^?#]*)?", place) and url.isprintable()
    if opens is None or not is_place:
        raise ConfigError(
            [f"--to: {url!r:.100} is not s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or a directory"]
        )
    return opens(*bucket_and_prefix(url))


def expect_outside_of_stores(url: str, config: Config, run: str) -> None:
    """Check the bucket and prefix of ``--to``: a file below a run's prefix could stop all its restores.

    A store without a prefix is a whole bucket, of which only the run is checked.

    Raises:
        StagingError: they lie in the store or in the mirror.
    """
    bucket, prefix = bucket_and_prefix(url)
    for key, store in (("store.url", config.store.url), ("mirror.url", config.mirror.url)):
        if not store or urlsplit(store).scheme != urlsplit(url).scheme:
            continue
        own_bucket, own_prefix = bucket_and_prefix(store)
        if bucket == own_bucket and prefix.startswith(own_prefix or f"{run}/"):
            raise StagingError(f"--to: {url} lies in {key} = {store}", hint="Choose another prefix")


def identity_of(shard: StoredShard) -> str:
    """Equal for equal bytes in equal chunks."""
    return hashlib.sha256(repr(bytes_of(shard)).encode()).hexdigest()


class _Source(io.BufferedReader):
    """A file that raises Stopped when it is read after ``stop``, which ends an upload of both SDKs."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        super().__init__(io.FileIO(path))
        self._stop = stop

    def read(self, size_bytes: int | None = -1, /) -> bytes:
        self.expect_no_stop()
        return super().read(size_bytes)

    def expect_no_stop(self) -> None:
        """Raise Stopped after ``stop``."""
        if self._stop.is_set():
            raise Stopped("stopped before all files were written")


class PlainFiles(abc.ABC):
    """Files below a prefix of a bucket."""

    def __init__(self, url: str, errors: tuple[type[Exception], ...]) -> None:
        self._url = url
        self._errors = errors

    def has(self, path: str, shard: StoredShard) -> bool:
        """Whether an earlier export has written this file."""
        try:
            return self._stored(path) == (shard.size_bytes, identity_of(shard))
        except StoreError:
            return False  # without the right to list, S3 refuses HEAD of an absent key

    def write(self, path: str, shard: StoredShard, source: Path, *, stop: threading.Event) -> None:
        """Write a file, and replace another one of this name.

        Raises:
            StoreError: the bucket failed, or has other bytes afterwards.
            Stopped: ``stop`` was set; the file is not there, or it is whole.
        """
        with _Source(source, stop) as file:
            try:
                self._upload(path, {_IDENTITY: identity_of(shard)}, file)
            except self._errors as error:
                file.expect_no_stop()  # botocore wraps exceptions of the file
                raise StoreError(f"writing {self._url}{path} failed: {error}") from error
        size_bytes, identity = self._stored(path)
        if size_bytes is None:
            raise StoreError(f"writing {self._url}{path} failed: it is not there afterwards")
        # Some stores return no metadata; the SDK has compared the checksum.
        if size_bytes != shard.size_bytes or identity not in (None, identity_of(shard)):
            raise StoreError(
                f"writing {self._url}{path} failed: {size_bytes} other bytes are there in place of "
                f"{shard.size_bytes}",
                hint="Stop the other writer, or choose another prefix",
            )

    def _stored(self, path: str) -> tuple[int | None, str | None]:
        """The size and the identity of an object; None for what the store does not have."""
        try:
            return self._found(path) or (None, None)
        except self._errors as error:
            raise StoreError(f"reading {self._url}{path} failed: {error}") from error

    @abc.abstractmethod
    def _found(self, path: str) -> tuple[int, str | None] | None:
        """The size and the identity of an object; None if it is absent."""

    @abc.abstractmethod
    def _upload(self, path: str, metadata: Mapping[str, str], file: _Source) -> None: ...


class _S3Files(PlainFiles):
    def __init__(self, bucket: str, prefix: str) -> None:
        import boto3  # noqa: PLC0415 - slow to import
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

        self._refused = ClientError
        errors = (BotoCoreError, ClientError, boto3.exceptions.Boto3Error)
        super().__init__(f"s3://{bucket}/{prefix}", errors)
        try:
            self._client: Any = boto3.client("s3")
        except errors as error:
            raise StoreError(f"no credentials for {self._url}: {error}") from error
        self._bucket, self._prefix = bucket, prefix

    def _found(self, path: str) -> tuple[int, str | None] | None:
        try:
            found = self._client.head_object(Bucket=self._bucket, Key=self._prefix + path)
        except self._refused as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return None
            raise
        return found["ContentLength"], found["Metadata"].get(_IDENTITY)

    def _upload(self, path: str, metadata: Mapping[str, str], file: _Source) -> None:
        extra = {"Metadata": metadata}
        self._client.upload_fileobj(file, self._bucket, self._prefix + path, ExtraArgs=extra)


class _GcsFiles(PlainFiles):
    def __init__(self, bucket: str, prefix: str) -> None:
        from google.api_core.exceptions import GoogleAPIError  # noqa: PLC0415 - slow to import
        from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415
        from google.cloud import storage  # noqa: PLC0415

        super().__init__(f"gs://{bucket}/{prefix}", (GoogleAPIError, GoogleAuthError))
        try:
            self._bucket: Any = storage.Client().bucket(bucket)
        except (GoogleAPIError, GoogleAuthError, OSError) as error:
            raise StoreError(f"no credentials for {self._url}: {error}") from error
        self._prefix = prefix

    def _found(self, path: str) -> tuple[int, str | None] | None:
        found = self._bucket.get_blob(self._prefix + path)
        return None if found is None else (found.size, (found.metadata or {}).get(_IDENTITY))

    def _upload(self, path: str, metadata: Mapping[str, str], file: _Source) -> None:
        blob = self._bucket.blob(self._prefix + path)
        blob.metadata = metadata
        kind, size_bytes = mimetypes.guess_type(path)[0], os.fstat(file.fileno()).st_size
        blob.upload_from_file(file, size=size_bytes, content_type=kind, checksum="crc32c")
