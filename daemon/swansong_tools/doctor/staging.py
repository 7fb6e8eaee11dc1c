# SPDX-License-Identifier: Apache-2.0
"""Staging: existence, permissions, free space, speed; and the disks behind directories."""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from swansong import openat
from swansong_bucket.stores.file import mount_points
from swansong_bucket.stores.file.mount_points import Mount

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Checklist, Judgement, failure, ok, skipped, warning
from swansong_tools.doctor.installation import DAEMON_USER, TRAINER_GROUP, Installation
from swansong_tools.units import human_bytes

_SPEED_BYTES = 64 * 2**20
_BLOCK_BYTES = 2**20
_FREE_BYTES_MIN = 2**30
"""Wanted free space while the size of a checkpoint is unknown."""
_FREE_FILES_MIN = 100
"""Lower bound for the files and directories of one set with its manifest."""
_ENTRIES_MAX = 100_000
_DEPTH_MAX = 30
_UID_MAP = Path("/proc/self/uid_map")
_ALL_UIDS = ["0", "0", str(2**32 - 1)]
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
_LAYERS_MAX = 8


def made(vm: Installation) -> str:
    """Create the directory, or set its owner and mode."""
    return fixes.then(fixes.directory(vm.staging, "2750"), fixes.restart())


CHECKS = Checklist(family="staging", fix=made)


@CHECKS.add("staging")
def exists(vm: Installation) -> Judgement:
    """The directory exists."""
    path = vm.staging
    if not path.exists():
        return failure(f"staging.path {path} does not exist: not created, or not mounted", made(vm))
    if not path.is_dir():
        return failure(f"staging.path {path} is not a directory", made(vm))
    kind = mount_of(path, mount_points.mounted()).kind
    return ok(f"{path} exists, on {kind}")


@CHECKS.add("staging rights", needs=("staging",))
def rights(vm: Installation) -> Judgement:
    """The daemon can write to staging."""
    path, run, daemon = vm.staging, vm.run, vm.user
    where = run if run.is_dir() else path
    if daemon.may("rwx", where):
        return ok(f"{daemon.name} may write to {where}")
    facts = where.stat()
    found = (
        f"{daemon.name} may not write to {where} (owner {facts.st_uid}, group {facts.st_gid}, mode "
        f"{facts.st_mode & 0o7777:o})"
    )
    if facts.st_uid == daemon.uid and os.statvfs(where).f_flag & os.ST_RDONLY:
        allow = fixes.drop_in("staging", f"ReadWritePaths={path}")
        return failure(f"{found}: mounted read-only", allow or f"# mount {path} for writing")
    owner = f"{DAEMON_USER}:{TRAINER_GROUP}" if fixes.has_daemon_user() else daemon.name
    return failure(
        found,
        fixes.then(
            fixes.as_root(f"chown {owner} {fixes.quoted(where)}"),
            fixes.as_root(f"chmod {'3770' if where == run else '2750'} {fixes.quoted(where)}"),
            fixes.restart(),
        ),
    )


@CHECKS.add("staging parents", needs=("staging",))
def parents(vm: Installation) -> Judgement:
    """No other user can replace staging."""
    if _UID_MAP.read_text().split() != _ALL_UIDS:
        return skipped("a user namespace hides the owners of directories")
    real = Path(os.path.realpath(vm.staging))
    facts = {place: place.stat() for place in (real, *real.parents)}
    return judge_parents(
        {place: (found.st_uid, found.st_mode) for place, found in facts.items()}, vm.user.uid
    )


def judge_parents(facts: Mapping[Path, tuple[int, int]], daemon_uid: int) -> Judgement:
    """Whether only root and the daemon can create, rename and replace directories above a run.

    Args:
        facts: owner and mode of staging and of every directory above it, staging first.
        daemon_uid: the user that the daemon runs as.
    """
    staging = next(iter(facts))
    for place, (uid, mode) in facts.items():
        name = fixes.quoted(place)
        if uid not in (0, daemon_uid):
            return failure(
                f"user id {uid} owns {place} and could replace its contents",
                fixes.as_root(f"chown {'swansong' if place == staging else 'root'} {name}"),
            )
        # In a directory with the sticky bit, such as /tmp, users can replace only their own files.
        is_shared = mode & stat.S_ISVTX and place != staging
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_shared:
            return failure(
                f"{place} has the mode {stat.S_IMODE(mode):o}: users other than the daemon could replace "
                "its contents",
                fixes.as_root(f"chmod go-w {name}"),
            )
    return ok(f"only root and the daemon can write to {staging} and the directories above it")


@CHECKS.add("free space", needs=("staging",))
def space(vm: Installation) -> Judgement:
    """Staging has room for two checkpoints."""
    return judge_space(vm.staging, free(vm.staging), newest(vm.run))


class Room(NamedTuple):
    """Bytes and number of files."""

    size_bytes: int
    files: int


def free(path: Path) -> Room:
    """Free space for unprivileged users on the file system of ``path``."""
    facts = os.statvfs(path)
    files = (
        facts.f_favail if facts.f_files else sys.maxsize
    )  # zero: the file system allocates inodes dynamically
    return Room(facts.f_bavail * facts.f_frsize, files)


def newest(run: Path) -> Room:
    """Size of the newest set in the staging directory of a run; zeros if there is none.

    Trainers write to the directory, and this process may be root's.  So the walk uses descriptors, follows no
    link, and is bounded.
    """
    with suppress(OSError), openat.held(openat.open_directory(run)) as run_fd:
        with os.scandir(run_fd) as entries:
            times = {
                entry.name: entry.stat(follow_symlinks=False).st_mtime_ns
                for entry in islice(entries, _ENTRIES_MAX)
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            }
        return _size(max(times, key=times.__getitem__), run_fd) if times else Room(0, 0)
    return Room(0, 0)


def _size(directory: str, run_fd: int) -> Room:
    size_bytes, entries = 0, 1
    for parent, directories, names, fd in os.fwalk(directory, dir_fd=run_fd):
        entries += len(directories) + len(names)
        if entries > _ENTRIES_MAX:
            break
        if parent.count(os.sep) >= _DEPTH_MAX:
            directories.clear()
        for name in names:
            size_bytes += os.stat(name, dir_fd=fd, follow_symlinks=False).st_size
    return Room(size_bytes, entries)


def judge_space(path: Path, free: Room, newest: Room) -> Judgement:
    """Whether two more checkpoints of the newest one's size fit.

    Args:
        newest: size of the newest checkpoint; zeros if there is none.
    """
    one_bytes = max(newest.size_bytes, _SPEED_BYTES)
    wanted = Room(
        2 * one_bytes if newest.size_bytes else _FREE_BYTES_MIN,
        max(2 * newest.files, _FREE_FILES_MIN),
    )
    lacking = Room(wanted.size_bytes - free.size_bytes, wanted.files - free.files)
    bytes_free = f"{human_bytes(free.size_bytes)} free in {path}"
    if free.files < max(newest.files, _FREE_FILES_MIN):
        return failure(
            f"{path} has inodes for {free.files} more files: not enough for one checkpoint",
            more_room(path, lacking),
        )
    if free.size_bytes < _SPEED_BYTES and not newest.size_bytes:
        return failure(f"{bytes_free}: not enough for any checkpoint", more_room(path, lacking))
    size = f"the newest checkpoint has {human_bytes(newest.size_bytes)}"
    if free.size_bytes < one_bytes and newest.size_bytes:
        return failure(
            f"{bytes_free}: not enough for one checkpoint; {size}", more_room(path, lacking)
        )
    if not newest.size_bytes:
        found = f"{bytes_free}; the size of a checkpoint is not known yet"
        return ok(found) if lacking.size_bytes <= 0 else warning(found, more_room(path, lacking))
    found = f"{bytes_free}, {size}"
    if free.files < 2 * newest.files:
        return warning(
            f"{found} in {newest.files} files, and there are inodes for {free.files}: not enough for two",
            more_room(path, lacking),
        )
    if free.size_bytes < 2 * newest.size_bytes:
        return warning(f"{found}: not enough for two", more_room(path, lacking))
    return ok(found)


def more_room(path: Path, lacking: Room) -> str:
    """Enlarge a tmpfs until the next boot; any other file system is the operator's decision.

    A tmpfs gets at most half of the memory, as the kernel's default.
    """
    known = mount_points.mounted()
    mount = mount_of(Path(os.path.realpath(path)), known)
    if mount.kind == "tmpfs":
        facts = os.statvfs(mount.point)
        size_bytes = facts.f_blocks * facts.f_frsize + max(lacking.size_bytes, 0)
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size_bytes <= memory_bytes // 2:
            size = f"size={-(-size_bytes // 2**20)}m"
            inodes = f",nr_inodes={facts.f_files + lacking.files}" if lacking.files > 0 else ""
            point = fixes.quoted(mount.point)
            return fixes.as_root(f"mount -o remount,{size}{inodes} {point}")
    return make_room(path, known)


@CHECKS.add("disk speed", needs=("staging rights",))
def speed(vm: Installation) -> Judgement:
    """The time to write and read 64 MiB."""
    path = vm.staging
    if free(path).size_bytes < 2 * _SPEED_BYTES:
        return skipped(f"not measured: less than {2 * _SPEED_BYTES / 1e6:.0f} MB are free")
    name = path / f".swansong-doctor-{secrets.token_hex(4)}"
    block = os.urandom(_BLOCK_BYTES)  # random, because compression would inflate the speed
    with openat.held(
        os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    ) as fd:
        os.unlink(name)  # the kernel frees the file with its descriptor, even after a crash
        begun_mono_s = time.monotonic()
        for _ in range(_SPEED_BYTES // _BLOCK_BYTES):
            os.write(fd, block)
        os.fsync(fd)
        written_mono_s = time.monotonic()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache would be measured
        os.lseek(fd, 0, os.SEEK_SET)
        buffer = mmap.mmap(-1, _BLOCK_BYTES)
        while os.readv(fd, [buffer]):
            pass
        read_mono_s = time.monotonic()
    return ok(
        f"writes {_rate(written_mono_s - begun_mono_s)}, reads {_rate(read_mono_s - written_mono_s)} "
        f"({_SPEED_BYTES / 1e6:.0f} MB, synced)"
    )


def _rate(took_s: float) -> str:
    return f"{_SPEED_BYTES / 1e6 / max(took_s, 1e-9):.0f} MB/s"


# ---------------------------------------------------------------- disks


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
    return _whole(block, _LAYERS_MAX)


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
