# SPDX-License-Identifier: Apache-2.0
"""Names the process that listens at a TCP port, as the kernel reports it."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from swansong_bucket.util.printable import printable

_LISTEN = "0A"


def holder(host: str, port: int, *, proc: Path = Path("/proc")) -> str:
    """The user and the process that keep others from ``host:port``; empty if the kernel shows none.

    Only root, and the user of the process itself, sees the process.
    """
    wanted = ip_address(host)
    for address, local_port, uid, inode in _listening(proc):
        is_any = address.is_unspecified or wanted.is_unspecified
        if local_port == port and (is_any or address == wanted):
            return f"{_process(inode, proc)} of user {_name(uid)}"
    return ""


def _listening(proc: Path) -> Iterator[tuple[IPv4Address | IPv6Address, int, int, str]]:
    """Address, port, uid of the owner, and inode of each listening socket."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError), (proc / "net" / table).open() as lines:
            next(lines, "")
            for line in lines:
                _, local, _, state, _, _, _, uid, _, inode, *_ = line.split()
                if state != _LISTEN:
                    break  # listening sockets come first; thousands of connections may follow
                digits, _, local_port = local.partition(":")
                yield _address(digits), int(local_port, 16), int(uid), inode


def _address(digits: str) -> IPv4Address | IPv6Address:
    """The kernel prints each 32-bit word in the byte order of the machine."""
    words = (digits[start : start + 8] for start in range(0, len(digits), 8))
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    found = ip_address(packed)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


def _process(inode: str, proc: Path) -> str:
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            for fd in (process / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(fd) == f"socket:[{inode}]":
                        name = (process / "comm").read_text(errors="replace").strip()
                        return f"process {process.name} ({printable(name)})"
    return "a process"


def _name(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)
