# SPDX-License-Identifier: Apache-2.0
"""Signatures of manifests and claims, with a key that the writers of the bucket do not have.

Off unless ``store.signing_key_file`` names a key.  docs/format-objects.md describes the signed bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swansong import openat

from swansongd.errors import ConfigError

ALGORITHM = "hmac-sha256"
FIELD = "signature"
KEY_BYTES_MIN = 32
KEY_BYTES_MAX = 4096
_KEY_NAME = "store.signing_key_file"
_REMEDY = (
    "create one with: (umask 077; openssl rand 32 >FILE), readable for the daemon's user alone"
)


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs the JSON bodies of objects, and verifies their signatures."""

    key: bytes = field(repr=False)

    def signed(self, kind: str, body: Mapping[str, object]) -> dict[str, object]:
        """The body with its signature.

        Args:
            kind: format of the object; a signature is valid for one kind only.

        Raises:
            ValueError: the body has no JSON form.
        """
        return {**body, FIELD: self._signature(kind, body)}

    def is_valid(self, kind: str, body: Mapping[str, object]) -> bool:
        """Whether the body has a valid signature of this kind and key."""
        claimed = body.get(FIELD)
        if not isinstance(claimed, str):
            return False
        try:
            expected = self._signature(kind, body)
        except (ValueError, RecursionError):
            return False
        return hmac.compare_digest(claimed.encode(errors="replace"), expected.encode())

    def _signature(self, kind: str, body: Mapping[str, object]) -> str:
        unsigned = {name: value for name, value in body.items() if name != FIELD}
        message = kind.encode() + b"\n" + canonical(unsigned)
        return f"{ALGORITHM}:{hmac.new(self.key, message, hashlib.sha256).hexdigest()}"


def canonical(body: Mapping[str, object]) -> bytes:
    """Canonical JSON: sorted keys, no white space, ASCII, no NaN.

    Raises:
        ValueError: a number is not finite.
        TypeError: JSON has no such value.
    """
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def load(path: Path, *, owners: Collection[int] | None) -> Signer:
    """Read the key: all bytes of the file, including a line feed at the end.

    Args:
        owners: user ids that may own the file; None accepts all.

    Raises:
        ConfigError: the file cannot be read, is not private, or has too few or too many bytes.
    """
    try:
        directory_fd = openat.open_directory(os.path.realpath(path.parent))
        try:
            fd = openat.open_file(path.name, dir_fd=directory_fd, owners=owners)
        finally:
            os.close(directory_fd)
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
    return Signer(key)


def _wrong(path: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError([f"{_KEY_NAME}: {str(path)!r} {problem}; {remedy}"])
