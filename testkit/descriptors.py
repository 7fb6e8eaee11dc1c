# SPDX-License-Identifier: Apache-2.0
"""The open descriptors of this process that belong to one file, or to one process.

A test never counts all descriptors: what earlier tests left is closed whenever memory is collected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def on(*paths: Path) -> int:
    """Number of descriptors that are open on these files or directories."""
    files = {(found.st_dev, found.st_ino) for found in map(os.stat, paths)}
    count = 0
    for fd in _all():
        try:
            found = os.fstat(fd)
        except OSError:  # closed meanwhile
            continue
        count += (found.st_dev, found.st_ino) in files
    return count


def of_process(pid: int) -> int:
    """Number of pidfds that are open on this process."""
    count = 0
    for fd in _all():
        try:
            lines = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        count += f"Pid:\t{pid}" in lines
    return count


def _all() -> Iterator[int]:
    yield from map(int, os.listdir("/proc/self/fd"))
