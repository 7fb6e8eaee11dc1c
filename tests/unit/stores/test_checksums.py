# SPDX-License-Identifier: Apache-2.0
"""CRC32C compared with another implementation, and combined from parts."""

from __future__ import annotations

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansongd.stores.checksums import (
    crc32c,
    crc32c_base64,
    crc32c_combine,
    crc32c_from_base64,
    crc32c_of_parts,
)


def test_the_check_value() -> None:
    """The check value in the definition of the algorithm."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c_base64(0xE3069283) == "4waSgw=="


@given(st.lists(st.binary(max_size=5000), max_size=6))
def test_in_pieces_and_in_parts(pieces: list[bytes]) -> None:
    """Incremental and combined values equal that of the whole."""
    whole = google_crc32c.value(b"".join(pieces))
    value = 0
    for piece in pieces:
        value = crc32c(memoryview(bytearray(piece)), value)
    assert value == whole
    assert crc32c_of_parts([(crc32c(piece), len(piece)) for piece in pieces]) == whole


@pytest.mark.parametrize("length", [0, 1, 2**20 - 1, 5 * 2**20 + 3, 2**24])
def test_long_parts(length: int) -> None:
    """Combination of parts with the length of real parts."""
    first, second = b"swansong" * 100, bytes(range(251)) * (length // 251 + 1)
    second = second[:length]
    combined = crc32c_combine(crc32c(first), crc32c(second), length)
    assert combined == google_crc32c.value(first + second)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**45), st.integers(0, 2**45))
def test_lengths_add_up(value: int, some: int, more: int) -> None:
    """Zeros of a length that cannot be hashed here, combined from two lengths."""
    assert crc32c_combine(crc32c_combine(value, 0, some), 0, more) == crc32c_combine(
        value, 0, some + more
    )


@given(st.integers(0, 2**32 - 1))
def test_base64_round_trip(value: int) -> None:
    """Decoding returns the encoded value."""
    assert crc32c_from_base64(crc32c_base64(value)) == value


@pytest.mark.parametrize("text", ["", "AAAA", "AAAAAAAA", "4waSgw", "4waSgw==-2", "nonsense!"])
def test_other_texts_are_not_a_crc32c(text: str) -> None:
    """Among them the composite form, a checksum of checksums."""
    with pytest.raises(ValueError, match=r"."):
        crc32c_from_base64(text)
