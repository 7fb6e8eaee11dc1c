# SPDX-License-Identifier: Apache-2.0
"""The file system of a ``file://`` store is unmounted under the daemon, or not mounted on the next VM."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from swansong_bucket.stores.file.tree import MARKER

from testkit.committed import tree
from testkit.other_users import needs_root
from testkit.rig import BIN, CREDENTIALS, Process, Vm, environment
from testkit.staged import seal_files
from testkit.waiting import until

pytestmark = [
    needs_root,
]

STORE_FAILED = 16


class Namespace:
    """A mount namespace with a file server, its mount point, and an ``/etc/fstab`` that lists the mount."""

    def __init__(self, place: Path) -> None:
        self.server, self.point = place / "server", place / "store"
        self.server.mkdir()
        self.point.mkdir()
        (place / "fstab").write_text(f"server:/ {self.point} nfs4 _netdev 0 0\n")
        self.holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 600"],
            stdout=subprocess.PIPE,
        )
        assert self.holder.stdout is not None
        self.prefix = ["nsenter", f"--mount=/proc/{self.holder.pid}/ns/mnt", "--"]
        with self.holder.stdout as stdout:
            is_there = stdout.readline()
        if not is_there or not self.run("mount", "-t", "tmpfs", "t", self.server):
            self.holder.kill()
            pytest.skip("this machine permits no mounts")
        assert self.run("mount", "--bind", place / "fstab", "/etc/fstab")
        assert self.run("chmod", "0755", self.server)

    def run(self, *command: str | Path) -> bool:
        return subprocess.run([*self.prefix, *command], check=False, timeout=30).returncode == 0

    def mount(self) -> None:
        assert self.run("mount", "--bind", self.server, self.point)

    def unmount(self) -> None:
        assert self.run("umount", "--lazy", self.point)


class Inside(Vm):
    """A VM whose processes run in this mount namespace."""

    def __init__(self, namespace: Namespace, disk: Path) -> None:
        disk.mkdir()
        self.namespace = namespace
        super().__init__(disk, {"url": namespace.point.as_uri()})

    def spawn(self, command: list[str], *, lines_on: str = "stderr", **env: str) -> Process:
        return super().spawn([*self.namespace.prefix, *command], lines_on=lines_on, **env)

    def swansong(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "swansong"), "--config", str(self.config), *arguments]
        return subprocess.run(
            [*self.namespace.prefix, *command],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=environment(**{**CREDENTIALS, **env}),
        )


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[Namespace]:
    made = Namespace(tmp_path)
    yield made
    made.holder.kill()
    made.holder.wait(10)


@pytest.mark.fault("O25", "D08")
def test_nothing_is_saved_to_or_read_from_a_bare_mount_point(
    namespace: Namespace, tmp_path: Path
) -> None:
    """Unmounted under the daemon: no commit, and an error in status.  Mounted again: the set is committed.

    The next VM has no record of the store: its daemon claims nothing, and ``restore --fresh-ok`` fails.
    A daemon that is restarted on the first VM compares the id that it has recorded.
    """
    with ExitStack() as vms:
        namespace.mount()
        vm = vms.enter_context(Inside(namespace, tmp_path / "a"))
        daemon = vm.start_daemon()
        seal_files(vm.run_directory, 10, {"weights": b"10"})
        daemon.lines.wait(event="committed", step=10)

        namespace.unmount()
        seal_files(vm.run_directory, 20, {"weights": b"20"})
        assert "not mounted" in daemon.lines.wait(event="flush_failed", step=20)["reason"]
        until(lambda: "not mounted" in vm.status()["store"]["reason"], what="the error in status")
        fresh = vms.enter_context(Inside(namespace, tmp_path / "b"))
        second = fresh.start_daemon()
        until(
            lambda: any("nothing is mounted" in line for line in second.lines.raw), what="an error"
        )
        answer = fresh.swansong("restore", "--fresh-ok", "--to", str(tmp_path / "to"))
        assert answer.returncode == STORE_FAILED, answer
        assert f"mount {namespace.point}" in answer.stderr
        assert not daemon.lines.all(event="committed", step=20)
        assert tree(namespace.point) == {}
        second.kill()

        namespace.mount()
        daemon.lines.wait(event="committed", step=20)
        answer = fresh.swansong("restore", "--fresh-ok", "--to", str(tmp_path / "to"))
        assert answer.returncode == 0, answer
        assert tree(tmp_path / "to")["rank-00000/weights"] == b"20"

        daemon.kill()
        namespace.unmount()
        again = vm.start_daemon()
        until(
            lambda: any(MARKER in line for line in again.lines.raw), what="the error of the marker"
        )
        assert tree(namespace.point) == {}
