# SPDX-License-Identifier: Apache-2.0
"""``swansongd`` as another user: ``python daemon_as.py UID GID --config FILE``, started as root.

The interpreter may be readable only for root, so all modules are imported before the user changes.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import swansongd
from swansongd.cli import daemon


def preload() -> None:
    """Import the whole daemon, including late imports."""
    for found in pkgutil.walk_packages(swansongd.__path__, "swansongd."):
        importlib.import_module(found.name)
    for name in ("encodings.idna", "encodings.ascii", "botocore.session", "multiprocessing.queues"):
        importlib.import_module(name)


if __name__ == "__main__":
    uid, gid = int(sys.argv[1]), int(sys.argv[2])
    preload()
    os.setgroups([gid])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    os.umask(0o077)
    daemon.main(sys.argv[3:])
