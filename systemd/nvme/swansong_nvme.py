#!/opt/swansong/bin/python -I
# SPDX-License-Identifier: Apache-2.0
"""Mounts an instance-store NVMe disk for staging; swansong-nvme.service runs this at boot.

::

    swansong-nvme [--tmpfs SIZE] MOUNTPOINT

A disk is usable if its model is that of an ephemeral disk, and neither its serial number nor its names in
/dev/disk/by-id are those of a persistent disk.  The disk that this VM formatted on an earlier boot is mounted
first; its UUID is in /var/lib/swansong/nvme.uuid.  Otherwise a blank disk is formatted and recorded there.
A disk with any other content is left alone.  With --tmpfs, memory replaces a missing disk.

Standard library only.  SYSFS, DEV and RECORD in the environment are for tests.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path(os.environ.get("SYSFS", "/sys"))
DEV = Path(os.environ.get("DEV", "/dev"))
RECORD = Path(os.environ.get("RECORD", "/var/lib/swansong/nvme.uuid"))

LABEL = "swansong"
MOUNT_OPTIONS = "noatime,nodev,nosuid,noexec"
EPHEMERAL_MODEL = re.compile(r"Amazon EC2 NVMe Instance Storage|nvme_card[0-9]*")
"""EBS volumes are "Amazon Elastic Block Store", persistent disks of Compute Engine "nvme_card-pd"."""
PERSISTENT_SERIAL = re.compile(r"vol.*|.*-pd")
PERSISTENT_LINK = re.compile(
    r"google-(?!local-(nvme-)?ssd-).*|.*(Elastic_Block_Store|PersistentDisk|nvme_card-pd).*"
)

SAMPLES = 65_536
"""One block is read in each of these equal sections of a disk: data that fill two sections are found."""
BLOCK_BYTES = 4096
EDGE_BYTES = 4 << 20
"""Read completely at both ends, where partition tables, RAID and volume managers write their signatures."""
BATCH = 256
LIMIT_S = 60.0
"""Limit for the samples of one disk; local NVMe takes a few seconds."""


class Refused(Exception):
    """A disk must not be formatted; the text says why."""


@dataclass(frozen=True, slots=True)
class Disk:
    block: Path
    """Its directory in sysfs."""
    device: Path
    model: str

    def __str__(self) -> str:
        return f"{self.device} ({self.model})"


def say(line: str) -> None:
    print(f"swansong-nvme: {line}", file=sys.stderr, flush=True)


def run(*command: str | Path) -> str:
    """Standard output of a command.

    Raises:
        subprocess.CalledProcessError: the command failed; its messages are on standard error.
    """
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return done.stdout.strip()


# ------------------------------------------------------------ which disks


def ephemeral_disks() -> Iterator[Disk]:
    """Disks whose model is that of an ephemeral disk, in the order of their names."""
    found = (SYSFS / "block").glob("nvme*")
    for block in sorted(found, key=lambda path: (len(path.name), path.name)):
        model, device = attribute(block, "model"), DEV / block.name
        if EPHEMERAL_MODEL.fullmatch(model) and device.exists():
            yield Disk(block, device, model)


def attribute(block: Path, name: str) -> str:
    """An attribute that the disk reports, without trailing blanks; empty if it is missing."""
    try:
        return (block / "device" / name).read_text(errors="replace").strip()
    except OSError:
        return ""


def links(device: Path) -> list[str]:
    """Names of a disk in /dev/disk/by-id, which udev creates from what the disk and the cloud report."""
    by_id = DEV / "disk" / "by-id"
    names = os.listdir(by_id) if by_id.is_dir() else []
    return [name for name in names if os.path.realpath(by_id / name) == os.path.realpath(device)]


# ------------------------------------------------------------ what is on a disk


def refuse_unless_blank(disk: Disk) -> None:
    """Search a disk for data, without writing to it.

    Raises:
        Refused: the disk is persistent, in use, unreadable, or not blank.
    """
    serial = attribute(disk.block, "serial")
    if PERSISTENT_SERIAL.fullmatch(serial):
        raise Refused(f"it is a persistent disk by its serial number, {serial}")
    for name in links(disk.device):
        if PERSISTENT_LINK.fullmatch(name):
            raise Refused(f"it is a persistent disk by its name, {name}")
    if any(disk.block.glob("*/partition")) or any(disk.block.glob("holders/*")):
        raise Refused("it has partitions, or something is built on it")
    try:
        signatures = run(
            "wipefs", "--no-act", "--noheadings", "--output", "TYPE,LABEL", disk.device
        )
        # Exclusive: fails while the disk is mounted, or part of another device.
        fd = os.open(disk.device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(f"it cannot be read: {error}") from error
    if signatures:
        os.close(fd)
        found = ", ".join(" ".join(line.split()) for line in signatures.splitlines())
        raise Refused(f"it holds {found}, and {RECORD} does not name it as made by this VM")
    try:
        offset = first_data(fd)
    except OSError as error:
        raise Refused(f"it cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
    if offset is not None:
        raise Refused(f"it is not blank: there are data at byte {offset}")


def first_data(fd: int) -> int | None:
    """Offset of a block that is not all zeros, or None: reads both ends, and samples in between.

    Raises:
        Refused: the disk is too slow.
        OSError: it cannot be read.
    """
    give_up_mono_s = time.monotonic() + LIMIT_S
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    offsets = list(block_offsets(os.lseek(fd, 0, os.SEEK_END)))
    zeros = bytes(BLOCK_BYTES)
    for start in range(0, len(offsets), BATCH):
        batch = offsets[start : start + BATCH]
        for offset in batch:  # all at once: a disk answers many requests as fast as one
            os.posix_fadvise(fd, offset, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
        for offset in batch:
            block = os.pread(fd, BLOCK_BYTES, offset)
            if block != zeros[: len(block)]:
                return offset
        if time.monotonic() > give_up_mono_s:
            raise Refused(f"it is too slow: {LIMIT_S:.0f} s were not enough to look at it")
    return None


def block_offsets(size_bytes: int) -> Iterator[int]:
    """Offsets of the blocks to read: both ends, then one block at random in each of SAMPLES sections."""
    yield from range(0, min(EDGE_BYTES, size_bytes), BLOCK_BYTES)
    yield from range(max(0, size_bytes - EDGE_BYTES), size_bytes, BLOCK_BYTES)
    blocks = size_bytes // BLOCK_BYTES
    sections = min(SAMPLES, blocks)
    for section in range(sections):
        first, last = section * blocks // sections, (section + 1) * blocks // sections - 1
        yield random.randint(first, last) * BLOCK_BYTES  # noqa: S311 - no secret


# ------------------------------------------------------------ what this VM has formatted


def recorded_uuid() -> str:
    """UUID of the file system that this VM made, else empty.  A record of another user is ignored."""
    try:
        fd = os.open(RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with os.fdopen(fd) as file:
        return file.read(100).strip() if os.fstat(fd).st_uid == os.geteuid() else ""


def record(made: str) -> None:
    """Record a UUID so that it survives a power cut."""
    new = RECORD.with_name(f"{RECORD.name}.new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "w") as file:
        file.write(f"{made}\n")
        file.flush()
        os.fsync(fd)
    new.rename(RECORD)
    directory_fd = os.open(RECORD.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.fsync(directory_fd)
    os.close(directory_fd)


def uuid_on(disk: Disk) -> str:
    """UUID of the file system on a disk, read from the disk itself; empty for a disk without one."""
    try:
        return run("blkid", "--probe", "--match-tag", "UUID", "--output", "value", disk.device)
    except subprocess.CalledProcessError:
        return ""


def make_file_system(disk: Disk) -> None:
    """Format a disk.  The UUID is recorded first: a power cut in between leaves a UUID that no disk has."""
    made = str(uuid.uuid4())
    record(made)
    lazily = "lazy_itable_init=1,lazy_journal_init=1"
    run("mkfs.ext4", "-q", "-m", "0", "-L", LABEL, "-U", made, "-E", lazily, disk.device)


# ------------------------------------------------------------ mounting


def usable_disk() -> Disk | None:
    """The disk that this VM formatted on an earlier boot, or a blank one, which is formatted now."""
    disks, own = list(ephemeral_disks()), recorded_uuid()
    for disk in disks:
        if own and uuid_on(disk) == own:
            return disk
    for disk in disks:
        try:
            refuse_unless_blank(disk)
        except Refused as reason:
            say(
                f"{disk} is left alone: {reason}; if nothing on it is needed: "
                f"blkdiscard --zeroout {disk.device}"
            )
            continue
        say(f"formatting {disk}")
        make_file_system(disk)
        return disk
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="swansong-nvme", description="mount an ephemeral NVMe disk"
    )
    parser.add_argument("--tmpfs", metavar="SIZE", help="memory in place of a disk that is missing")
    parser.add_argument("mountpoint", type=Path, metavar="MOUNTPOINT")
    args = parser.parse_args()
    if args.mountpoint.is_mount():
        say(f"{args.mountpoint} is mounted already")
        return 0
    disk = usable_disk()
    if disk is None and not args.tmpfs:
        say("no ephemeral NVMe disk to use")
        return 1
    args.mountpoint.mkdir(parents=True, exist_ok=True)
    if disk is not None:
        run("mount", "-t", "ext4", "-o", MOUNT_OPTIONS, disk.device, args.mountpoint)
        say(f"{disk} is mounted at {args.mountpoint}")
    else:
        options = f"size={args.tmpfs},nodev,nosuid,noexec"
        run("mount", "-t", "tmpfs", "-o", options, "swansong", args.mountpoint)
        say(f"no disk to use: {args.tmpfs} of memory at {args.mountpoint}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, subprocess.CalledProcessError) as failure:
        say(f"failed: {failure}")
        sys.exit(1)
