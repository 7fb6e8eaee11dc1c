# SPDX-License-Identifier: Apache-2.0
"""Unix sockets: listeners that are closed to other users from the start, and the other end."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

from swansong_bucket.errors import ConfigError

SHORT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors that may pass when this process, or another one, has freed descriptors or memory."""
SOCKET_MODE = 0o660
_UCRED = struct.Struct("iII")
CREDENTIALS_BYTES = _UCRED.size


def peer_credentials(connected: socket.socket) -> tuple[int, int, int]:
    """Process id, user id and group id of the other end, as the kernel reports them."""
    return unpack_credentials(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS_BYTES)
    )


def unpack_credentials(data: bytes) -> tuple[int, int, int]:
    """Unpack a ``struct ucred`` into (pid, uid, gid)."""
    pid, uid, gid = _UCRED.unpack(data[:CREDENTIALS_BYTES])
    return pid, uid, gid


def listen(
    path: Path, kind: socket.SocketKind, *, key: str, backlog: int, mode: int = SOCKET_MODE
) -> socket.socket:
    """A listening socket at ``path``; replaces a stale one.

    Args:
        path: of the socket.
        kind: SOCK_STREAM or SOCK_SEQPACKET.
        key: the key of the configuration that names the path, for errors.
        backlog: number of connections that wait to be accepted.
        mode: of the file.

    Raises:
        ConfigError: another process listens at the path, or the path is not a socket.
        OSError: the directory is missing or not writable.
    """
    _remove_stale(path, kind, key)
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        # bind() creates the file with the mode of the unbound socket, less the umask, and the later chmod
        # can only add permissions.  So no other user can connect at any time, and the umask of the process
        # stays unchanged.
        os.fchmod(listener.fileno(), mode)
        listener.bind(os.fspath(path))
        os.chmod(path, mode)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path, kind: socket.SocketKind, key: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            problem = f"{key}: {path} exists and is not a socket; remove it, or name another path"
            raise ConfigError([problem])
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as probe:
        code = probe.connect_ex(os.fspath(path))
    if code == errno.ECONNREFUSED:
        with suppress(FileNotFoundError):
            os.unlink(path)
    elif code != errno.ENOENT:
        raise ConfigError(
            [f"{key}: another process listens at {path}"],
            hint="Stop the other daemon, or name another path",
        )
