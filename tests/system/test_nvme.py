# SPDX-License-Identifier: Apache-2.0
"""systemd/nvme/swansong_nvme.py, with loop devices as disks and directories as /sys and /dev."""

from __future__ import annotations

import os
import random
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from testkit import REPOSITORY

SCRIPT = REPOSITORY / "systemd" / "nvme" / "swansong_nvme.py"
EC2 = "Amazon EC2 NVMe Instance Storage"
SERIAL = "AWS258BF695E953E5141"
SIZE_BYTES = 64 << 20
LARGE_BYTES = 16 << 30
"""Too large to be read completely; the file behind it is sparse."""
TOOLS = ("losetup", "wipefs", "blkid", "mkfs.ext4")


def run(*command: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()


class Machine:
    """Disks by name, and the mount point."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mountpoint = root / "mnt"
        self.loops: list[str] = []
        self.record = root / "nvme.uuid"
        for name in ("sys/block", "dev/disk/by-id"):
            (root / name).mkdir(parents=True)

    def disk(self, name: str, model: str = EC2, *, serial: str = SERIAL) -> Path:
        """An empty disk; returns the file behind it."""
        image = self.root / f"{name}.image"
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        self.loops.append(run("losetup", "--find", "--show", image))
        (self.root / "dev" / name).symlink_to(self.loops[-1])
        device = self.root / "sys" / "block" / name / "device"
        device.mkdir(parents=True)
        (device / "model").write_text(f"{model:40}\n")
        (device / "serial").write_text(f"{serial:20}\n")
        return image

    def flush(self, name: str) -> None:
        """Write what was written to the disk into the file behind it; os.sync() waits for all disks."""
        fd = os.open(self.device(name), os.O_RDWR)
        os.fsync(fd)
        os.close(fd)

    def link(self, name: str, by_id: str) -> None:
        """Make a link in /dev/disk/by-id, as udev does."""
        (self.root / "dev" / "disk" / "by-id" / by_id).symlink_to(self.device(name))

    def rename(self, name: str, to: str) -> None:
        """Rename a disk, as after a boot that found the disks in another order."""
        for directory in ("dev", "sys/block"):
            (self.root / directory / name).rename(self.root / directory / to)

    def device(self, name: str) -> Path:
        return self.root / "dev" / name

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-I", SCRIPT, *arguments, self.mountpoint],
            env={
                **os.environ,
                "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
                "SYSFS": str(self.root / "sys"),
                "DEV": str(self.root / "dev"),
                "RECORD": str(self.record),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def mounted(self) -> tuple[str, str] | None:
        """Device and type of the mounted file system."""
        for line in Path("/proc/mounts").read_text().splitlines():
            device, where, kind, *_ = line.split()
            if where == str(self.mountpoint):
                return device, kind
        return None

    def unmount(self) -> None:
        if self.mounted():
            run("umount", self.mountpoint)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=path)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    made = Machine(tmp_path)
    yield made
    made.unmount()
    for loop in made.loops:
        run("losetup", "--detach", loop)


@pytest.mark.parametrize("model", [EC2, "nvme_card", "nvme_card15"])
def test_an_empty_disk_is_formatted_and_mounted(machine: Machine, model: str) -> None:
    """Of several disks only the ephemeral one, of either cloud."""
    machine.disk("nvme0n1", "Amazon Elastic Block Store", serial="vol01234567890abcdef")
    machine.disk("nvme1n1", "nvme_card-pd", serial="nvme_card-pd")
    machine.disk("nvme2n1", model)
    machine.link("nvme2n1", "google-local-nvme-ssd-0")
    done = machine.start()
    assert done.returncode == 0, done.stderr
    assert machine.mounted() == (os.path.realpath(machine.device("nvme2n1")), "ext4")
    uuid = run("blkid", "--probe", "--output", "value", "-s", "UUID", machine.device("nvme2n1"))
    assert machine.record.read_text() == f"{uuid}\n"
    assert machine.start().returncode == 0  # a second start changes nothing


@pytest.mark.parametrize(
    "model",
    [
        "nvme_card1-pd", "nvme_cards", "NVMe_card", f"{EC2} 2", f"An {EC2}", "Amazon EC2 NVMe", "",
    ],
)  # fmt: skip
def test_a_similar_model_name_is_not_an_ephemeral_disk(machine: Machine, model: str) -> None:
    """Only the exact model name counts: a disk of any other model is not read."""
    image = machine.disk("nvme0n1", model)
    before = image.read_bytes()
    assert machine.start().returncode == 1
    assert machine.mounted() is None
    assert image.read_bytes() == before


@pytest.mark.parametrize(
    ("serial", "by_id"),
    [
        ("vol01234567890abcdef", ""),
        ("nvme_card-pd", ""),
        (SERIAL, "nvme-Amazon_Elastic_Block_Store_vol01234567890abcdef"),
        (SERIAL, "google-my-data"),
        (SERIAL, "nvme-nvme_card-pd_nvme_card-pd"),
        (SERIAL, "scsi-0Google_PersistentDisk_my-data"),
    ],
)
def test_a_persistent_disk_is_refused_with_any_model(
    machine: Machine, serial: str, by_id: str
) -> None:
    """Its serial number or a name in /dev/disk/by-id identifies it, and is part of the reason."""
    image = machine.disk("nvme0n1", serial=serial)
    if by_id:
        machine.link("nvme0n1", by_id)
    before = image.read_bytes()
    done = machine.start()
    assert done.returncode == 1
    assert f"persistent disk by its {'name' if by_id else 'serial number'}" in done.stderr
    assert (by_id or serial) in done.stderr
    assert image.read_bytes() == before


@pytest.mark.fault("D07")
def test_its_disk_is_found_under_another_name(machine: Machine) -> None:
    """Staged bytes exist after a reboot.  A blank disk that comes first does not replace the disk."""
    machine.disk("nvme1n1")
    assert machine.start().returncode == 0
    (machine.mountpoint / "shard").write_text("weights")
    machine.unmount()
    machine.rename("nvme1n1", "nvme2n1")
    machine.disk("nvme0n1")
    assert machine.start().returncode == 0
    assert (machine.mountpoint / "shard").read_text() == "weights"


@pytest.mark.fault("D07")
def test_a_disk_that_was_erased_is_formatted_again(machine: Machine) -> None:
    """After stop and start the VM has a blank disk, and the record of the previous disk is replaced."""
    image = machine.disk("nvme0n1")
    assert machine.start().returncode == 0
    before = machine.record.read_text()
    machine.unmount()
    os.truncate(image, 0)
    os.truncate(image, SIZE_BYTES)
    run("blockdev", "--flushbufs", machine.device("nvme0n1"))
    done = machine.start()
    assert done.returncode == 0, done.stderr
    assert machine.mounted()
    assert machine.record.read_text() != before


@pytest.mark.parametrize("forged", [False, True])
def test_a_file_system_that_only_has_its_label_is_refused(machine: Machine, forged: bool) -> None:
    """Another VM's disk with our label is not mounted without a record that root has written."""
    image = machine.disk("nvme0n1")
    run("mkfs.ext4", "-q", "-L", "swansong", machine.device("nvme0n1"))
    if forged:
        uuid = run("blkid", "--probe", "--output", "value", "-s", "UUID", machine.device("nvme0n1"))
        machine.record.write_text(f"{uuid}\n")
        os.chown(machine.record, 65534, 65534)
    machine.flush("nvme0n1")
    before = image.read_bytes()
    done = machine.start()
    assert done.returncode == 1
    assert "it holds ext4 swansong" in done.stderr
    assert machine.mounted() is None
    assert image.read_bytes() == before


def a_file_system(machine: Machine, image: Path) -> None:
    run("mkfs.ext4", "-q", machine.device("nvme0n1"))


def a_partition_table(machine: Machine, image: Path) -> None:
    with image.open("r+b") as file:
        file.seek(510)
        file.write(b"\x55\xaa")


def a_partition(machine: Machine, image: Path) -> None:
    partition = machine.root / "sys" / "block" / "nvme0n1" / "nvme0n1p1"
    partition.mkdir()
    (partition / "partition").write_text("1\n")


def a_byte_at_its_end(machine: Machine, image: Path) -> None:
    with image.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")


def a_block_in_its_middle(machine: Machine, image: Path) -> None:
    with image.open("r+b") as file:
        file.seek(SIZE_BYTES // 2 + 12345)
        file.write(b"x")


def a_holder(machine: Machine, image: Path) -> None:
    (machine.root / "sys" / "block" / "nvme0n1" / "holders" / "dm-0").mkdir(parents=True)


@pytest.mark.parametrize(
    "put",
    [
        a_file_system, a_partition_table, a_partition, a_byte_at_its_end, a_block_in_its_middle,
        a_holder,
    ],
)  # fmt: skip
def test_a_disk_with_anything_on_it_is_refused(
    machine: Machine, put: Callable[[Machine, Path], None]
) -> None:
    """No byte of the disk changes, and nothing is mounted."""
    image = machine.disk("nvme0n1")
    put(machine, image)
    machine.flush("nvme0n1")
    before = image.read_bytes()
    done = machine.start()
    assert done.returncode == 1
    assert "left alone" in done.stderr
    assert machine.mounted() is None
    assert not machine.mountpoint.exists()
    assert image.read_bytes() == before


def test_a_large_disk_is_sampled_everywhere(tmp_path: Path) -> None:
    """Data of two of 65,536 sections is found wherever it begins; the rest of the disk is zero."""
    script = runpy.run_path(str(SCRIPT))
    first_data, two_sections = script["first_data"], 2 * LARGE_BYTES // 65_536
    offsets = sorted(script["block_offsets"](LARGE_BYTES))
    assert offsets[0] == 0
    assert offsets[-1] + 4096 == LARGE_BYTES
    assert all(after - before < two_sections for before, after in pairwise(offsets))
    with (tmp_path / "image").open("w+b") as file:
        file.truncate(LARGE_BYTES)
        assert first_data(file.fileno()) is None
        place = random.randrange(8 << 20, LARGE_BYTES - (8 << 20)) // 512 * 512
        file.seek(place)
        file.write(random.randbytes(two_sections))
        file.flush()
        assert place - 4096 < first_data(file.fileno()) < place + two_sections


def test_a_disk_in_use_is_refused(machine: Machine) -> None:
    """Another program has opened the blank disk exclusively."""
    machine.disk("nvme0n1")
    fd = os.open(machine.device("nvme0n1"), os.O_RDONLY | os.O_EXCL)
    try:
        done = machine.start()
    finally:
        os.close(fd)
    assert done.returncode == 1
    assert "it cannot be read" in done.stderr


def test_memory_replaces_a_disk_only_on_request(machine: Machine) -> None:
    """Without a disk the script fails; with --tmpfs it mounts a tmpfs."""
    assert machine.start().returncode == 1
    assert machine.mounted() is None
    assert machine.start("--tmpfs", "16m").returncode == 0
    assert machine.mounted() == ("swansong", "tmpfs")
