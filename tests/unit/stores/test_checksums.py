# SPDX-License-Identifier: Apache-2.0
"""CRC32C compared with another implementation."""

from __future__ import annotations

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong_bucket.stores.checksums import crc32c, crc32c_base64, crc32c_from_base64


def test_the_check_value() -> None:
    """The check value in the definition of the algorithm."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c_base64(0xE3069283) == "4waSgw=="


@given(st.binary(max_size=5000))
def test_any_buffer_has_the_value_of_another_implementation(data: bytes) -> None:
    """Bytes, and a view of memory that can change."""
    assert crc32c(data) == crc32c(memoryview(bytearray(data))) == google_crc32c.value(data)


@given(st.integers(0, 2**32 - 1))
def test_base64_round_trip(value: int) -> None:
    """Decoding returns the encoded value."""
    assert crc32c_from_base64(crc32c_base64(value)) == value


@pytest.mark.parametrize("text", ["", "AAAA", "AAAAAAAA", "4waSgw", "4waSgw==-2", "nonsense!"])
def test_other_texts_are_not_a_crc32c(text: str) -> None:
    """Among them the composite form, a checksum of checksums."""
    with pytest.raises(ValueError, match=r"."):
        crc32c_from_base64(text)
