# SPDX-License-Identifier: Apache-2.0
"""The image that the VMs of the tests boot from: a stock Debian kernel, and the files of provision.sh.

``python -m testkit.vm.image`` makes the image, unless it is cached, and prints a command that boots it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from testkit import REPOSITORY
from testkit.nspawn import build
from testkit.nspawn.build import STANDARD, cache, debian, given, locked, missing, provisioned, run

HERE = Path(__file__).resolve().parent
MAKE, PREPARE = HERE / "make_image.sh", HERE / "prepare.sh"
TOOLS = {
    **build.TOOLS,
    "qemu-system-x86_64": "qemu-system-x86",
    "debugfs": "e2fsprogs",
    "unshare": "util-linux",
    "journalctl": "systemd",
}
"""Command -> package that contains it."""
MACHINE = (
    "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "Nehalem", "-smp", "2", "-m", "1024",
    "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-device", "virtio-rng-pci",
)  # fmt: skip
"""Nehalem is the oldest processor that numpy supports; newer ones take longer to emulate."""
KERNEL = "root=/dev/vda rw console=ttyS0 quiet mitigations=off systemd.show_status=1"
_UNUSED_MAX_S = 3600.0
"""An image that no test session has used for this time is deleted."""


@dataclass(frozen=True)
class Image:
    """A read-only image for QEMU."""

    directory: Path

    @property
    def disk(self) -> Path:
        return self.directory / "disk.ext4"

    def boot_arguments(self, *more: str) -> list[str]:
        """QEMU's arguments for every boot, with ``more`` for the kernel."""
        kernel, initrd = str(self.directory / "vmlinuz"), str(self.directory / "initrd.img")
        return [
            *MACHINE,
            "-kernel",
            kernel,
            "-initrd",
            initrd,
            "-append",
            " ".join((KERNEL, *more)),
        ]

    def by_hand(self) -> str:
        """The command that boots the image in a terminal and discards all writes at the end."""
        disk = ("-snapshot", "-drive", f"file={self.disk},if=virtio,format=raw")
        console = ("-serial", "mon:stdio", "-nic", "user,model=virtio-net-pci")
        return shlex.join(["qemu-system-x86_64", *self.boot_arguments(), *disk, *console])


def made() -> Image:
    """The image of these sources, cached until one of its inputs changes."""
    layer = provisioned(debian(STANDARD))
    digest = hashlib.sha256(str(layer).encode())
    for script in (MAKE, PREPARE):
        digest.update(script.read_bytes())
    target = cache() / f"vm-image-{digest.hexdigest()[:12]}"
    with locked(cache() / "vm-image.lock"):
        if not target.exists():
            for old in cache().glob("vm-image-*/"):
                if time.time() - old.stat().st_mtime > _UNUSED_MAX_S:
                    shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=cache(), prefix="making-") as name:
                scratch = Path(name)
                run(
                    "unshare", "--mount", "--pid", "--fork", "--kill-child",
                    *map(str, (MAKE, REPOSITORY, given(scratch, "3.11"), layer, scratch)),
                    timeout_s=600,
                )  # fmt: skip
                (scratch / "out").rename(target)
    os.utime(target)  # mark it as used
    return Image(target)


def main() -> None:
    if os.geteuid() != 0:
        raise SystemExit("image: needs root, because it creates users and mounts")
    if lacking := missing(TOOLS):
        raise SystemExit(f"image: missing: {', '.join(lacking)}")
    image = made()
    print(f"# Boots {image.disk}; root has no password, writes are discarded, Ctrl-A X ends it.")
    print(image.by_hand())


if __name__ == "__main__":
    main()
