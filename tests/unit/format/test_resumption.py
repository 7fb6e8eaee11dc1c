# SPDX-License-Identifier: Apache-2.0
"""Resumptions: encoding and decoding are inverse, every field is checked, and no secret or path is in one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from swansong_bucket.errors import CorruptError
from swansong_bucket.format.resumption import BYTES_MAX, decode, encode

from testkit.lost_vms import ENDING, RESUMPTION

BARE = replace(
    RESUMPTION,
    download_began_wall_s=None,
    download_ended_wall_s=None,
    asked_wall_s=None,
    answered_wall_s=None,
    restored=None,
    earlier=None,
)


def test_round_trip() -> None:
    """Complete and bare; times have milliseconds."""
    for resumption in (
        RESUMPTION,
        BARE,
        replace(BARE, earlier=replace(ENDING, step_s=None, ranks=None)),
    ):
        assert decode(encode(resumption)) == resumption


def test_a_clock_before_1970_can_be_recorded() -> None:
    """A VM without a clock still records its resume."""
    assert decode(encode(replace(RESUMPTION, booted_wall_s=-5.0))).booted_wall_s == 0.0


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b" " * (BYTES_MAX + 1)])
def test_bytes_that_are_not_a_resumption_are_corrupt(data: bytes) -> None:
    """They are refused before they cost anything."""
    with pytest.raises(CorruptError):
        decode(data)


def test_it_has_only_numbers_times_and_identifiers() -> None:
    """No value is free text, so no secret and no path of a machine can get into one."""
    values = [
        *json.loads(encode(RESUMPTION)).values(),
        *json.loads(encode(RESUMPTION))["earlier"].values(),
    ]
    texts = {value for value in values if isinstance(value, str)}
    texts -= {json.loads(encode(RESUMPTION))["digest"]}
    assert not [text for text in texts if "/" in text]
    assert {text for text in texts if not text.endswith("Z")} == {
        "r",
        "0af1",
        "swansong-resumption",
    }
