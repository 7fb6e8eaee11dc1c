# SPDX-License-Identifier: Apache-2.0
"""Durations and times as people read them."""

from __future__ import annotations

import pytest
from swansong_tools.units import human_bytes, human_s, human_span, human_time


def test_a_figure_has_no_exponent() -> None:
    """Neither a tiny duration nor the GPU days of a large run, nor the bytes of a large store."""
    seconds = (0.0, 5e-6, 0.0123, 119.0, 120.0, 999.6 * 86400, 1e9)
    shown = ["0 s", "0 s", "0.012 s", "119 s", "2 min", "1,000 d", "11,574 d"]
    assert [human_s(each) for each in seconds] == shown
    assert [human_bytes(each) for each in (999.6, 84e9, 2**60)] == ["1 kB", "84 GB", "1,152,922 TB"]


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
