# SPDX-License-Identifier: Apache-2.0
"""Signed records: only holders of the run's key can create a record that readers see.

A writer of the bucket can create any object.  So the name of each record contains a tag that only the key
gives, for this name in this store: a listing alone shows which records count, for any number of others.  The
bytes end with a signature over the store, the name and the bytes, so no record is valid under another name or
in another bucket.  Chunks need neither: a chunk is named by the digest of its bytes, and by a record.

Off unless ``store.signing_key_file`` names a key.  docs/format.md describes names and bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from swansong import openat

from swansong_bucket.errors import ConfigError, CorruptError
from swansong_bucket.format.keys import SIGNED, UNSIGNED, is_below_data, is_record
from swansong_bucket.runs.catalog import is_folder
from swansong_bucket.stores.base import ObjectInfo, ObjectStore, Page
from swansong_bucket.stores.wrappers.forwarding import Forwarding

KEY_BYTES_MIN = 32
KEY_BYTES_MAX = 4096
_LINE = b"\nhmac-sha256:"
SIGNATURE_BYTES = len(_LINE) + 64
_KEY_NAME = "store.signing_key_file"
_REMEDY = (
    "create one with: (umask 077; openssl rand 32 >FILE), readable for the daemon's user alone"
)


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The key of a run."""

    secret: bytes = field(repr=False)

    def tag(self, store_url: str, key: str) -> str:
        """The tag in the name of the record ``key`` of a store: 32 hex digits."""
        return self._mac(b"name", store_url, key).hex()[:32]

    def signature(self, store_url: str, key: str, data: bytes | memoryview) -> bytes:
        """The line at the end of a record with these bytes."""
        return _LINE + self._mac(b"record", store_url, key, data).hex().encode()

    def _mac(self, kind: bytes, store_url: str, key: str, data: bytes | memoryview = b"") -> bytes:
        named = b"\n".join((kind, store_url.rstrip("/").encode(), key.encode(), b""))
        made = hmac.new(self.secret, named, hashlib.sha256)
        made.update(data)
        return made.digest()


def signed(store: ObjectStore, key: SigningKey | None) -> ObjectStore:
    """The store as the holders of a key see it; without a key the store itself."""
    return store if key is None else SignedStore(store, key)


class SignedStore(Forwarding):
    """The same store, with a tag in the name of each record and a signature at its end.

    Callers see neither.  An object without a valid tag is listed with
    :data:`~swansong_bucket.format.keys.UNSIGNED` at the end of its key, which is the key of no record.
    """

    def __init__(self, store: ObjectStore, key: SigningKey) -> None:
        super().__init__(store)
        self._key = key

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        if is_record(key):
            data = b"".join((data, self._key.signature(self.url, key, data)))
        self._store.put(self._stored(key), data, if_absent=if_absent)

    def get(self, key: str) -> bytes:
        data = self._store.get(self._stored(key))
        if not is_record(key):
            return data
        body = memoryview(data)[: max(0, len(data) - SIGNATURE_BYTES)]
        if not hmac.compare_digest(data[len(body) :], self._key.signature(self.url, key, body)):
            raise CorruptError(
                f"{self.url}/{key} has no signature of this key",
                hint=f"Check {_KEY_NAME}; else a writer without the key has replaced the object",
            )
        return bytes(body)

    def head(self, key: str) -> ObjectInfo | None:
        info = self._store.head(self._stored(key))
        return None if info is None else self._shown(info)

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        infos, token = self._store.page(prefix, token, after=after)
        return Page([self._shown(info) for info in infos], token)

    def delete(self, key: str, *, if_tag: str = "") -> None:
        self._store.delete(self._stored(key), if_tag=if_tag)

    def delete_many(self, infos: Sequence[ObjectInfo]) -> Mapping[str, str]:
        stored = {self._stored(info.key): info for info in infos}
        remain = self._store.delete_many([replace(info, key=key) for key, info in stored.items()])
        return {stored[key].key: reason for key, reason in remain.items()}

    def lock(self, key: str) -> float | None:
        return self._store.lock(self._stored(key))

    def _stored(self, key: str) -> str:
        """The key under which the inner store has an object."""
        if not is_record(key):
            return key
        return f"{key.removesuffix('.json')}.{self._key.tag(self.url, key)}.json"

    def _shown(self, info: ObjectInfo) -> ObjectInfo:
        """The object as callers see it."""
        if is_below_data(info.key) or is_folder(info):
            return info
        match = SIGNED.fullmatch(info.key)
        if match is not None:
            key = f"{match[1]}.json"
            if hmac.compare_digest(self._key.tag(self.url, key), match[2]):
                size_bytes = max(0, info.size_bytes - SIGNATURE_BYTES)
                return replace(info, key=key, size_bytes=size_bytes)
        return replace(info, key=info.key + UNSIGNED)


def load(path: Path | None) -> SigningKey | None:
    """Read the key: all bytes of the file, including a line feed at the end.  None without a file.

    The owner is not checked: of a private file of another user, only root gets this far.

    Raises:
        ConfigError: the file cannot be read, is not private, or has too few or too many bytes.
    """
    if path is None:
        return None
    try:
        with openat.held(openat.open_directory(os.path.realpath(path.parent))) as directory_fd:
            fd = openat.open_file(path.name, dir_fd=directory_fd)
        with os.fdopen(fd, "rb") as file:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            key = file.read(KEY_BYTES_MAX + 1)
    except OSError as error:
        raise _wrong(path, f"cannot be used: {error.strerror}", _REMEDY) from None
    if mode & 0o077:
        raise _wrong(path, f"has mode {mode:04o}", f"keep it private: chmod 0400 {path}")
    if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        allowed = f"not {KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
        count = f"over {KEY_BYTES_MAX}" if len(key) > KEY_BYTES_MAX else str(len(key))
        raise _wrong(path, f"has {count} bytes, {allowed}", _REMEDY)
    return SigningKey(key)


def _wrong(path: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError([f"{_KEY_NAME}: {str(path)!r} {problem}; {remedy}"])
