# SPDX-License-Identifier: Apache-2.0
"""The capabilities of the daemon, which no program that it starts may have."""

from __future__ import annotations

import ctypes

_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4


def keep_from_children() -> None:
    """Programs that this process starts get none of its capabilities; the process keeps them.

    ``AmbientCapabilities=`` of the unit would pass ``CAP_KILL`` on to the operator's ``notify.exec``.
    Call it before the first thread starts: each thread has sets of its own.
    """
    ctypes.CDLL(None).prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
