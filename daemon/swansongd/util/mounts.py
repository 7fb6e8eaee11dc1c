# SPDX-License-Identifier: Apache-2.0
"""The mounts of open files."""

from __future__ import annotations

from pathlib import Path


def mount_id(fd: int) -> str:
    """Identifies the mount of an open file.  Its device may be the device of an overlayfs layer."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return next(line for line in lines if line.startswith("mnt_id:"))
