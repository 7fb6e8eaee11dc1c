# SPDX-License-Identifier: Apache-2.0
"""CRC32C, the checksum of every part that is sent to a store, for S3 and GCS.

Values are integers below 2**32, reflected, with initial value and final complement.  An intermediate value
is therefore also the final value of the bytes so far.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

_POLYNOMIAL = 0x82F63B78
"""Castagnoli, reflected."""

_ALONE_BYTES_MAX = 256 * 2**10
"""Hashed in a few microseconds; acquiring the interpreter's lock again would take longer."""

_Matrix = tuple[int, ...]
"""A linear map of 32 bits to 32 bits: the images of the single bits."""


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """CRC32C of ``data``, a buffer of bytes.

    Releases the interpreter's lock, except for data of at most 256 KiB.

    Args:
        value: CRC32C of the bytes before ``data``; the result is then that of both together.
    """
    return _implementation()(data, value, gil_release_mode=1 if len(data) > _ALONE_BYTES_MAX else 0)


@cache
def _implementation() -> Callable[..., int]:
    from crc32c import crc32c as found  # noqa: PLC0415 - slow to import, and a restore does not use it

    implementation: Callable[..., int] = found
    return implementation


def load() -> None:
    """Import the implementation now: an import can fail later, for lack of descriptors for example."""
    _implementation()


def crc32c_combine(first: int, second: int, second_bytes: int) -> int:
    """CRC32C of two runs of bytes, one after the other, from the CRC32C of each.

    Args:
        second_bytes: length of the second run.
    """
    return _apply(_zeros(second_bytes), first) ^ second if first else second


def crc32c_of_parts(parts: Sequence[tuple[int, int]]) -> int:
    """CRC32C of a whole from ``(crc32c, size_bytes)`` of its parts, in order."""
    whole = 0
    for value, size_bytes in parts:
        whole = crc32c_combine(whole, value, size_bytes)
    return whole


def crc32c_base64(value: int) -> str:
    """The value as in headers of S3 and GCS: base64 of four big-endian bytes."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def crc32c_from_base64(text: str) -> int:
    """The value of a store's header.

    Raises:
        ValueError: the text is not a CRC32C.
    """
    raw = base64.b64decode(text, validate=True)
    if len(raw) != 4:
        raise ValueError(f"{text!r:.40} is not a CRC32C")
    return int.from_bytes(raw, "big")


# A CRC is linear over GF(2).  The map of n zero bytes is the n-th power of the map of one zero byte, computed
# by squaring.  All parts of an upload except the last have one length, so the cache has their map.


@lru_cache(maxsize=64)
def _zeros(count_bytes: int) -> _Matrix:
    """The effect of ``count_bytes`` zero bytes on a CRC register."""
    result: _Matrix = tuple(1 << bit for bit in range(32))
    square = 0
    while count_bytes >> square:
        if count_bytes >> square & 1:
            result = _product(_zeros_squared(square), result)
        square += 1
    return result


@lru_cache(maxsize=64)
def _zeros_squared(times: int) -> _Matrix:
    """The effect of ``2**times`` zero bytes."""
    if times:
        half = _zeros_squared(times - 1)
        return _product(half, half)
    one_bit = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    two_bits = _product(one_bit, one_bit)
    four_bits = _product(two_bits, two_bits)
    return _product(four_bits, four_bits)


def _apply(matrix: _Matrix, vector: int) -> int:
    result = 0
    bit = 0
    while vector >> bit:
        if vector >> bit & 1:
            result ^= matrix[bit]
        bit += 1
    return result


def _product(outer: _Matrix, inner: _Matrix) -> _Matrix:
    return tuple(_apply(outer, column) for column in inner)
