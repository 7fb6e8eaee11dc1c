# SPDX-License-Identifier: Apache-2.0
"""The places to which ``swansong export`` writes plain files: a bucket of S3 or GCS, or a directory.

Speed does not matter here, so the SDKs of the clouds move the bytes, with their own credentials, retries and
checksums.  Each file carries its identity, so that an interrupted export continues.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from swansongd.errors import ConfigError, StagingError, StoreError
from swansongd.model import StoredShard
from swansongd.stores.base import bucket_and_prefix

_IDENTITY = "swansong-content"
"""Name of the metadata of an exported object."""


class PlainFiles(Protocol):
    """A place for plain files."""

    def has(self, path: str, shard: StoredShard) -> bool:
        """Whether an earlier export has written this file."""

    def write(self, path: str, shard: StoredShard, source: Path) -> None:
        """Write a file, and replace another one of this name.

        Raises:
            StoreError, StagingError: the place failed.
        """


def opened(url: str) -> PlainFiles:
    """The place that ``--to`` names.

    Raises:
        ConfigError: it is no bucket and no directory.
    """
    scheme = urlsplit(url).scheme
    if scheme == "s3":
        return _S3Files(*bucket_and_prefix(url))
    if scheme == "gs":
        return _GcsFiles(*bucket_and_prefix(url))
    if scheme:
        raise ConfigError([f"--to: {url!r:.100} is not s3://..., gs://... or a directory"])
    return _Directory(Path(url))


def identity_of(shard: StoredShard) -> str:
    """Equal for equal bytes in equal chunks."""
    extents = [(e.chunk.digest, e.offset_bytes, e.size_bytes) for e in shard.extents]
    return hashlib.sha256(repr((shard.size_bytes, extents)).encode()).hexdigest()


class _Directory:
    """Files that are renamed when they are whole."""

    def __init__(self, top: Path) -> None:
        self._top = top

    def has(self, path: str, shard: StoredShard) -> bool:
        del path, shard
        return False  # reading it again would cost as much as writing it

    def write(self, path: str, shard: StoredShard, source: Path) -> None:
        del shard
        target = self._top / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.exporting")
            shutil.copyfile(source, temporary)
            os.replace(temporary, target)
        except OSError as error:
            raise StagingError(f"writing {target} failed: {error.strerror}") from error


class _S3Files:
    def __init__(self, bucket: str, prefix: str) -> None:
        import boto3  # noqa: PLC0415 - slow to import
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

        self._errors = (BotoCoreError, ClientError, boto3.exceptions.Boto3Error)
        self._client: Any = boto3.client("s3")
        self._bucket, self._prefix = bucket, prefix

    def has(self, path: str, shard: StoredShard) -> bool:
        try:
            found = self._client.head_object(Bucket=self._bucket, Key=self._prefix + path)
        except self._errors:
            return False  # absent, or the upload reports the error
        return _is_same(found["ContentLength"], found["Metadata"], shard)

    def write(self, path: str, shard: StoredShard, source: Path) -> None:
        key = self._prefix + path
        metadata = {"Metadata": {_IDENTITY: identity_of(shard)}}
        try:
            self._client.upload_file(str(source), self._bucket, key, ExtraArgs=metadata)
        except self._errors as error:
            raise StoreError(f"writing s3://{self._bucket}/{key} failed: {error}") from error
        if not self.has(path, shard):
            raise StoreError(f"s3://{self._bucket}/{key} was written, and is not there")


class _GcsFiles:
    def __init__(self, bucket: str, prefix: str) -> None:
        from google.api_core.exceptions import GoogleAPIError  # noqa: PLC0415 - slow to import
        from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415
        from google.cloud import storage  # noqa: PLC0415

        self._errors = (GoogleAPIError, GoogleAuthError)
        try:
            self._bucket: Any = storage.Client().bucket(bucket)
        except (*self._errors, OSError) as error:
            raise StoreError(f"no credentials for gs://{bucket}: {error}") from error
        self._prefix = prefix

    def has(self, path: str, shard: StoredShard) -> bool:
        try:
            found = self._bucket.get_blob(self._prefix + path)
        except self._errors:
            return False  # the upload reports the error
        return found is not None and _is_same(found.size, found.metadata or {}, shard)

    def write(self, path: str, shard: StoredShard, source: Path) -> None:
        blob = self._bucket.blob(self._prefix + path)
        blob.metadata = {_IDENTITY: identity_of(shard)}
        where = f"gs://{self._bucket.name}/{self._prefix}{path}"
        try:
            blob.upload_from_filename(str(source), checksum="crc32c")
        except self._errors as error:
            raise StoreError(f"writing {where} failed: {error}") from error
        if not self.has(path, shard):
            raise StoreError(f"{where} was written, and is not there")


def _is_same(size_bytes: int, metadata: Mapping[str, str], shard: StoredShard) -> bool:
    return size_bytes == shard.size_bytes and metadata.get(_IDENTITY) == identity_of(shard)
