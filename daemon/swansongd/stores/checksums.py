# SPDX-License-Identifier: Apache-2.0
"""The checksum that goes with every part on its way to a store, S3 and GCS alike."""

from __future__ import annotations

import base64

import google_crc32c

_WINDOW_BYTES = 256 * 1024


def crc32c(data: bytes | memoryview) -> str:
    """CRC32C of ``data`` as both stores want it in their headers: base64 of four big-endian bytes."""
    view = memoryview(data).cast("B")
    value = 0
    for start in range(0, view.nbytes, _WINDOW_BYTES):
        # google_crc32c takes read-only bytes only; a small copy stays in the processor's cache.
        value = google_crc32c.extend(value, bytes(view[start : start + _WINDOW_BYTES]))
    return base64.b64encode(value.to_bytes(4, "big")).decode()
