# SPDX-License-Identifier: Apache-2.0
"""Checks that the process behind the socket may be the daemon, and the owners of its directories.

The hooks write to directories that the daemon names, and load checkpoints from them, with all rights of the
trainer.  So the daemon's user is checked before anything is sent: any user can listen on a path that a
script or a variable names.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct
from collections.abc import Collection

from swansong import openat
from swansong.openat import UnsafeFileError

DAEMON_USER_ENV = "SWANSONG_DAEMON_USER"
"""Environment variable that names the daemon's user, by name or number, where it is not ``swansong``."""
DAEMON_USER = "swansong"
_CREDENTIALS = struct.Struct("iII")


class StrangerError(Exception):
    """The process that listens on the socket runs as a user who is not the daemon's."""


def check_listener(connection: socket.socket, path: str) -> int:
    """User id of the process that listens on the other end of a connected socket.

    Args:
        connection: to the daemon's socket.
        path: of the socket, for the message.

    Raises:
        StrangerError: it is not root, this user, or the daemon's user.
        OSError: the connection is lost.
    """
    size = _CREDENTIALS.size
    # The credentials of the process that called listen(), at that moment.
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


def open_directory(path: str, owners: Collection[int]) -> int:
    """Open a directory that the daemon named; the caller closes the descriptor.

    Args:
        path: of the directory.
        owners: user ids that it may belong to.

    Raises:
        UnsafeFileError: the path is not absolute, or the directory belongs to another user.
        OSError: there is no such directory, or the name is that of a link or a file.
    """
    if not os.path.isabs(path) or "\0" in path:
        raise UnsafeFileError(path, "is not an absolute path")
    return openat.open_directory(path, owners=owners)


def _uid_of(name: str) -> int | None:
    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None
