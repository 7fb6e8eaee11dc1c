# SPDX-License-Identifier: Apache-2.0
"""Trainers attack a real daemon of another user, through staging and the socket."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from swansong import layout, protocol
from swansong_bucket.stores.file.store import FileStore

from testkit import REPOSITORY, committed
from testkit.as_user import DAEMON, GROUP, MEMBER, TRAINER, as_user, place_for_all
from testkit.other_users import needs_root
from testkit.rig import Vm

pytestmark = needs_root

NAME = "rank-00000/model.bin"
FILES = {NAME: bytes(range(256)) * 40}
DAEMON_AS = REPOSITORY / "testkit" / "daemon_as.py"


class Site(Vm):
    """A VM whose daemon is neither root nor the trainer, with a home and a store as targets."""

    def __init__(self, disk: Path, warm: str) -> None:
        self.home = disk / "home"
        self.bucket = disk / "bucket"
        for directory in (self.home, self.bucket, disk / "staging", disk / "runtime"):
            directory.mkdir()
            os.chown(directory, DAEMON, GROUP)
        (disk / "staging").chmod(0o2750)
        (self.home / ".aws").mkdir()
        (self.home / ".aws" / "config").write_text("[default]\n")
        (disk / "runtime").chmod(0o750)
        self.bucket.chmod(0o700)
        for path in (self.home / ".aws", self.home / ".aws" / "config"):
            os.chown(path, DAEMON, GROUP)
        super().__init__(
            disk,
            {"url": f"file://{self.bucket}"},
            settings={
                "trainer": {"users": [TRAINER], "socket": str(disk / "runtime" / "trainer.sock")},
                "notify": {"exec": ["/bin/grep", "^Cap", "/proc/self/status"]},
            },
            warm=warm,
        )
        self.socket = disk / "runtime" / "trainer.sock"
        disk.chmod(0o755)

    def start_daemon(self, *, ready: bool = True, **env: str) -> Any:
        command = [sys.executable, str(DAEMON_AS), str(DAEMON), str(GROUP)]
        path = os.pathsep.join(filter(None, sys.path))
        variables = {"HOME": str(self.home), "PYTHONPATH": path, **env}
        self.daemon = self.spawn([*command, "--config", str(self.config)], **variables)
        if ready:
            self.daemon.lines.wait(event="started")
        return self.daemon

    def commit(self, step: int) -> None:
        """A commit of an earlier VM."""

        def make() -> None:
            committed.commit(
                FileStore(f"file://{self.bucket}"),
                FILES,
                run="run",
                step=step,
                nonce=f"a{step}",
            )

        as_user(DAEMON, make)

    def ask(self, who: int = TRAINER, query_id: str = "q1") -> dict[str, Any]:
        """The reply to a restore query of this user, whose training starts again."""
        start_id = secrets.token_hex(8)

        def talk() -> dict[str, Any]:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(30)
                peer.connect(str(self.socket))
                with suppress(BrokenPipeError):  # refused already: the reason can still be read
                    peer.send(protocol.encode(protocol.Hello("", start_id=start_id)))
                    query = protocol.RestoreQuery(query_id, start_id=start_id)
                    peer.send(protocol.encode(query))
                while True:
                    body: dict[str, Any] = json.loads(peer.recv(65536))
                    if body["type"] in ("restored", "refused"):
                        return body

        answer = as_user(who, talk)
        assert isinstance(answer, dict), answer
        return answer

    def treasure(self) -> dict[str, tuple[bytes, int]]:
        """The daemon's files outside of staging that no trainer may change: content and modification time."""
        places = (self.home, self.bucket / "run" / "data", self.bucket / "run" / "commits")
        return {
            str(path): (path.read_bytes(), path.stat().st_mtime_ns)
            for place in places
            for path in sorted(place.rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def site(warm_python: str) -> Iterator[Site]:
    with place_for_all(0) as disk, Site(disk, warm_python) as made:
        yield made


def capabilities(status: str) -> dict[str, int]:
    """The sets of a process by their names in ``/proc/PID/status``; the log escapes white space."""
    found = re.findall(r"(Cap\w{3}):(?:\s|\\t)([0-9a-f]{16})", status)
    return {name: int(mask, 16) for name, mask in found}


def test_a_program_of_the_operator_gets_no_capability_of_the_daemon(site: Site) -> None:
    """The daemon may signal processes of other users; nothing that ``notify.exec`` starts may."""
    daemon = site.start_daemon()
    kill = 1 << 5
    own = capabilities(Path("/proc", str(daemon.pid), "status").read_text())
    assert (own["CapEff"], own["CapPrm"]) == (kill, kill)
    assert site.swansong("notify", "--in", "60s").returncode == 0
    child = capabilities(daemon.lines.wait(event="notification_command", exit_code=0)["output"])
    # The inheritable set alone gives nothing: no file of the system names the capability.
    assert (child["CapEff"], child["CapPrm"], child["CapAmb"]) == (0, 0, 0)


def size_of_tree(path: str) -> int:
    return sum(len(file.read_bytes()) for file in Path(path).rglob("*") if file.is_file())


def plant_link(run: Path, target: Path) -> None:
    os.symlink(target, run / layout.RESTORED_DIRECTORY)


def plant_partials(run: Path, target: Path) -> None:
    """Plant a directory of the trainer with partial restores, and links in place of files to be written."""
    restored = run / layout.RESTORED_DIRECTORY
    planted = restored / ".0123abcd.partial-0123456789abcdef"
    (planted / "files").mkdir(parents=True)
    os.symlink(target, planted / "files" / "rank-00000")
    (planted / "journal").write_text("swansong-restore-1\n")
    for path in (restored, planted, planted / "files"):
        path.chmod(0o777)


def make_run_directory(run: Path) -> None:
    """Make the directory as an earlier daemon left it, without the daemon's own directories."""
    run.mkdir()
    os.chown(run, DAEMON, GROUP)
    run.chmod(0o1770)


@pytest.mark.fault("S24", "S8")
def test_the_daemon_creates_its_directories_at_the_start(site: Site) -> None:
    """A FUSE mount on a directory that a member created could not be moved aside later."""
    site.start_daemon()
    member = as_user(MEMBER, lambda: os.mkdir(site.run_directory / layout.RESTORED_DIRECTORY))
    assert member.startswith("FileExistsError")


@pytest.mark.fault("S24", "S1", "S2")
@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (plant_link, "home/.aws"),
        (plant_partials, "bucket"),
    ],
)
def test_a_planted_restored_directory_redirects_nothing(site: Site, plant: Any, place: str) -> None:
    """No file of the daemon is written or deleted, and the trainer gets the checkpoint."""
    site.commit(100)
    make_run_directory(site.run_directory)
    assert as_user(TRAINER, lambda: plant(site.run_directory, site.disk / place)) is None
    site.start_daemon()
    before = site.treasure()
    for number in range(2):
        answer = site.ask(query_id=f"q{number}")
        assert answer["error"] == ""
        assert Path(answer["path"]).parent == site.run_directory / layout.RESTORED_DIRECTORY
        assert as_user(TRAINER, partial(size_of_tree, answer["path"])) == len(FILES[NAME])
    assert site.treasure() == before


@pytest.mark.fault("S24")
def test_a_forged_claim_in_staging_is_ignored(site: Site) -> None:
    """A trainer creates the daemon's directory before its first start: the daemon moves it aside."""
    run = site.run_directory
    make_run_directory(run)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    start = {"id": "0123456789abcdef", "boot_id": boot_id, "generation": 77, "nodes": 1}
    forged = {"run": "run", "store_url": f"file://{site.bucket}", "store_id": "", "starts": [start]}

    def plant() -> None:
        (run / ".swansongd").mkdir()
        (run / ".swansongd" / "claim.json").write_text(json.dumps(forged))

    as_user(TRAINER, plant)
    daemon = site.start_daemon()
    daemon.lines.wait(event="staging_entry_displaced")
    answer = site.ask()
    assert answer["error"] == ""

    def claims() -> list[str]:
        return sorted(path.name for path in site.bucket.rglob("generations/*"))

    assert claims() == ["00000001.json"]
