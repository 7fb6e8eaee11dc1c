# SPDX-License-Identifier: Apache-2.0
"""Checks that the process behind the socket runs as the daemon's user.

The hooks write to directories that the daemon names, and load checkpoints from them, with all rights of the
trainer.  Any user can listen on a path that a script or an environment variable names, so this check comes
before the first message.
"""

from __future__ import annotations

import os
import socket
import struct

DAEMON_USER_ENV = "SWANSONG_DAEMON_USER"
"""Environment variable that names the daemon's user, by name or number, where it is not ``swansong``."""
DAEMON_USER = "swansong"
_CREDENTIALS = struct.Struct("iII")


class StrangerError(Exception):
    """The process that listens on the socket does not run as the daemon's user."""


def check_listener(connection: socket.socket, path: str) -> int:
    """Return the user id of the process that listens on the other end of a connected socket.

    Args:
        connection: to the daemon's socket.
        path: of the socket, for the error.

    Raises:
        StrangerError: the process runs neither as root, nor as this user, nor as the daemon's user.
        OSError: the connection is lost.
    """
    size = _CREDENTIALS.size
    # SO_PEERCRED returns the credentials that the process had when it called listen().
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    if uid in (0, os.geteuid()):
        return uid
    name = os.environ.get(DAEMON_USER_ENV) or DAEMON_USER
    expected = _uid_of(name)
    if uid != expected:
        known = (
            f"is not user {name!r:.60}" if expected is not None else f"no user {name!r:.60} exists"
        )
        raise StrangerError(
            f"user id {uid} listens on {path}, and {known}; if swansongd runs as that user, set"
            f" {DAEMON_USER_ENV}={uid}; training continues without checkpoints"
        )
    return uid


def _uid_of(name: str) -> int | None:
    if name.isdecimal():
        return int(name)
    import pwd  # noqa: PLC0415 - Windows lacks it, and has no daemon

    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None
