# SPDX-License-Identifier: Apache-2.0
"""podman on a machine of its own: images, mounts and all processes of containers end with the block."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from testkit.nspawn.build import run
from testkit.rig import Lines, Process

TOOLS = {
    "podman": "podman",
    "crun": "crun",
    "catatonit": "catatonit",  # the first container of each pod
    "nsenter": "util-linux",
}
"""Command -> package that contains it."""
SETTINGS = {
    "containers": 'default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]',
    "engine": 'cgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "crun"',
}
"""Table -> lines of containers.conf for a machine without systemd, and with few rights."""
# crun refuses hybrid control groups.  `cat` ends with the test, and all processes of the machine end with it.
# Half a GB of images is in memory: nothing has to be removed.
_MACHINE = """
umount /sys/fs/cgroup/unified 2>/dev/null
mount -t tmpfs tmpfs /run && echo up && cat
"""


class Podman:
    """Containers in the network namespace of the caller.

    Args:
        file: a new file for its settings.
        settings: containers.conf, with the tables of ``SETTINGS``.
    """

    def __init__(self, file: Path, settings: str) -> None:
        self._file = file
        for table, lines in SETTINGS.items():
            assert f"[{table}]\n" in settings
            settings = settings.replace(f"[{table}]\n", f"[{table}]\n{lines}\n")
        file.write_text(settings)
        self._machine: subprocess.Popen[bytes] | None = None
        self._followers: list[Process] = []

    def command(self, *arguments: str) -> list[str]:
        """The command that runs podman with these arguments."""
        assert self._machine is not None
        pid = self._machine.pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [
            *("nsenter", "--target", first, "--mount", "--pid"),
            *("env", f"CONTAINERS_CONF={self._file}", "TMPDIR=/run"),
            *("podman", "--root", "/run/images", *arguments),
        ]

    def run(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """Run podman; returns its output."""
        return run(*self.command(*arguments), timeout_s=timeout_s)

    def follow(self, container: str, stream: str = "stdout") -> Lines:
        """The lines that a container writes to this stream, those of its earlier starts included."""
        command = self.command("logs", "--follow", container)
        self._followers.append(Process(command, lines_on=stream))
        return self._followers[-1].lines

    def __enter__(self) -> Self:
        namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._machine = subprocess.Popen(
            [*namespaces, "sh", "-c", _MACHINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._machine.stdout is not None
        assert self._machine.stdout.readline() == b"up\n"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._machine is not None
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("pod", "rm", "--all", "--force", "--time", "0")  # with their control groups
        self._machine.kill()
        self._machine.communicate()
        for process in self._followers:
            process.kill()
        for group in _groups():
            with suppress(OSError):
                os.rmdir(group)


def _groups() -> Iterator[Path]:
    """The control groups of podman, the innermost first."""
    tops = Path("/sys/fs/cgroup")
    for top in (*tops.glob("libpod_parent"), *tops.glob("*/libpod_parent")):
        for path, _, _ in os.walk(top, topdown=False):
            yield Path(path)
