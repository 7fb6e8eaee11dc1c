# SPDX-License-Identifier: Apache-2.0
"""A VM that is really switched off: QEMU, its disk, its power button, and what the dead disk shows."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from testkit.nspawn.build import run
from testkit.vm.evidence import Story, stories
from testkit.vm.image import Image
from testkit.waiting import until

METADATA = "169.254.169.254"
"""Loopback as the VM sees it: every port there is a port of the emulators here."""
_NETWORK = f"user,id=net,net=169.254.0.0/16,host={METADATA},dns=169.254.0.3,dhcpstart=169.254.10.15"

_NOBODY_LOGS_IN = ("systemd.mask=serial-getty@ttyS0.service", "systemd.mask=getty@tty1.service")


class Machine:
    """One VM, from its disk to its end.

    Args:
        image: what the disk is a copy of.
        directory: for the disk and all that QEMU writes; made here.
        vendor: what the firmware says of who made the machine.
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
        """Put files on the disk while the VM is off, as cloud-init would when it starts."""
        orders: list[str] = []
        for number, (path, text) in enumerate(files.items()):
            given = self._directory / f"given-{number}"
            given.write_text(text)
            orders += [f"mkdir {parent}" for parent in list(reversed(Path(path).parents))[1:]]
            orders += [f"rm {path}", f"write {given} {path}"]
        script = self._directory / "orders"
        script.write_text("\n".join([*orders, ""]))
        run("debugfs", "-w", "-f", str(script), str(self.disk), timeout_s=60)
        for path, text in files.items():  # debugfs fails in silence
            assert self._read(f"cat {path}") == text, f"{path} could not be written"

    def insert_nvme(self) -> None:
        """A blank local disk, of the kind whose content ends with the VM."""
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
            "qemu-system-x86_64", *self._image.boot_arguments(*_NOBODY_LOGS_IN), *drives,
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
        """The ACPI power button: all that the operating system is told."""
        self._order("system_powerdown")

    def cut_power(self) -> None:
        """The end, whatever the VM is doing."""
        assert self._qemu is not None
        with suppress(OSError):
            self._order("quit")
        self._qemu.wait(20)

    def is_off_within(self, seconds: float) -> bool:
        """Whether the VM switches itself off in that time."""
        assert self._qemu is not None
        try:
            self._qemu.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def journal(self) -> list[Story]:
        """What the journal on the dead disk tells, one story for each boot, the oldest first."""
        assert not self.is_on
        found = self._directory / "journal"
        shutil.rmtree(found, ignore_errors=True)
        found.mkdir()
        # 1: it had to be repaired, as after every power cut.
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
        """What debugfs answers to one order."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_on:
            assert self._qemu is not None
            self._qemu.kill()
            self._qemu.wait(20)
        if self.serial.exists():  # pytest shows it if the test has failed
            print(f"{self.name}:", self.serial.read_text(errors="replace")[-3000:])
