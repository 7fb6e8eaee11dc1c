# SPDX-License-Identifier: Apache-2.0
"""A trainer and the real daemon: periodic checkpoints, a NaN and its rollback, a stall, a stop."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import swansong

from testkit import TRAINERS
from testkit.rig import Process, Vm
from testkit.waiting import until

NewVm = Callable[..., Vm]
WAVERING = str(TRAINERS / "wavering.py")
SETTINGS = {
    "run": {"name": "run", "checkpoint_interval_s": 0.5},
    "trainer": {"stall_min_s": 4.0, "settle_s": 1.0},
}


def start(new_vm: NewVm, tmp_path: Path, *arguments: str) -> tuple[Vm, Process]:
    store = {"url": f"file://{tmp_path}/store"}
    (tmp_path / "store").mkdir()
    vm = new_vm("a", store, settings={**SETTINGS})
    vm.start_daemon()
    command = [sys.executable, "-u", WAVERING, *arguments]
    return vm, vm.spawn(command, lines_on="stdout", SWANSONG_SOCKET=str(vm.socket))


def test_a_run_rolls_back_from_a_nan_and_continues_as_a_new_generation(
    new_vm: NewVm, tmp_path: Path
) -> None:
    """Only the daemon plans saves; unhealthy commits are marked, and the next VM does not restore them."""
    vm, trainer = start(new_vm, tmp_path, "--bad-after", "2")
    bad = trainer.lines.wait(event="bad")
    back = trainer.lines.wait(event="rolled_back")
    assert back["to_step"] < bad["from_step"] <= back["from_step"]
    assert vm.daemon is not None
    assert vm.daemon.lines.wait(event="rolled_back")["to_step"] == back["to_step"]
    trainer.lines.wait(event="committed", generation=2)
    commits = vm.commits()
    unhealthy = [row for row in commits if row["healthy"] is False]
    assert unhealthy, "the checkpoint after the NaN is missing, or is not marked"
    assert {row["generation"] for row in unhealthy} == {1}
    newest = commits[0]
    assert (newest["generation"], newest["healthy"]) == (2, True)
    assert "healthy" in newest["protected"]
    assert newest["kind"] == "periodic"
    restored = vm.swansong("restore", "--to", str(tmp_path / "here"), "--json")
    assert restored.returncode == 0
    weights = next((tmp_path / "here").glob("rank-00000/weights")).read_text()
    assert weights != "nan"


@pytest.mark.fault("T04")
def test_a_stall_is_reported_and_a_stopped_trainer_exits_with_75(
    new_vm: NewVm, tmp_path: Path
) -> None:
    """SIGSTOP is a stall in log and status; after SIGCONT and a notice the trainer saves and exits."""
    vm, trainer = start(new_vm, tmp_path)
    trainer.lines.wait(event="committed")
    assert vm.daemon is not None
    assert vm.status()["checkpoint_interval_s"] == 0.5
    until(lambda: vm.status()["trainers"][0]["step_s"], what="a measured step")
    trainer.popen.send_signal(signal.SIGSTOP)
    stall = vm.daemon.lines.wait(event="stall")
    assert stall["ranks"] == [0]
    assert stall["silent_s"] >= 4
    assert vm.status()["trainers"][0]["stalled_s"] >= 4
    assert "made no progress" in vm.status_words()
    trainer.popen.send_signal(signal.SIGCONT)
    vm.daemon.lines.wait(event="stall_over")
    notified = vm.swansong("notify", "--in", "60s", "--wait")
    assert notified.returncode == 0, notified.stderr
    assert trainer.wait(30) == swansong.EXIT_SAVED == 75
    stopped = trainer.lines.wait(event="stopped")
    newest = vm.commits()[0]
    assert (newest["step"], newest["kind"]) == (stopped["step"], "emergency")
