# SPDX-License-Identifier: Apache-2.0
"""The image that the VMs of the tests boot from: a stock Debian kernel, and what provision.sh installs.

``python -m vm.image`` makes it, unless it is there, and prints how to boot it by hand.
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

from system.nspawn.build import SOURCES, cache, locked, own_wheels, run, wheelhouse

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PACKAGES = (
    "linux-image-cloud-amd64,initramfs-tools,zstd,systemd,systemd-sysv,dbus,polkitd,libpam-systemd,"
    "libnss-systemd,python3,python3-venv,iproute2,procps,ca-certificates,udev,kmod,netbase,e2fsprogs"
)
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "mmdebstrap": "mmdebstrap",
    "debugfs": "e2fsprogs",
    "unshare": "util-linux",
    "ip": "iproute2",
    "journalctl": "systemd",
}
"""Command to the package that brings it."""
MACHINE = (
    "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "Nehalem", "-smp", "2", "-m", "1024",
    "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-device", "virtio-rng-pci",
)  # fmt: skip
"""Nehalem: the oldest processor that numpy still runs on; what is newer costs time to emulate."""
KERNEL = "root=/dev/vda rw console=ttyS0 quiet mitigations=off systemd.show_status=1"
_LEFT_OUT = ("doc", "man", "locale")
_KEPT_S = 3600.0
"""An image that nobody has been using for so long can go."""
_PARTS = (
    "packer/provision.sh", "systemd", "daemon", "training_hooks", "constraints.txt",
    "tests/system/nspawn/prepare.sh", "tests/vm/prepare.sh", "tests/vm/make_image.sh",
)  # fmt: skip


@dataclass(frozen=True)
class Image:
    """What QEMU boots; nobody writes to it."""

    directory: Path

    @property
    def disk(self) -> Path:
        return self.directory / "disk.ext4"

    def boot_arguments(self, *more: str) -> list[str]:
        """QEMU's arguments that every boot has in common, with ``more`` for the kernel."""
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
        """The command that boots it in a terminal, and forgets what was written when it ends."""
        disk = ("-snapshot", "-drive", f"file={self.disk},if=virtio,format=raw")
        console = ("-serial", "mon:stdio", "-nic", "user,model=virtio-net-pci")
        return shlex.join(["qemu-system-x86_64", *self.boot_arguments(), *disk, *console])


def missing_tools() -> list[str]:
    return [f"{tool} ({package})" for tool, package in TOOLS.items() if not shutil.which(tool)]


def made() -> Image:
    """The image of these sources, from the cache when nothing that goes into it has changed."""
    digest = hashlib.sha256(PACKAGES.encode())
    for path in sorted(
        f for name in _PARTS for f in (REPOSITORY / name, *(REPOSITORY / name).rglob("*"))
    ):
        if path.is_file() and not {"__pycache__", "build"} & set(
            path.parts[len(REPOSITORY.parts) :]
        ):
            digest.update(str(path.relative_to(REPOSITORY)).encode() + path.read_bytes())
    target = cache() / f"vm-image-{digest.hexdigest()[:12]}"
    with locked(cache() / "vm-image.lock"):
        if not target.exists():
            base = _debian()
            for old in cache().glob("vm-image-*/"):
                if time.time() - old.stat().st_mtime > _KEPT_S:
                    shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=cache(), prefix="making-") as name:
                scratch = Path(name)
                shutil.copytree(wheelhouse("3.11"), scratch / "given" / "wheels")
                own_wheels(scratch, scratch / "given" / "wheels")
                (scratch / "out").mkdir()
                run(
                    "unshare", "--mount", "--pid", "--fork", "--kill-child",
                    *map(str, (HERE / "make_image.sh", REPOSITORY, scratch / "given", base, scratch)),
                    str(scratch / "out"),
                    timeout_s=300,
                )  # fmt: skip
                (scratch / "out").rename(target)
    os.utime(target)  # in use
    return Image(target)


def _debian() -> Path:
    """A small Debian with a kernel, as an archive, so that no owner or device gets lost."""
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}"]
    command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _LEFT_OUT]
    key = hashlib.sha256(repr(command).encode()).hexdigest()[:12]
    target = cache() / f"vm-debian-{key}.tar"
    if not target.exists():
        fresh = cache() / "vm-debian.new.tar"
        run(*command, "bookworm", str(fresh), str(SOURCES), timeout_s=600)
        fresh.rename(target)
    return target


def main() -> None:
    if os.geteuid() != 0:
        raise SystemExit("image: needs root, for it makes users and mounts")
    if missing := missing_tools():
        raise SystemExit(f"image: missing: {', '.join(missing)}")
    image = made()
    print(f"# Boots {image.disk}; root without a password, nothing is kept, Ctrl-A X ends it.")
    print(image.by_hand())


if __name__ == "__main__":
    main()
