# SPDX-License-Identifier: Apache-2.0
"""Durations and times as people read them."""

from __future__ import annotations

import pytest
from swansong_tools.units import human_span, human_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.312, "0.31 s"),
        (4.23, "4.2 s"),
        (78.4, "78 s"),
        (119.4, "119 s"),
        (185.0, "3 min 5 s"),
        (7199.6, "120 min"),
        (13_020.0, "3 h 37 min"),
        (200_000.0, "2 d 8 h"),
        (1e9, "11574 d 2 h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    """Tenths below ten seconds, and no decimals of minutes."""
    assert human_span(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (30.0, "30 s"),
        (90.0, "1 min 30 s"),
        (120.0, "2 min"),
        (13_020.0, "3 h 37 min"),
        (-5.0, "-5 s"),
    ],
)
def test_a_time_on_an_axis_is_exact(seconds: float, text: str) -> None:
    """Round times have one unit."""
    assert human_time(seconds) == text
