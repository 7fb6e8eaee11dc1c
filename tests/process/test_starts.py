# SPDX-License-Identifier: Apache-2.0
"""The starts of the training: each has a generation, and the next VM resumes from the newest start."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testkit.clouds import Aws, Bucket
from testkit.other_users import needs_root
from testkit.positions import train
from testkit.rig import Vm
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


def newest(vm: Vm) -> tuple[int, int]:
    row = vm.commits()[0]
    return row["generation"], row["step"]


@pytest.mark.fault("G03", "T12")
def test_the_verdict_names_no_discarded_commit(
    aws: Aws, bucket: Bucket, new_vm: NewVm, tmp_path: Path
) -> None:
    """An operator goes back to step 60 while step 220 is committed.

    Step 220 stands until the new start commits.  SAFE names a step of the new start, and the next VM resumes
    from it.
    """
    vm = new_vm("a", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    first = train(vm, "--steps", "220", "--save-at", "60,220")
    daemon.lines.wait(event="committed", step=220)
    assert first.wait() == 0
    chosen = tmp_path / "chosen"
    assert vm.swansong("restore", "--step", "60", "--to", str(chosen)).returncode == 0

    second = train(vm, SWANSONG_RESTORE=str(chosen))
    assert second.lines.wait(event="resumed")["step"] == 60
    until(lambda: vm.status()["generation"] == 2, what="the generation of the second start")
    assert newest(vm) == (1, 220)
    aws.notice(in_s=60)
    verdict = daemon.lines.wait(event="verdict")
    assert (verdict["verdict"], verdict["generation"]) == ("SAFE", 2)
    assert 60 < verdict["step"] < 220, "the test is too slow: the second start has caught up"

    vm.power_off()
    aws.withdraw()
    next_vm = new_vm("b", bucket.store)
    next_vm.start_daemon()
    third = train(next_vm, "--steps", "1")
    assert third.lines.wait(event="resumed")["step"] == verdict["step"]


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
    daemon.lines.wait(event="committed", step=175)
    trainer = train(vm, "--steps", "3")
    assert trainer.lines.wait(event="resumed")["step"] == 175


@pytest.mark.fault("G04", "D06")
def test_a_surviving_set_that_another_vm_has_overtaken_is_not_resumed_from(
    bucket: Bucket, new_vm: NewVm, tmp_path: Path
) -> None:
    """Step 175 survived on one VM; another VM continued from step 120, and its commit is the newest state."""
    first = new_vm("a", bucket.store)
    daemon = first.start_daemon()
    assert train(first, "--steps", "120", "--save-at", "120").wait() == 0
    daemon.lines.wait(event="committed", step=120)
    daemon.kill()
    seal_files(first.run_directory, 175, {"x": b"175"}, start_id=recorded_start(first))
    another_boot(first.run_directory)
    second = new_vm("b", bucket.store)
    daemon = second.start_daemon()
    assert train(second, "--steps", "130", "--save-at", "130").wait() == 0
    daemon.lines.wait(event="committed", step=130)
    daemon.kill()

    there = tmp_path / "there"
    answer = first.swansong("restore", "--local", "--to", str(there), "--json")
    assert json.loads(answer.stdout)["step"] == 130, answer.stderr
    first.start_daemon()
    assert train(first, "--steps", "1").lines.wait(event="resumed")["step"] == 130
    assert {row["step"] for row in first.commits()} == {120, 130}


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


@pytest.mark.fault("T12")
def test_a_trainer_without_hooks_that_starts_behind(bucket: Bucket, new_vm: NewVm) -> None:
    """A framework writes step 100 after step 200 was committed: a resume takes step 100, later step 110."""
    vm = new_vm("a", bucket.store)
    daemon = vm.start_daemon()
    adopted(vm.run_directory / "checkpoint-200")
    daemon.lines.wait(event="committed", step=200)
    adopted(vm.run_directory / "checkpoint-100")
    assert daemon.lines.wait(event="committed", step=100)["generation"] == 2
    assert newest(vm) == (2, 100)
    adopted(vm.run_directory / "checkpoint-110")
    assert daemon.lines.wait(event="committed", step=110)["generation"] == 2
    assert newest(vm) == (2, 110)


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
    status = vm.status()
    assert status["trainers_refused"]["count"] >= 2
    assert "torchrun" in status["trainers_refused"]["last"]
    assert len(status["trainers"]) == 1
    first.kill()
    assert train(vm).lines.wait(event="resumed")["step"] == 0
    assert daemon.popen.poll() is None


def recorded_start(vm: Vm) -> str:
    """Id of the newest start that the daemon has recorded."""
    record = vm.run_directory / ".swansongd" / "claim.json"
    start: str = json.loads(record.read_bytes())["starts"][-1]["id"]
    return start


def adopted(directory: Path) -> None:
    """A checkpoint of the Hugging Face Trainer."""
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "trainer_state.json").write_text("{}")
