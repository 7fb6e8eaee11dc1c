# SPDX-License-Identifier: Apache-2.0
"""CRC32C, the checksum of every object that is sent to a store.

Values are integers below 2**32, reflected, with initial value and final complement.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache

_ALONE_BYTES_MAX = 256 * 2**10
"""Hashed in a few microseconds; acquiring the interpreter's lock again would take longer."""


def crc32c(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """CRC32C of ``data``, a buffer of bytes, and of the bytes before it, whose CRC32C is ``before``.

    Releases the interpreter's lock, except for data of at most 256 KiB.
    """
    return _implementation()(
        data, before, gil_release_mode=1 if len(data) > _ALONE_BYTES_MAX else 0
    )


@cache
def _implementation() -> Callable[..., int]:
    from crc32c import crc32c as found  # noqa: PLC0415 - slow to import, and a restore does not use it

    implementation: Callable[..., int] = found
    return implementation


def load() -> None:
    """Import the implementation now: an import can fail later, for lack of descriptors for example."""
    _implementation()


def crc32c_base64(value: int) -> str:
    """The value as in headers of S3 and GCS: base64 of four big-endian bytes."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()
