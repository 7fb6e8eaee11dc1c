# SPDX-License-Identifier: Apache-2.0
"""CRC32C compared with another implementation."""

from __future__ import annotations

import google_crc32c
from hypothesis import given
from hypothesis import strategies as st
from swansong_bucket.stores.checksums import crc32c, crc32c_base64


def test_the_check_value() -> None:
    """The check value in the definition of the algorithm."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c_base64(0xE3069283) == "4waSgw=="


@given(st.binary(max_size=5000))
def test_any_buffer_has_the_value_of_another_implementation(data: bytes) -> None:
    """Bytes, and a view of memory that can change."""
    assert crc32c(data) == crc32c(memoryview(bytearray(data))) == google_crc32c.value(data)
