# SPDX-License-Identifier: Apache-2.0
"""The starts of the training: each has a generation, and the next VM resumes from the newest start."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testkit import TRAINERS
from testkit.clouds import Bucket
from testkit.other_users import needs_root
from testkit.rig import Process, Vm
from testkit.staged import another_boot, seal_files
from testkit.waiting import until
from tests.process.conftest import NewVm

STRANGER = 12345
"""A user id that no configuration names."""


@contextmanager
def outage(bucket: Bucket) -> Iterator[None]:
    """The store refuses all requests inside the block."""
    bucket.order("outage", seconds=600)
    yield
    bucket.order("clear")


def train(vm: Vm, *arguments: str, **env: str) -> Process:
    command = [sys.executable, "-u", str(TRAINERS / "positioned.py"), *arguments]
    return vm.spawn(command, lines_on="stdout", **{"SWANSONG_SOCKET": str(vm.socket), **env})


@pytest.mark.fault("D06", "G11")
def test_a_set_that_survived_a_power_cut_is_resumed_from(
    bucket: Bucket, new_vm: NewVm, tmp_path: Path
) -> None:
    """During an outage of the store step 175 is sealed on the disk, and the newest commit is step 120.

    The restore unit and the hooks choose step 175, no step is repeated, and the set is committed.
    """
    vm = new_vm("a", bucket.store)
    daemon = vm.start_daemon()
    pause = ("--pause-after", "120", "--continue-when", str(tmp_path / "continue"))
    train(vm, "--steps", "175", "--save-at", "120,175", *pause)
    daemon.lines.wait(event="committed", step=120)
    with outage(bucket):
        (tmp_path / "continue").touch()
        daemon.lines.wait(event="sealed_set_found", step=175)
        vm.power_off(keep_disk=True)
    another_boot(vm.run_directory)

    there = tmp_path / "there"
    answer = vm.swansong("restore", "--local", "--to", str(there), "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["step"] == 175
    trainer = train(vm, "--steps", "3", SWANSONG_RESTORE=str(there))
    assert trainer.lines.wait(event="resumed")["step"] == 175
    daemon = vm.start_daemon()
    daemon.lines.wait(event="committed", step=175, generation=1)
    trainer = train(vm, "--steps", "3")
    assert trainer.lines.wait(event="resumed")["step"] == 175


@pytest.mark.fault("OE11")
def test_a_trainer_that_gets_sigterm_ends_after_a_last_checkpoint(
    bucket: Bucket, new_vm: NewVm
) -> None:
    """No notice, interval or schedule asks for it: the next start resumes from the step of the signal."""
    vm = new_vm("a", bucket.store)
    daemon = vm.start_daemon()
    trainer = train(vm)
    until(lambda: any(rank["step"] > 0 for rank in vm.status()["trainers"]), what="a step")
    trainer.kill(signal.SIGTERM)
    assert trainer.wait() == -signal.SIGTERM
    step = daemon.lines.wait(event="committed")["step"]
    assert not daemon.lines.all(event="notice")
    assert train(vm).lines.wait(event="resumed")["step"] == step > 0


def test_local_excludes_every_other_choice(bucket: Bucket, new_vm: NewVm, tmp_path: Path) -> None:
    """``--local`` means the daemon's choice: a wrong combination is refused, and nothing is written."""
    vm = new_vm("a", bucket.store)
    for choice in (["--step", "5"], ["--generation", "1"], ["--healthy"]):
        answer = vm.swansong("restore", "--local", *choice, "--to", str(tmp_path / "there"))
        assert (answer.returncode, (tmp_path / "there").exists()) == (2, False)
        assert "--local" in answer.stderr


@pytest.mark.fault("S8")
@needs_root
def test_a_local_restore_needs_the_user_of_the_daemon(
    bucket: Bucket, new_vm: NewVm, tmp_path: Path
) -> None:
    """Another user cannot read the record of starts and gets an error.  Foreign sets are ignored."""
    vm = new_vm("a", bucket.store)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    daemon.kill()
    own = vm.run_directory / ".swansongd"
    os.chown(own, STRANGER, -1)
    answer = vm.swansong("restore", "--local", "--to", str(tmp_path / "there"))
    assert answer.returncode == 15
    assert f"sudo -u '#{STRANGER}'" in answer.stderr
    os.chown(own, 0, -1)
    seal_files(vm.run_directory, 175, {"x": b"planted"})
    for path in [*vm.run_directory.rglob("step-*"), *vm.run_directory.glob("step-*/**/*")]:
        os.chown(path, STRANGER, -1)
    answer = vm.swansong("restore", "--local", "--fresh-ok", "--to", str(tmp_path / "there"))
    assert (answer.returncode, (tmp_path / "there").exists()) == (0, False), answer.stderr


@pytest.mark.fault("S19", "T12")
def test_a_second_process_of_the_same_rank_is_refused(
    bucket: Bucket, new_vm: NewVm, tmp_path: Path
) -> None:
    """Of three processes without RANK one trains; the others get an error that contains the fix.

    A successor of the first is admitted immediately.
    """
    vm = new_vm("a", bucket.store)
    daemon = vm.start_daemon()
    first = train(vm)
    first.lines.wait(event="resumed")
    for _ in range(2):
        other = train(vm)
        assert "rank 0 of 1 is connected already" in other.lines.wait(event="error")["reason"]
    # A process reads its refusal a moment before the status counts it.
    until(lambda: vm.status()["trainers_refused"]["count"] >= 2, what="both refusals")
    status = vm.status()
    assert "torchrun" in status["trainers_refused"]["last"]
    assert len(status["trainers"]) == 1
    first.kill()
    assert train(vm).lines.wait(event="resumed")["step"] == 0
    assert daemon.popen.poll() is None
