# SPDX-License-Identifier: Apache-2.0
"""Claims: encoding and decoding are inverse, and every field is checked."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong import bounds
from swansong_bucket.errors import CorruptError
from swansong_bucket.format import claim as claims
from swansong_bucket.format.claim import ClaimObject, decode, encode

from testkit.records import record_of

CLAIM = ClaimObject(
    run="r",
    generation=7,
    start="5d41~1",
    identity={"boot_id": "b", "host": "Grüße", "claimed": "2030-01-01T00:00:00Z"},
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
fields = st.sampled_from(["version", "run", "generation", "start", "identity", "other"])


def test_round_trip() -> None:
    """With and without an identity."""
    for claim in (CLAIM, replace(CLAIM, identity={})):
        assert decode(encode(claim)) == claim


@pytest.mark.fault("S13")
@given(changes=st.dictionaries(fields, anything))
def test_no_body_raises_anything_else(changes: dict[str, Any]) -> None:
    """Any fields give a claim within the bounds, or the declared error."""
    try:
        claim = decode(record_of(json.loads(encode(CLAIM)) | changes))
    except CorruptError:
        return
    assert 1 <= claim.generation <= bounds.GENERATION_MAX
    assert claim.start
    assert all(type(value) is str for value in claim.identity.values())


def test_a_claim_without_a_start_is_refused() -> None:
    """It would belong to each start whose id is unknown."""
    with pytest.raises(CorruptError, match="names no start"):
        decode(encode(replace(CLAIM, start="")))


@pytest.mark.fault("S13")
@given(data=st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode(data)


@pytest.mark.parametrize(
    "data", [b"[" * 60_000, b" " * (claims.BYTES_MAX + 1), b'{"x":' + b"[]," * 20_000, b"\xff"]
)
def test_no_claim_costs_much(data: bytes) -> None:
    began_s = time.thread_time()
    with pytest.raises(CorruptError):
        decode(data)
    assert time.thread_time() - began_s < 1
