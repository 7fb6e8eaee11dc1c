# SPDX-License-Identifier: Apache-2.0
"""The process at the other end of a socket, identified by a pidfd.

A process id may be reused by another process at any time; a pidfd always refers to the same process.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from dataclasses import dataclass

from swansong import openat

from swansongd.util import unix

SO_PEERPIDFD = 77
"""Since Linux 6.5; the standard library has no constant for it yet."""
_ENVIRON_BYTES_MAX = 2**20


@dataclass(frozen=True, slots=True)
class Peer:
    """A process at the other end of a socket.  The owner of the Peer must close ``pidfd``."""

    pid: int
    uid: int
    gid: int
    pidfd: int


def identify(connected: socket.socket) -> Peer:
    """The process that made the connection, with a new pidfd.

    Raises:
        ProcessLookupError: the process has ended, or is in a PID namespace that is not visible here.
        OSError: no descriptor is left.
    """
    pid, uid, gid = unix.peer_credentials(connected)
    if pid <= 0:
        raise ProcessLookupError(
            "it is not visible in the daemon's PID namespace; run the trainer in the same namespace "
            "(--pid=host) or in a child namespace"
        )
    try:
        return Peer(pid, uid, gid, connected.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            raise ProcessLookupError(f"process {pid} has ended") from error
        if error.errno != errno.ENOPROTOOPT:
            raise
    pidfd = open_process(pid)
    # Older kernels: if the process had ended and its pid were reused, the connection would be closed.
    if _is_hung_up(connected):
        os.close(pidfd)
        raise ProcessLookupError(f"process {pid} has ended")
    return Peer(pid, uid, gid, pidfd)


def open_process(pid: int) -> int:
    """A pidfd of the process with this pid.

    Raises:
        ProcessLookupError: there is no such process, or the pid was reused during the call.
        OSError: no descriptor is left.
    """
    began = start_ticks(pid)
    pidfd = os.pidfd_open(pid)
    with openat.closed_on_error(pidfd):
        if start_ticks(pid) != began:
            raise ProcessLookupError(f"process id {pid} was reused by another process")
    return pidfd


def process_start(peer: Peer) -> int:
    """Start of the process, in clock ticks since the boot; 0 if it has ended or cannot be read."""
    try:
        ticks = start_ticks(peer.pid)
    except (OSError, ValueError, IndexError):
        return 0
    return 0 if select.select([peer.pidfd], [], [], 0)[0] else ticks


def catches_signal(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal, by ``SigCgt``.

    Raises:
        OSError: its status cannot be read: it has ended, or /proc hides it.
    """
    return bool(int(_status_field(pid, b"SigCgt"), 16) >> (signum - 1) & 1)


def uids_of(pid: int) -> frozenset[int]:
    """Real, effective and saved user ids of the process.

    Raises:
        OSError: its status cannot be read.
    """
    return frozenset(map(int, _status_field(pid, b"Uid").split()[:3]))


def groups_of(pid: int) -> tuple[int, ...]:
    """Effective and supplementary group ids of the process.

    Raises:
        OSError: its status cannot be read.
    """
    groups = [_status_field(pid, b"Gid").split()[1], *_status_field(pid, b"Groups").split()]
    return tuple(map(int, groups))


def lineage(pid: int) -> frozenset[int]:
    """The process and all its ancestors.

    Raises:
        OSError: a status cannot be read.
    """
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = int(_status_field(pid, b"PPid"))
    return frozenset(found)


def command_line(pid: int) -> list[str]:
    """Arguments of the process, as /proc shows them.

    Raises:
        OSError: they cannot be read.
    """
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return [os.fsdecode(part) for part in file.read(65536).split(b"\0") if part]


def environment_of(pid: int) -> dict[str, str]:
    """The environment that the process was started with.

    Raises:
        OSError: it cannot be read.
    """
    with open(f"/proc/{pid}/environ", "rb") as file:
        items = file.read(_ENVIRON_BYTES_MAX).split(b"\0")
    # A process reads the first one of equal names.
    pairs = (item.partition(b"=") for item in reversed(items))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs if name}


def _status_field(pid: int, name: bytes) -> bytes:
    with open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            key, _, value = line.partition(b":")
            if key == name:
                return value.strip()
    raise ProcessLookupError(f"the status of process {pid} has no {name.decode()}")


def start_ticks(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the name, which may contain spaces and parentheses; this is the 22nd.
            return int(file.read().rpartition(b")")[2].split()[19])
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} does not exist") from None


def _is_hung_up(connected: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connected, select.POLLRDHUP)
    return any(
        mask & (select.POLLHUP | select.POLLRDHUP | select.POLLERR) for _, mask in poller.poll(0)
    )
