# SPDX-License-Identifier: Apache-2.0
"""Invalid configuration and paths, a missing bucket, a full disk: one clear line each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Bucket
from testkit.rig import BIN
from testkit.waiting import until

INVALID_CONFIG, BAD_STAGING = 2, 15


# ---------------------------------------------------------------- start of the daemon


@pytest.mark.fault("H11")
def test_all_problems_of_the_configuration_are_listed(new_vm: Any) -> None:
    """Five problems are five lines, each with its key; the exit code is 2, and staging is unchanged."""
    mistakes = {
        "run": {"name": "../up"},
        "store": {"url": "ftp://somewhere"},
        "sources": {"poll_interval_s": -1, "cluod": "aws"},
        "trainer": {"signal": "SIGKILL"},
    }
    vm = new_vm("vm", {}, settings=mistakes)
    daemon = vm.start_daemon(ready=False)
    assert daemon.wait() == INVALID_CONFIG
    problems = [line for line in daemon.lines.raw if "problem=" in line]
    for key in (
        "run.name",
        "store.url",
        "sources.poll_interval_s",
        "sources.cluod",
        "trainer.signal",
    ):
        assert len([line for line in problems if f"{key}:" in line]) == 1, (key, problems)
    assert len(problems) == 5
    assert list(vm.staging.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, ""),
        ({"run": {"name": "../up"}}, "run.name"),
        ({"trainer": {"users": ["no-such-user"]}}, "trainer.users"),
        ({"store": {"url": "s3://b"}}, "store.url"),
        ({"store": {"signing_key_file": "/nowhere/key"}}, "store.signing_key_file"),
        ({"mirror": {"url": "file://relative"}}, "mirror.url"),
    ],
)
def test_a_configuration_can_be_checked_before_it_counts(
    new_vm: Any, tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    """``swansongd --check`` refuses each problem that would end a start, and writes nothing."""
    vm = new_vm("vm", {"url": f"file://{tmp_path}/store"}, settings=settings)
    checked = vm.spawn([str(BIN / "swansongd"), "--config", str(vm.config), "--check"])
    assert checked.wait() == (INVALID_CONFIG if problem else 0)
    checked.lines.drained()
    found = [line for line in checked.lines.raw if "problem=" in line]
    assert len(found) == bool(problem)
    assert all(problem in line for line in found)
    assert list(vm.staging.iterdir()) == []


@pytest.mark.fault("D08")
def test_a_missing_staging_directory_is_reported_and_not_created(
    new_vm: Any, tmp_path: Path
) -> None:
    """The exit code is 15.  In place of a missing mount, a new directory would fill the root disk."""
    place = tmp_path / "nvme"
    store = {"url": f"file://{tmp_path}/store"}
    vm = new_vm("vm", store, settings={"staging": {"path": str(place)}})
    daemon = vm.start_daemon(ready=False)
    assert daemon.wait() == BAD_STAGING
    (problem, hint) = daemon.lines.all(event="cannot_start")
    assert str(place) in problem["problem"]
    assert "staging.path" in hint["hint"]
    assert not place.exists()


# ---------------------------------------------------------------- disk and socket directory


@pytest.mark.fault("D01")
def test_a_full_staging_disk_fails_a_checkpoint_and_not_the_training(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """Training continues, one line per save states the reason, and older commits are unchanged."""
    vm = new_vm("vm", bucket.store)
    with mounted_tmpfs(vm.staging, "size=8m"):
        daemon = vm.start_daemon()
        first = vm.start_trainer("--steps", "20", "--every-steps", "20", script=witness)
        daemon.lines.wait(event="committed", step=20)
        assert first.wait() == 0
        before = bucket.objects("run/commits/")

        command = [sys.executable, "-u", witness, "--every-steps", "30", "--size-bytes", "5000000"]
        trainer = vm.spawn(command, SWANSONG_SOCKET=str(vm.socket))
        until(lambda: _about_the_disk(trainer), what="a line about the disk")
        seen = vm.status()["trainers"][-1]["step"]
        until(lambda: vm.status()["trainers"][-1]["step"] > seen + 10, what="further steps")

        lines = _about_the_disk(trainer)
        assert len(lines) == len(set(lines))  # one line per attempt, with its step
        assert trainer.popen.poll() is None
        assert daemon.popen.poll() is None
        assert bucket.objects("run/commits/") == before
        until(lambda: not list(vm.run_directory.glob("*.partial")), what="room again")
        for process in vm.processes:
            process.kill()


def _about_the_disk(trainer: Any) -> list[str]:
    return [line for line in trainer.lines.raw if "No space left on device" in line]


@contextmanager
def mounted_tmpfs(place: Path, options: str) -> Iterator[None]:
    """Mount a tmpfs at ``place``."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "swansong-test", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_missing_socket_directory_is_reported(new_vm: Any, tmp_path: Path) -> None:
    """One line contains the key and the path, another one the fix."""
    missing = tmp_path / "missing" / "trainer.sock"
    vm = new_vm(
        "vm",
        {"url": f"file://{tmp_path}/store"},
        settings={"trainer": {"socket": str(missing)}},
    )
    daemon = vm.start_daemon(ready=False)
    assert daemon.wait() == 2
    lines = daemon.lines.all(event="cannot_start")
    assert any(
        f"trainer.socket: cannot listen at {missing}" in line.get("problem", "") for line in lines
    )
    assert any("Create its directory" in line.get("hint", "") for line in lines)
    assert not any("Traceback" in line for line in daemon.lines.raw)
