# SPDX-License-Identifier: Apache-2.0
"""The layers that containers and VMs boot from: a Debian, and on top of it the changes of provision.sh.

Both are cached; a change to an input of the top layer invalidates it.
``python3 -m testkit.nspawn.build`` makes the Debian and uses only the standard library.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from testkit import REPOSITORY
from testkit.waiting import until

HERE = Path(__file__).resolve().parent
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
PACKAGES = (
    "systemd,systemd-sysv,dbus,libpam-systemd,libnss-systemd,polkitd,python3,python3-venv,"
    "iproute2,procps,ca-certificates,udev,kmod,netbase,acl"
)
STANDARD = "bookworm"
"""The release of the VMs as well."""
KERNEL = "linux-image-cloud-amd64,initramfs-tools,zstd,e2fsprogs"
TOOLS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "nsenter": "util-linux",
    "ip": "iproute2",
}
"""Command -> package that contains it."""
_LEFT_OUT = ("doc", "man", "locale")
_PARTS = (
    "packer/provision.sh",
    "packer/package",
    "systemd",
    "daemon",
    "training_hooks",
    "constraints.txt",
)
_UNUSED_MAX_S = 3600.0
"""A layer that no test session has used for this time is deleted."""


@dataclass(frozen=True)
class Layer:
    """A root file system for overlayfs: its directories, the topmost first."""

    directories: tuple[Path, ...]

    def over(self, top: Path) -> Layer:
        return Layer((top, *self.directories))

    def __str__(self) -> str:
        return ":".join(str(directory) for directory in self.directories)

    def find(self, path: str) -> Path:
        """The topmost copy of a file."""
        return next(d / path for d in self.directories if (d / path).exists())


def cache() -> Path:
    """The directory for expensive build results, outside of the sources."""
    chosen = os.environ.get("SWANSONG_TEST_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return Path(chosen or Path.home() / ".cache") / "swansong-tests"


def missing(tools: dict[str, str]) -> list[str]:
    """The commands of a table such as ``TOOLS`` that are missing, with their packages."""
    return [f"{tool} ({package})" for tool, package in tools.items() if not shutil.which(tool)]


def debian(suite: str) -> Layer:
    """A small Debian with systemd, D-Bus and polkit, cached."""
    packages = PACKAGES.replace("polkitd", "policykit-1") if suite == "bullseye" else PACKAGES
    if suite == STANDARD:
        packages += f",{KERNEL}"
    command = ["mmdebstrap", "--variant=minbase", f"--include={packages}"]
    command += ['--aptopt=Acquire::Retries "3"']
    command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _LEFT_OUT]
    key = hashlib.sha256(repr(command).encode()).hexdigest()[:12]
    target = cache() / f"{suite}-{key}"
    with locked(cache() / f"{suite}.lock"):
        if not target.exists():
            # The mirror of this machine, with the requested release.
            own = re.search(
                r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE
            )
            assert own
            sources = SOURCES.read_text().replace(own[1], suite)
            if suite == "bullseye":
                sources = sources.replace(" non-free-firmware", "")
            listing = cache() / f"{suite}.sources"
            listing.write_text(sources)
            fresh = cache() / f"{suite}.new"
            shutil.rmtree(fresh, ignore_errors=True)
            # Its mounts end with the namespace, even if the command is killed.
            namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
            run(*namespaces, *command, suite, str(fresh), str(listing), timeout_s=600)
            fresh.rename(target)
    return Layer((target,))


def wheelhouse(python_version: str) -> Path:
    """Wheels of all dependencies of the daemon and the example trainer, cached."""
    lock = (REPOSITORY / "constraints.txt").read_text() + _locked("numpy")
    key = hashlib.sha256(lock.encode()).hexdigest()[:12]
    target = cache() / f"wheels-{python_version}-{key}"
    with locked(cache() / "wheels.lock"):
        if not target.exists():
            fresh = cache() / "wheels.new"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            listing = cache() / "wheels.txt"
            listing.write_text(lock)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(fresh)]
            command += ["--require-hashes", "--no-deps", "--only-binary=:all:"]
            command += ["--python-version", python_version]
            for platform in ("manylinux_2_28", "manylinux2014", "manylinux_2_17"):
                command += ["--platform", f"{platform}_x86_64"]
            run(*command, "--requirement", str(listing), timeout_s=600)
            fresh.rename(target)
    return target


def _locked(name: str) -> str:
    """The lines of one distribution in the lock of the tests."""
    lock = (REPOSITORY / "requirements" / "dev.txt").read_text()
    found = re.search(rf"^{name}==.*(?:\n    --hash=.*)+\n", lock, re.MULTILINE)
    assert found, f"{name} is not in requirements/dev.txt"
    return found[0]


def given(scratch: Path, python_version: str) -> Path:
    """A directory with all ``wheels`` that provision.sh and the trainer install."""
    wheels = scratch / "given" / "wheels"
    shutil.copytree(wheelhouse(python_version), wheels)
    # From a copy: a build leaves files beside its sources.
    for folder in ("training_hooks", "daemon"):
        copy = scratch / folder
        shutil.copytree(
            REPOSITORY / folder, copy, ignore=shutil.ignore_patterns("build", "*.egg-info")
        )
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        build += ["--no-index", "--no-build-isolation"]
        run(*build, "--wheel-dir", str(wheels), str(copy), timeout_s=600)
    return wheels.parent


def provisioned(base: Layer) -> Layer:
    """The layer of provision.sh on top of ``base``, with the example trainer as a unit.

    It is cached until one of its inputs changes.
    """
    digest = hashlib.sha256(str(base).encode())
    parts = [HERE / "prepare.sh", *(REPOSITORY / name for name in _PARTS)]
    for path in sorted(file for part in parts for file in (part, *part.rglob("*"))):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path).encode() + path.read_bytes())
    target = cache() / f"provisioned-{digest.hexdigest()[:12]}"
    with locked(cache() / "provisioned.lock"):
        if not target.exists():
            for old in cache().glob("provisioned-*"):
                if time.time() - old.stat().st_mtime > _UNUSED_MAX_S:
                    shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=cache()) as scratch:
                _provision(base, Path(scratch))
                (Path(scratch) / "disk" / "upper").rename(target)
    return base.over(target)


def _provision(base: Layer, scratch: Path) -> None:
    (python,) = [
        path.name for path in base.find("usr/bin").glob("python3.*") if path.name[8:].isdigit()
    ]
    bind = f"--bind-ro={given(scratch, python.removeprefix('python'))}:/srv/given"
    run_script(base, scratch / "disk", "prepare.sh", bind)


def run_script(layer: Layer, disk: Path, script: str, *options: str) -> str:
    """Run a script of this directory on a layer without booting it; returns its output."""
    name = f"sw-{os.getpid()}"
    try:
        return run(
            "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--net",
            str(HERE / "container_up.sh"), name, str(layer), str(disk),
            "--pipe", f"--bind-ro={REPOSITORY}:/srv/swansong", *options,
            "/bin/bash", f"/srv/swansong/testkit/nspawn/{script}",
            timeout_s=600,
        )  # fmt: skip
    finally:
        remove_groups(name)


def remove_groups(name: str) -> None:
    """Remove the control groups of container_up.sh, which may be busy just after the last process ends."""

    def are_gone(top: Path) -> bool:
        for path, _, _ in os.walk(top, topdown=False):
            with suppress(OSError):
                os.rmdir(path)
        return not top.exists()

    for tree in ("systemd", "unified", ""):
        until(partial(are_gone, Path("/sys/fs/cgroup", tree, name)), what="control groups")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on this file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(*command: str, timeout_s: float) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


if __name__ == "__main__":
    debian(STANDARD)
