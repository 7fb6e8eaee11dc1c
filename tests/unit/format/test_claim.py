# SPDX-License-Identifier: Apache-2.0
"""Claims: encoding and decoding are inverse, and every field is checked."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from swansong_bucket.errors import CorruptError
from swansong_bucket.format import claim as claims
from swansong_bucket.format.claim import ClaimObject, decode, encode

CLAIM = ClaimObject(
    run="r",
    generation=7,
    start="5d41~1",
    identity={"boot_id": "b", "host": "Grüße", "claimed": "2030-01-01T00:00:00Z"},
)


def test_a_claim_without_a_start_is_refused() -> None:
    """It would belong to each start whose id is unknown."""
    with pytest.raises(CorruptError, match="names no start"):
        decode(encode(replace(CLAIM, start="")))


@pytest.mark.parametrize(
    "data", [b"[" * 60_000, b" " * (claims.BYTES_MAX + 1), b'{"x":' + b"[]," * 20_000, b"\xff"]
)
def test_no_claim_costs_much(data: bytes) -> None:
    began_s = time.thread_time()
    with pytest.raises(CorruptError):
        decode(data)
    assert time.thread_time() - began_s < 1
