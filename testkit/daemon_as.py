# SPDX-License-Identifier: Apache-2.0
"""``swansongd`` as another user: ``python daemon_as.py UID GID --config FILE``, started as root.

As in its unit, it has the capability ``CAP_KILL`` and would pass it on to the programs that it starts.

The interpreter may be readable only for root, so all modules are imported before the user changes.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import sys

import swansong_bucket
import swansong_tools
import swansongd
from swansongd.service import main as daemon

CAP_KILL, CAPABILITY_VERSION_3 = 5, 0x20080522
PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 47, 2


def preload() -> None:
    """Import the daemon and its tools, including late imports."""
    for package in (swansong_bucket, swansongd, swansong_tools):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    for name in ("encodings.idna", "encodings.ascii", "botocore.session", "multiprocessing.queues"):
        importlib.import_module(name)


def become(uid: int, gid: int) -> None:
    """Change the user, and keep ``CAP_KILL`` as ``AmbientCapabilities=`` does."""
    libc = ctypes.CDLL(None)
    os.setgroups([gid])
    os.setresgid(gid, gid, gid)
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setresuid(uid, uid, uid)
    kill = 1 << CAP_KILL
    sets = (ctypes.c_uint32 * 6)(kill, kill, kill, 0, 0, 0)  # effective, permitted, inheritable
    assert libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), sets) == 0
    assert libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_KILL, 0, 0) == 0


if __name__ == "__main__":
    uid, gid = int(sys.argv[1]), int(sys.argv[2])
    preload()
    become(uid, gid)
    os.umask(0o077)
    daemon.main(sys.argv[3:])
