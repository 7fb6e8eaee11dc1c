# SPDX-License-Identifier: Apache-2.0
"""CRC32C, the checksum that goes with every part on its way to a store, S3 and GCS alike.

Values are integers below 2**32, as the algorithm is defined (reflected, initial value and final
complement included), so that an incremental value and a final one are the same thing.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import lru_cache

from crc32c import crc32c as _crc32c

_POLYNOMIAL = 0x82F63B78
"""Castagnoli, reflected."""

_ALONE_BYTES_MAX = 256 * 2**10
"""Hashed in some microseconds: waiting for one's turn again would take longer."""

_Matrix = tuple[int, ...]
"""A linear map of 32 bits to 32 bits: the images of the single bits."""


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """CRC32C of ``data``, of bytes; with ``value`` that of everything before it, the CRC32C of both together.

    Other threads run meanwhile, unless ``data`` is so small that letting them in would cost more.
    """
    return _crc32c(data, value, gil_release_mode=1 if len(data) > _ALONE_BYTES_MAX else 0)


def crc32c_combine(first: int, second: int, second_bytes: int) -> int:
    """CRC32C of two runs of bytes, one after the other, from the CRC32C of each.

    Args:
        second_bytes: length of the second run.
    """
    return _apply(_zeros(second_bytes), first) ^ second


def crc32c_of_parts(parts: Sequence[tuple[int, int]]) -> int:
    """CRC32C of a whole from ``(crc32c, size_bytes)`` of its parts, in order."""
    whole = 0
    for value, size_bytes in parts:
        whole = crc32c_combine(whole, value, size_bytes)
    return whole


def crc32c_base64(value: int) -> str:
    """As both stores write it in their headers: base64 of four big-endian bytes."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def crc32c_from_base64(text: str) -> int:
    """The value that a store wrote in a header.

    Raises:
        ValueError: that is no CRC32C.
    """
    raw = base64.b64decode(text, validate=True)
    if len(raw) != 4:
        raise ValueError(f"{text!r:.40} is no CRC32C")
    return int.from_bytes(raw, "big")


# A CRC is linear over GF(2).  What n zero bytes do to it is the n-th power of what one does, put
# together from squares.  All parts of an upload but the last have one length: the cache has it.


@lru_cache(maxsize=64)
def _zeros(count_bytes: int) -> _Matrix:
    """What ``count_bytes`` zero bytes do to a CRC register."""
    result: _Matrix = tuple(1 << bit for bit in range(32))
    square = 0
    while count_bytes >> square:
        if count_bytes >> square & 1:
            result = _product(_zeros_squared(square), result)
        square += 1
    return result


@lru_cache(maxsize=64)
def _zeros_squared(times: int) -> _Matrix:
    """What ``2**times`` zero bytes do."""
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
