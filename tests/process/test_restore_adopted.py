# SPDX-License-Identifier: Apache-2.0
"""``swansong restore --local`` without a daemon chooses among the sets of a trainer without hooks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from swansongd.util.boot import booted_wall_ns

from testkit import TRAINERS
from testkit.clouds import Bucket
from testkit.rig import Process, Vm
from testkit.waiting import until
from tests.process.conftest import NewVm


@pytest.fixture
def vm(new_vm: NewVm, bucket: Bucket, tmp_path: Path) -> Vm:
    """A VM whose daemon knows the process of its trainer."""
    trainer = {"signal": "SIGUSR1", "pid_file": str(tmp_path / "a" / "trainer.pid")}
    vm = new_vm("a", bucket.store, settings={"trainer": trainer})
    vm.start_daemon()
    return vm


def train(vm: Vm) -> Process:
    """Start the trainer, which begins with step 0."""
    command = [sys.executable, "-u", str(TRAINERS / "without_hooks.py")]
    command += ["--pid-file", str(vm.pid_file), "--checkpoints", str(vm.run_directory)]
    return vm.spawn([*command, "--save-when", str(vm.disk / "save")], lines_on="stdout")


def saved(vm: Vm, trainer: Process, *, after: int = 0) -> int:
    """Let the trainer save after this step; returns the step of the set."""
    until(lambda: any(each.get("step", 0) > after for each in trainer.lines.all()), what="steps")
    before = len(trainer.lines.all(event="saved"))
    (vm.disk / "save").touch()
    until(lambda: len(trainer.lines.all(event="saved")) > before, what="the save")
    step: int = trainer.lines.all(event="saved")[-1]["step"]
    return step


def committed(vm: Vm, trainer: Process, *, after: int = 0) -> int:
    """The same, and wait for the commit of the set."""
    step = saved(vm, trainer, after=after)
    assert vm.daemon is not None
    vm.daemon.lines.wait(event="committed", step=step)
    return step


def restored(vm: Vm, there: Path) -> tuple[dict[str, Any], str]:
    """The answer of the command, and its notes."""
    done = vm.swansong("restore", "--local", "--to", str(there), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_newest_adopted_set_is_restored_by_start_and_step(vm: Vm, tmp_path: Path) -> None:
    """After the daemon has stopped, the set of the newest recorded start wins over greater steps of an
    earlier start and over the newest commit.  No copy is made, and no note is printed."""
    assert vm.daemon is not None
    first = train(vm)
    high = committed(vm, first, after=200)
    first.kill()
    second = train(vm)
    low = committed(vm, second)
    vm.daemon.kill()
    newest = saved(vm, second, after=low)
    second.kill()
    assert low < newest < high
    answer, notes = restored(vm, tmp_path / "there")
    assert answer["step"] == newest
    assert (tmp_path / "there").resolve() == (vm.run_directory / f"checkpoint-{newest}").resolve()
    assert "not restored" not in notes


@pytest.mark.parametrize("cause", ["reboot", "unknown process"])
def test_a_set_of_unknown_order_is_named_and_not_restored(
    vm: Vm, tmp_path: Path, cause: str
) -> None:
    """After a reboot, and if a process that no daemon saw went back to an older state, the newest commit is
    restored, and one line names the newer set and its use."""
    assert vm.daemon is not None
    trainer = train(vm)
    commit = committed(vm, trainer, after=20)
    vm.daemon.kill()
    unknown = saved(vm, trainer, after=commit)
    trainer.kill()
    if cause == "reboot":
        before_ns = booted_wall_ns() - 10**9
        for path in vm.run_directory.glob("checkpoint-*/*"):
            os.utime(path, ns=(before_ns, before_ns))
    else:
        again = train(vm)
        assert saved(vm, again) < commit
        again.kill()
    answer, notes = restored(vm, tmp_path / "there")
    assert (answer["generation"], answer["step"]) == (1, commit)
    assert not (tmp_path / "there").is_symlink()
    (line,) = [line for line in notes.splitlines() if "not restored" in line]
    assert f"checkpoint-{unknown} in staging" in line
    assert ("may be torn" in line) == (cause == "reboot")
    assert "start the training from its directory" in line
