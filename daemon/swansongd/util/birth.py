# SPDX-License-Identifier: Apache-2.0
"""Creation time of a file, which the standard library does not give on Linux.  Source: statx(2)."""

from __future__ import annotations

import ctypes
import struct

_EMPTY_PATH = 0x1000
_BIRTH = 0x800
_SIZE_BYTES = 256
_BIRTH_OFFSET = 80

_libc = ctypes.CDLL(None)


def created_wall_ns(fd: int) -> int | None:
    """When the open file was created, in nanoseconds; None if its file system does not tell."""
    buffer = ctypes.create_string_buffer(_SIZE_BYTES)
    if _libc.statx(fd, b"", _EMPTY_PATH, _BIRTH, buffer):
        return None
    (mask,) = struct.unpack_from("I", buffer)
    seconds, nanoseconds = struct.unpack_from("qI", buffer, _BIRTH_OFFSET)
    return int(seconds) * 10**9 + int(nanoseconds) if mask & _BIRTH else None
