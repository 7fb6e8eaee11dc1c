# SPDX-License-Identifier: Apache-2.0
"""How the configured preemption notice of Compute Engine is read."""

from __future__ import annotations

import pytest
from swansongd.config.values import InvalidValue, preemption_notice


@pytest.mark.parametrize(("value", "notice_s"), [("learn", None), (0, 0.0), (120, 120.0)])
def test_notices_that_there_are(value: object, notice_s: float | None) -> None:
    """Compute Engine knows two; ``learn`` is neither."""
    assert preemption_notice(value) == notice_s


@pytest.mark.parametrize("value", [30, True, False, "120", None, -1, [120]])
def test_notices_that_there_are_not(value: object) -> None:
    """Anything else is a mistake in the file."""
    with pytest.raises(InvalidValue):
        preemption_notice(value)
