# SPDX-License-Identifier: Apache-2.0
"""The boot of this VM."""

from __future__ import annotations

import time
from pathlib import Path


def booted_wall_ns() -> int:
    """Time of the boot in nanoseconds, by the clock of file times."""
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boottime_s() -> float:
    """Seconds since the boot, including the time of a suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Id of this boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
