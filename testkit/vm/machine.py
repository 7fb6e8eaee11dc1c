# SPDX-License-Identifier: Apache-2.0
"""A VM that is switched off by its power: QEMU, its disk, its power button, and the journal afterwards."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from testkit.nspawn.build import run
from testkit.vm.evidence import Story, stories
from testkit.vm.image import Image
from testkit.waiting import until

METADATA = "169.254.169.254"
"""Address at which the VM reaches every port on loopback of the host."""
_NETWORK = f"user,id=net,net=169.254.0.0/16,host={METADATA},dns=169.254.0.3,dhcpstart=169.254.10.15"

_WITHOUT_LOGIN = ("systemd.mask=serial-getty@ttyS0.service", "systemd.mask=getty@tty1.service")


class Machine:
    """One VM with its disk.

    Args:
        image: the image that is copied to the disk.
        directory: for the disk and the output of QEMU; created here.
        vendor: manufacturer in the firmware.
    """

    def __init__(self, image: Image, directory: Path, vendor: str) -> None:
        directory.mkdir()
        self.name = directory.name
        self.disk = directory / "disk.ext4"
        self.serial = directory / "serial"
        self._image = image
        self._directory = directory
        self._vendor = vendor
        self._nvme: Path | None = None
        self._qemu: subprocess.Popen[bytes] | None = None
        self._control = directory / "control"
        run("cp", "--sparse=always", str(image.disk), str(self.disk), timeout_s=60)

    def write(self, files: Mapping[str, str]) -> None:
        """Write files to the disk while the VM is off, as cloud-init would at the boot."""
        orders: list[str] = []
        for number, (path, text) in enumerate(files.items()):
            given = self._directory / f"given-{number}"
            given.write_text(text)
            orders += [f"mkdir {parent}" for parent in list(reversed(Path(path).parents))[1:]]
            orders += [f"rm {path}", f"write {given} {path}"]
        script = self._directory / "orders"
        script.write_text("\n".join([*orders, ""]))
        run("debugfs", "-w", "-f", str(script), str(self.disk), timeout_s=60)
        for path, text in files.items():  # debugfs reports no errors
            assert self._read(f"cat {path}") == text, f"{path} could not be written"

    def insert_nvme(self) -> None:
        """Insert a blank ephemeral disk."""
        self._nvme = self._directory / "nvme"
        self._nvme.unlink(missing_ok=True)
        with self._nvme.open("wb") as file:
            file.truncate(256 * 2**20)

    def power_on(self) -> None:
        """Boot."""
        self._control.unlink(missing_ok=True)
        drives = ["-drive", f"file={self.disk},if=virtio,format=raw,cache=unsafe"]
        if self._nvme:
            drives += ["-drive", f"file={self._nvme},if=none,id=nvme,format=raw,cache=unsafe"]
            drives += ["-device", "nvme,serial=ephemeral,drive=nvme"]
        command = [
            "qemu-system-x86_64", *self._image.boot_arguments(*_WITHOUT_LOGIN), *drives,
            "-netdev", _NETWORK, "-device", "virtio-net-pci,netdev=net",
            "-smbios", f"type=1,manufacturer={self._vendor},product={self._vendor}",
            "-serial", f"file:{self.serial}", "-qmp", f"unix:{self._control},server=on,wait=off",
        ]  # fmt: skip
        with (self._directory / "qemu.log").open("wb") as log:
            self._qemu = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(self._control.exists, what="QEMU")

    @property
    def is_on(self) -> bool:
        return self._qemu is not None and self._qemu.poll() is None

    def push_button(self) -> None:
        """Press the ACPI power button."""
        self._order("system_powerdown")

    def cut_power(self) -> None:
        """End the VM immediately."""
        assert self._qemu is not None
        with suppress(OSError):
            self._order("quit")
        self._qemu.wait(60)

    def is_off_within(self, seconds: float) -> bool:
        """Whether the VM switches itself off in this time."""
        assert self._qemu is not None
        try:
            self._qemu.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def journal(self) -> list[Story]:
        """The events in the journal on the disk, one story for each boot, the oldest first."""
        assert not self.is_on
        found = self._directory / "journal"
        shutil.rmtree(found, ignore_errors=True)
        found.mkdir()
        # 1: the file system was repaired, as after every power cut.
        done = subprocess.run(
            ["e2fsck", "-fy", self.disk], check=False, capture_output=True, timeout=60
        )
        assert done.returncode in (0, 1), done.stdout
        self._read(f"rdump /var/log/journal {found}")
        lines = run(
            "journalctl", f"--directory={found}/journal", "--output=json", "--quiet", timeout_s=60
        )
        return stories(lines.splitlines())

    def _read(self, order: str) -> str:
        """Output of one debugfs command."""
        return run("debugfs", "-R", order, str(self.disk), timeout_s=60)

    def _order(self, name: str) -> None:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(10)
            channel.connect(str(self._control))
            with channel.makefile("rw") as lines:
                lines.readline()
                for order in ("qmp_capabilities", name):
                    lines.write(json.dumps({"execute": order}) + "\n")
                    lines.flush()
                    while line := lines.readline():
                        if "return" in json.loads(line):
                            break

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_on:
            assert self._qemu is not None
            self._qemu.kill()
            self._qemu.wait(60)
        if self.serial.exists():  # pytest shows it if the test has failed
            print(f"{self.name}:", self.serial.read_text(errors="replace")[-3000:])
