# SPDX-License-Identifier: Apache-2.0
"""The disk or file server behind a directory, and whether it outlives the VM."""

from __future__ import annotations

import os
import re
from pathlib import Path

from swansong_bucket.stores.file.mounts import Mount

SYS = Path("/sys")

_BOOT = ("/", "/boot", "/boot/efi", "/usr")
_SERVERS = {
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3",
    "virtiofs",
}  # fmt: skip
_LOCAL_FUSE = {
    "fuse.bindfs", "fuse.encfs", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.lxcfs",
    "fuse.mergerfs", "fuse.unionfs",
}  # fmt: skip
_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_EPHEMERAL = re.compile(r"Amazon EC2 NVMe Instance Storage|nvme_card\d*|EphemeralDisk")
"""Models of disks that are erased when the VM is terminated."""
_DEPTH_MAX = 8


def mount_of(path: Path, known: list[Mount]) -> Mount:
    """The mount that contains a path: the deepest one, and the last of several at the same point."""
    found = Mount(0, 0, "", "/", "", "an unknown file system")
    for mount in known:
        is_above = os.path.commonpath([mount.point, path]) == mount.point
        if is_above and len(mount.point) >= len(found.point):
            found = mount
    return found


def make_room(path: Path, known: list[Mount]) -> str:
    """Advice for a file system that is full; the operator decides."""
    point = mount_of(Path(os.path.realpath(path)), known).point
    return f"# delete files of other programs in {point}, or mount a larger disk at {path}"


def dies_with_vm(path: Path, known: list[Mount], sys: Path = SYS) -> tuple[str, str]:
    """The reason why files below ``path`` are lost with the VM, and their file system.

    Returns:
        The reason, empty for a file server or a persistent disk other than the boot disk; and the file
        system with its device or server.
    """
    mount = mount_of(Path(os.path.realpath(path)), known)
    where = f"{mount.kind} on {mount.source or 'no device'}, mounted at {mount.point}"
    is_fuse = mount.kind.partition(".")[0] == "fuse" and mount.kind not in _LOCAL_FUSE
    if mount.kind in _SERVERS or is_fuse or ":/" in mount.source:
        return "", where
    if mount.kind in _MEMORY:
        return "it is in memory", where
    disks = disks_of(mount, sys)
    if not disks:
        pools = {mount_of(Path(place), known).source.partition("/")[0] for place in _BOOT}
        if mount.kind == "zfs" and mount.source.partition("/")[0] not in pools:
            return "", where
        return "no disk backs it", where
    boot = {disk for place in _BOOT for disk in disks_of(mount_of(Path(place), known), sys)}
    if shared := disks & boot:
        return f"it is on the boot disk {' and '.join(sorted(shared))}", where
    if lost := {disk for disk in disks if _is_ephemeral(disk, sys)}:
        return f"the disk {' and '.join(sorted(lost))} is erased when the VM is terminated", where
    return "", where


def disks_of(mount: Mount, sys: Path = SYS) -> set[str]:
    """Names of the disks below a mount, through partitions, LVM, encryption and RAID; may be empty."""
    block = sys / "dev" / "block" / mount.device
    if mount.device.startswith("0:"):  # Btrfs and others use anonymous device numbers
        if not mount.source.startswith("/dev/"):
            return set()
        block = sys / "class" / "block" / os.path.basename(mount.source)
        for name in (sys / "class" / "block").glob("dm-*/dm/name"):
            if name.read_text().strip() == os.path.basename(mount.source):
                block = name.parents[1]
    return _whole(block, _DEPTH_MAX)


def _whole(block: Path, depth: int) -> set[str]:
    if not block.exists() or not depth:
        return set()
    real = Path(os.path.realpath(block))
    if (real / "partition").exists():
        real = real.parent
    below = real / "slaves"
    slaves = list(below.iterdir()) if below.is_dir() else []
    if slaves:
        return set().union(*(_whole(slave, depth - 1) for slave in slaves))
    # A loop device is backed by a file, a RAM disk by memory.
    return set() if real.name.startswith(("loop", "ram", "zram")) else {real.name}


def _is_ephemeral(disk: str, sys: Path) -> bool:
    model = sys / "class" / "block" / disk / "device" / "model"
    try:
        return _EPHEMERAL.fullmatch(model.read_text().strip()) is not None
    except OSError:
        return False
