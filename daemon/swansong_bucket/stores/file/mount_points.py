# SPDX-License-Identifier: Apache-2.0
"""Mount points of this machine at which nothing is mounted now.

A directory below such a mount point is on the disk of the VM, and a store there would be lost with the VM.
The mount points are those of ``/etc/fstab`` and of systemd's mount and automount units.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FSTAB = Path("/etc/fstab")
UNITS = (
    Path("/etc/systemd/system"),
    Path("/run/systemd/system"),
    Path("/run/systemd/generator"),
    Path("/run/systemd/transient"),
)
"""Directories of the operator's units, and of those that systemd generates from ``/etc/fstab``.  Units of the
distribution are not read: some of them, such as ``tmp.mount``, are not in use."""
MOUNTS = Path("/proc/self/mountinfo")
_FILE_BYTES_MAX = 2**24
_UNITS_MAX = 1000
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    number: int
    parent: int
    device: str
    """Major and minor number."""
    root: str
    """Directory of the file system that is visible at the mount point."""
    point: str
    kind: str
    """Type of the file system, for example ``nfs4``."""
    source: str = ""
    """A device, a server or a word."""


def mounted() -> list[Mount]:
    """The mounts of this process's namespace, oldest first."""
    return parsed(_content(MOUNTS))


def parsed(mountinfo: str) -> list[Mount]:
    """Parse ``/proc/self/mountinfo``; malformed lines are left out."""
    found = []
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(), tail.split()
        if len(fields) > 4 and len(kind) > 1 and fields[0].isdigit() and fields[1].isdigit():
            found.append(
                Mount(
                    number=int(fields[0]),
                    parent=int(fields[1]),
                    device=fields[2],
                    root=_plain(fields[3]),
                    point=_plain(fields[4]),
                    kind=kind[0],
                    source=_plain(kind[1]),
                )
            )
    return found


def missing_mount(path: str) -> str | None:
    """The mount point at or above ``path`` at which nothing is mounted now; None if there is none."""
    own = (Path(path), Path(os.path.realpath(path)))
    above = {str(each) for at in own for each in (at, *at.parents)}
    # Only mount points above are resolved: others may be on file servers that do not respond.
    targets = {os.path.realpath(target) for target in _targets() if target in above} - {"/"}
    if not targets:
        return None
    mounts = mounted()
    return max((each for each in targets if not is_mounted(each, mounts)), key=len, default=None)


def is_mounted(target: str, mounts: list[Mount]) -> bool:
    """Whether a file system is mounted at ``target``.

    A bind mount of a directory on itself does not count: ``ReadWritePaths=`` of a unit makes one for each
    directory.  An automount that did not succeed does not count either.
    """
    there = [mount for mount in mounts if mount.point == target]
    parents = {mount.parent for mount in there}
    top = next((mount for mount in there if mount.number not in parents), None)
    if top is None or top.kind == "autofs":
        return False
    above = [mount for mount in mounts if target.startswith(f"{mount.point.rstrip('/')}/")]
    if not above:
        return True
    base = max(enumerate(above), key=lambda each: (len(each[1].point), each[0]))[1]
    itself = os.path.join(base.root, os.path.relpath(target, base.point))
    return (top.device, top.root) != (base.device, itself)


def _targets() -> Iterator[str]:
    for line in _content(FSTAB).splitlines():
        fields = line.split()
        if len(fields) > 1 and not line.lstrip().startswith("#") and fields[1].startswith("/"):
            yield os.path.normpath(_plain(fields[1]))
    for directory in UNITS:
        names: list[str] = []
        with suppress(OSError):
            names = sorted(os.listdir(directory))
        units = [name for name in names if name.endswith((".mount", ".automount"))]
        for name in units[:_UNITS_MAX]:
            for line in _content(directory / name).splitlines():
                key, _, value = line.partition("=")
                if key.strip() == "Where" and value.strip().startswith("/"):
                    yield os.path.normpath(value.strip().replace("%%", "%"))


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


def _content(path: Path) -> str:
    """Text of a small system file; empty if it cannot be read, as a masked unit."""
    try:
        with open(path, "rb") as file:
            return file.read(_FILE_BYTES_MAX).decode("utf-8", "surrogateescape")
    except OSError:
        return ""
