# SPDX-License-Identifier: Apache-2.0
"""The boot of this VM."""

from __future__ import annotations

import time


def booted_wall_ns() -> int:
    """Time of the boot in nanoseconds, by the clock of file times."""
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
