# SPDX-License-Identifier: Apache-2.0
"""``swansong doctor`` and ``status`` name the processes that probably train and are unknown to the daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from swansongd.config.config import TrainerConfig
from swansongd.observe.status import DaemonStatus, TrainerStatus
from swansongd.trainers import unconnected
from swansongd.trainers.unconnected import Search

from testkit.as_user import OUTSIDER, as_user

HOLD = "import sys; held = open(sys.argv[1]); print('ready', flush=True); sys.stdin.readline()"
HOLD_IN_CHILD = f"""
import subprocess, sys
held = open(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", {HOLD!r}, sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.readline()
"""
CATCH = "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)\n"

STATUS = DaemonStatus(state="IDLE", run="r", version="1", pid=os.getpid(), uptime_s=1.0)

Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a process that holds this file, and wait until it does."""
    with ExitStack() as running:

        def start(path: Path, script: str = HOLD, **options: Any) -> subprocess.Popen[str]:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            command = [sys.executable, "-I", "-S", "-c", script, str(path)]
            process = subprocess.Popen(command, text=True, **pipes, **options)
            running.callback(process.communicate)
            running.callback(process.kill)
            assert process.stdout is not None
            process.first = process.stdout.readline()  # type: ignore[attr-defined]
            return process

        yield start


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A file with the name of a device, in a directory in place of /dev."""
    (tmp_path / "dev").mkdir()
    path = tmp_path / "dev" / "nvidia0"
    path.touch()
    return path


@pytest.fixture
def config(tmp_path: Path) -> Iterator[TrainerConfig]:
    """The configuration of a trainer, whose socket exists."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock"))
        yield TrainerConfig(socket=tmp_path / "sock")


def search(config: TrainerConfig, device: Path, *connected: int, **options: Any) -> Search:
    """Search, with this process as the daemon's parent."""
    trainers = tuple(
        TrainerStatus(pid=pid, rank=0, world_size=1, step=0, connected=True) for pid in connected
    )
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as daemon:
        status = replace(STATUS, pid=daemon.pid, trainers=trainers)
        try:
            return unconnected.search(
                config, status, os.geteuid(), devices=device.parent, **{"limit_s": 30.0, **options}
            )
        finally:
            daemon.kill()


def pids(found: Search) -> list[int]:
    return [each.pid for each in found.found]


@pytest.mark.parametrize("name", ["nvidia7", "nvidia-uvm", "kfd", "dri/renderD128"])
def test_a_process_that_holds_a_gpu_is_found_unless_it_is_connected(
    config: TrainerConfig, device: Path, spawn: Spawn, name: str
) -> None:
    """The finding names process, user, device and fix; a connected process is not named."""
    held = device.parent / name
    held.parent.mkdir(exist_ok=True)
    held.touch()
    process = spawn(held)
    (each,) = search(config, device).found
    assert (each.pid, each.uid, each.seen) == (process.pid, os.geteuid(), f"holds {held}")
    assert str(process.pid) in each.line
    assert "swansong.attach()" in each.fix
    assert pids(search(config, device, process.pid)) == []


def test_other_files_are_not_gpus(config: TrainerConfig, device: Path, spawn: Spawn) -> None:
    """Only the names of GPU devices count: nvidiactl is held by monitoring tools, too."""
    for name in ("nvidiactl", "nvidia0.log", "renderD128", "null"):
        other = device.parent / name
        other.touch()
        spawn(other)
    assert pids(search(config, device)) == []


def test_data_loaders_and_launchers_of_a_trainer_are_not_found(
    config: TrainerConfig, device: Path, spawn: Spawn
) -> None:
    """A connected trainer stands for its ancestors and its descendants, and not for its siblings."""
    parent, sibling = spawn(device, HOLD_IN_CHILD), spawn(device)
    child = int(parent.first)  # type: ignore[attr-defined]
    try:
        assert set(pids(search(config, device))) == {parent.pid, child, sibling.pid}
        assert pids(search(config, device, parent.pid)) == [sibling.pid]
        assert pids(search(config, device, child)) == [sibling.pid]
    finally:
        os.kill(child, 9)


@pytest.mark.parametrize("is_caught", [False, True])
def test_the_process_of_the_pid_file_is_found_unless_it_is_connected_or_signalled(
    config: TrainerConfig, device: Path, spawn: Spawn, tmp_path: Path, is_caught: bool
) -> None:
    """A process that catches ``trainer.signal`` is a trainer without hooks, which needs no connection."""
    process = spawn(tmp_path, (CATCH if is_caught else "") + HOLD.replace("open(sys.argv[1])", "0"))
    pid_file = tmp_path / "pid"
    pid_file.write_text(str(process.pid))
    pid_file.chmod(0o600)
    for name, is_signalled in (("none", False), ("SIGUSR1", is_caught)):
        named = replace(config, pid_file=pid_file, signal=name)
        found = search(named, device)
        assert pids(found) == ([] if is_signalled else [process.pid])
        assert all(each.seen == "is the process of trainer.pid_file" for each in found.found)
        assert all(("handler" in each.fix) == (name != "none") for each in found.found)
        assert pids(search(named, device, process.pid)) == []


def test_the_fix_names_a_wrong_socket_path(
    config: TrainerConfig, device: Path, spawn: Spawn, tmp_path: Path
) -> None:
    """A process whose SWANSONG_SOCKET leads elsewhere gets the right path; control characters are escaped."""
    spawn(device, env={"SWANSONG_SOCKET": "/run/\x1b[2Jwrong"})
    (each,) = search(config, device).found
    assert f"set SWANSONG_SOCKET={config.socket}" in each.fix
    assert "\x1b" not in each.fix
    os.symlink(config.socket, tmp_path / "link")
    linked = spawn(device, env={"SWANSONG_SOCKET": str(tmp_path / "link")})
    fixes = {each.pid: each.fix for each in search(config, device).found}
    assert "swansong.attach()" in fixes[linked.pid]


def test_the_fix_names_a_missing_mount(
    config: TrainerConfig, device: Path, spawn: Spawn, tmp_path: Path
) -> None:
    """A process whose root directory lacks the socket, as in a container, needs the directory."""
    if os.geteuid() != 0:
        pytest.skip("changing the root directory requires root")
    (tmp_path / "root").mkdir()
    script = f"import os, sys; held = open(sys.argv[1]); os.chroot({str(tmp_path / 'root')!r})\n"
    spawn(device, script + HOLD.partition("; ")[2].partition("; ")[2].join(("import sys; ", "")))
    (each,) = search(config, device).found
    assert f"mount {config.socket.parent} into its container" in each.fix


def test_a_hostile_name_is_short_and_printable(
    config: TrainerConfig, device: Path, spawn: Spawn, tmp_path: Path
) -> None:
    """The name of a process is its own choice: it reaches no terminal as it is."""
    script = tmp_path / f"\x1b[2J\n{'x' * 200}.py"
    script.write_text(HOLD)
    spawn(
        device,
        f"import os, sys; os.execv(sys.executable, ['python', {str(script)!r}, sys.argv[1]])",
    )
    (each,) = search(config, device).found
    assert each.line.isprintable()
    assert len(each.line) < 400


def test_what_was_not_examined_is_not_reported_as_absent(
    config: TrainerConfig, device: Path, spawn: Spawn
) -> None:
    """Without time, and with the status of another machine or of too many trainers, nothing is known."""
    spawn(device)
    nothing: dict[str, object] = {"processes": None, "complete": False}
    assert search(config, device, limit_s=0.0).facts() == nothing
    for status in (replace(STATUS, pid=2**31 - 1), replace(STATUS, trainers_not_shown=1)):
        found = unconnected.search(config, status, os.geteuid(), devices=device.parent)
        assert found.facts() == nothing
    found = unconnected.search(config, STATUS, os.geteuid() + 1, devices=device.parent)
    assert found.facts() == nothing


def test_only_root_reports_that_there_is_none(
    config: TrainerConfig, device: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user cannot read the open files of all processes, so its search claims nothing."""
    process, readlink = spawn(device), os.readlink

    def readable(path: str) -> str:
        try:
            return readlink(path)
        except PermissionError:  # the first process of a container may be protected, even from root
            return ""

    monkeypatch.setattr(unconnected.os, "readlink", readable)
    is_root = os.geteuid() == 0
    facts = search(config, device, process.pid).facts()
    assert facts == {"processes": [] if is_root else None, "complete": is_root}
    if is_root:
        by_other = partial(unconnected.search, config, STATUS, 0, devices=device.parent)
        for hidden in (False, True):  # by hidepid=
            if hidden:
                monkeypatch.setattr(unconnected, "_pids", lambda: [os.getpid()])
            facts = as_user(OUTSIDER, lambda: by_other().facts())
            assert facts == {"processes": None, "complete": False}


def test_the_number_of_findings_is_limited(
    config: TrainerConfig, device: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork bomb does not make the report long."""
    monkeypatch.setattr(unconnected, "FOUND_MAX", 2)
    for _ in range(3):
        spawn(device)
    found = search(config, device)
    assert len(found.found) == 2
    assert not found.is_complete
