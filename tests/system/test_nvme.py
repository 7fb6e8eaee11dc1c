# SPDX-License-Identifier: Apache-2.0
"""systemd/nvme/swansong-nvme, with loop devices for disks and a directory for /sys."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "systemd" / "nvme" / "swansong-nvme"
EC2 = "Amazon EC2 NVMe Instance Storage"
SIZE_BYTES = 64 << 20
TOOLS = ("losetup", "wipefs", "blkid", "mkfs.ext4", "mountpoint", "cmp")


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
        for name in ("sys/block", "dev"):
            (root / name).mkdir(parents=True)

    def disk(self, name: str, model: str = EC2) -> Path:
        """An empty disk; returns the file behind it."""
        image = self.root / f"{name}.image"
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        self.loops.append(run("losetup", "--find", "--show", image))
        (self.root / "dev" / name).symlink_to(self.loops[-1])
        device = self.root / "sys" / "block" / name / "device"
        device.mkdir(parents=True)
        (device / "model").write_text(f"{model:40}\n")
        return image

    def device(self, name: str) -> Path:
        return self.root / "dev" / name

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPT, *arguments, self.mountpoint],
            env={**os.environ, "SYSFS": str(self.root / "sys"), "DEV": str(self.root / "dev")},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def mounted(self) -> tuple[str, str] | None:
        """Device and type of what is mounted."""
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


@pytest.mark.parametrize("model", [EC2, "nvme_card", "nvme_card0"])
def test_an_empty_disk_is_formatted_and_mounted(machine: Machine, model: str) -> None:
    """Only the ephemeral one of several, of either cloud."""
    machine.disk("nvme0n1", "Amazon Elastic Block Store")
    machine.disk("nvme1n1", "nvme_card-pd")
    machine.disk("nvme2n1", model)
    done = machine.start()
    assert done.returncode == 0, done.stderr
    assert machine.mounted() == (os.path.realpath(machine.device("nvme2n1")), "ext4")
    assert run("blkid", "--probe", "--output", "value", "-s", "LABEL", machine.device("nvme2n1"))
    assert machine.start().returncode == 0  # again: nothing more to do


@pytest.mark.fault("D07")
def test_what_it_formatted_itself_is_kept_over_a_reboot(machine: Machine) -> None:
    """The bytes staged before a reboot are there after it; an empty disk begins anew."""
    machine.disk("nvme0n1")
    assert machine.start().returncode == 0
    (machine.mountpoint / "shard").write_text("weights")
    machine.unmount()
    assert machine.start().returncode == 0
    assert (machine.mountpoint / "shard").read_text() == "weights"


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


def a_holder(machine: Machine, image: Path) -> None:
    (machine.root / "sys" / "block" / "nvme0n1" / "holders" / "dm-0").mkdir(parents=True)


@pytest.mark.parametrize(
    "put", [a_file_system, a_partition_table, a_partition, a_byte_at_its_end, a_holder]
)
def test_a_disk_with_anything_on_it_is_refused(
    machine: Machine, put: Callable[[Machine, Path], None]
) -> None:
    """Not a byte of it changes, and nothing is mounted."""
    image = machine.disk("nvme0n1")
    put(machine, image)
    os.sync()
    before = image.read_bytes()
    done = machine.start()
    assert done.returncode == 1
    assert "left alone" in done.stderr
    assert machine.mounted() is None
    assert not machine.mountpoint.exists()
    assert image.read_bytes() == before


def test_memory_in_place_of_a_disk_only_when_asked(machine: Machine) -> None:
    """Without a disk it fails; with --tmpfs it goes on."""
    assert machine.start().returncode == 1
    assert machine.mounted() is None
    assert machine.start("--tmpfs", "16m").returncode == 0
    assert machine.mounted() == ("swansong", "tmpfs")
