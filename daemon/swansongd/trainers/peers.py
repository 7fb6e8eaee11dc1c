# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end: identity of a process, held by a pidfd so that it cannot turn into another.

A process id alone may name a stranger a moment later; a pidfd names one process for ever.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass

SO_PEERPIDFD = 77
"""Of Linux 6.5; the standard library has no name for it yet."""
_UCRED = struct.Struct("iII")
CREDENTIALS_BYTES = _UCRED.size


@dataclass(frozen=True, slots=True)
class Peer:
    """A process at the other end of a socket.  Whoever holds the Peer closes ``pidfd``."""

    pid: int
    uid: int
    gid: int
    pidfd: int


def identify(connected: socket.socket) -> Peer:
    """The process that made the connection, with a pidfd of its own.

    Raises:
        ProcessLookupError: it is gone, or lives in a PID namespace that cannot be seen from here.
        OSError: no descriptor is left.
    """
    pid, uid, gid = unpack_credentials(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS_BYTES)
    )
    if pid <= 0:
        raise ProcessLookupError(
            "it is not visible from the daemon's PID namespace; run the trainer in a child namespace "
            "of the daemon's, or in the same (--pid=host)"
        )
    try:
        return Peer(pid, uid, gid, connected.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            raise ProcessLookupError(f"process {pid} is gone") from error
        if error.errno != errno.ENOPROTOOPT:
            raise
    pidfd = open_process(pid)
    # Older kernels: had the process ended and its number gone to another, the connection would be closed.
    if _is_hung_up(connected):
        os.close(pidfd)
        raise ProcessLookupError(f"process {pid} is gone")
    return Peer(pid, uid, gid, pidfd)


def unpack_credentials(data: bytes) -> tuple[int, int, int]:
    """(pid, uid, gid) of a ``struct ucred``."""
    pid, uid, gid = _UCRED.unpack(data[:CREDENTIALS_BYTES])
    return pid, uid, gid


def open_process(pid: int) -> int:
    """A pidfd of the process that has the number ``pid`` now.

    Raises:
        ProcessLookupError: there is none, or the number changed hands meanwhile.
        OSError: no descriptor is left.
    """
    began = _start_ticks(pid)
    pidfd = os.pidfd_open(pid)
    try:
        if _start_ticks(pid) != began:
            raise ProcessLookupError(f"process id {pid} was given to another process")
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


def has_exited(pidfd: int) -> bool:
    """Whether the process has ended (it may still wait to be reaped)."""
    return wait_exit(pidfd, 0.0)


def wait_exit(pidfd: int, timeout_s: float | None) -> bool:
    """Wait until the process ends; whether it has.  None waits without limit."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))


def catches_signal(pid: int, signum: int) -> bool:
    """Whether the process has a handler of its own for the signal, by ``SigCgt``.

    Raises:
        OSError: its status cannot be read: it is gone, or /proc hides it.
    """
    return bool(int(_status_field(pid, b"SigCgt"), 16) >> (signum - 1) & 1)


def uids_of(pid: int) -> frozenset[int]:
    """Real, effective and saved user id of the process.

    Raises:
        OSError: its status cannot be read.
    """
    return frozenset(map(int, _status_field(pid, b"Uid").split()[:3]))


def lineage(pid: int) -> frozenset[int]:
    """The process, its parent, and so on up to the first process.

    Raises:
        OSError: a status cannot be read.
    """
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = int(_status_field(pid, b"PPid"))
    return frozenset(found)


def command_line(pid: int) -> list[str]:
    """Arguments that the process was started with, as it shows them.

    Raises:
        OSError: they cannot be read.
    """
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return [os.fsdecode(part) for part in file.read(65536).split(b"\0") if part]


def _status_field(pid: int, name: bytes) -> bytes:
    with open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            key, _, value = line.partition(b":")
            if key == name:
                return value.strip()
    raise ProcessLookupError(f"process {pid} shows no {name.decode()}")


def _start_ticks(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the name, which may hold blanks and brackets; this is the 22nd.
            return int(file.read().rpartition(b")")[2].split()[19])
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None


def _is_hung_up(connected: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connected, select.POLLRDHUP)
    return any(
        mask & (select.POLLHUP | select.POLLRDHUP | select.POLLERR) for _, mask in poller.poll(0)
    )
