# SPDX-License-Identifier: Apache-2.0
"""Paths that this user may not be allowed to look up."""

from __future__ import annotations

from pathlib import Path


def exists(path: Path) -> bool:
    """Whether the path exists; True if this user may not look.  Raises no OSError."""
    try:
        return path.exists()
    except PermissionError:
        return True
    except OSError:
        return False
