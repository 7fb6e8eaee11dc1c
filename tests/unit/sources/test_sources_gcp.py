# SPDX-License-Identifier: Apache-2.0
"""The configured preemption notice of Compute Engine."""

from __future__ import annotations

import pytest
from swansong_bucket.config.values import InvalidValue, preemption_notice


@pytest.mark.parametrize(("value", "notice_s"), [("learn", None), (0, 0.0), (120, 120.0)])
def test_valid_preemption_notices(value: object, notice_s: float | None) -> None:
    """Compute Engine has two; ``learn`` is neither."""
    assert preemption_notice(value) == notice_s


@pytest.mark.parametrize("value", [30, True, False, "120", None, -1, [120]])
def test_invalid_preemption_notices(value: object) -> None:
    """Any other value is a mistake in the file."""
    with pytest.raises(InvalidValue):
        preemption_notice(value)
