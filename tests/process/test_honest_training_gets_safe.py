# SPDX-License-Identifier: Apache-2.0
"""Training that can be saved in time gets SAFE, whatever happened to it before the notice.

The oracle is the trainer: its state names the step and the training that made it, and it prints both.  So
SAFE is checked against what the next VM would resume from, and against what was trained.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.positions import Position, restored, train, trained
from testkit.rig import Process
from testkit.waiting import until
from tests.process.conftest import NewVm

RECONNECT = {"swansongd.core.arrival.RECONNECT_S": 2.0}
"""The daemon expects its trainers back within this time of its start; without this constant within 10 s."""
not_under_systemd = pytest.mark.skipif(
    Path("/run/systemd/system").is_dir(),
    reason="does not apply: under systemd the daemon distinguishes a stop from a shutdown",
)


def verdicts(daemon: Process) -> list[dict[str, Any]]:
    """All verdicts of this process of the daemon."""
    return daemon.lines.all(event="verdict")


def safe(daemon: Process) -> dict[str, Any]:
    """The first verdict, which must be SAFE."""
    verdict = daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "SAFE", json.dumps(verdict)
    return verdict


# ---------------------------------------------------------------- a finished run


@not_under_systemd
@pytest.mark.fault("T18", "H02", "H03")
def test_a_shutdown_soon_after_a_crash_of_the_daemon_finds_a_finished_run_safe(
    bucket: Bucket, new_vm: NewVm
) -> None:
    """The run has finished, and its daemon is killed: a shutdown soon after the next start is SAFE."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = train(vm, "--steps", "30", "--every-steps", "10", "--finish")
    assert trainer.wait() == 0
    daemon.kill()
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    daemon.kill(signal.SIGTERM)
    assert daemon.wait(40) == 0
    verdict = safe(daemon)
    assert verdict["step"] == 30
    assert {farewell["verdict"] for farewell in bucket.farewells()} == {"SAFE"}
    after = new_vm("next", bucket.store)
    assert restored(after, after.disk / "restored") == trained(trainer)[-1]


# ---------------------------------------------------------------- the end of the host


@not_under_systemd
@pytest.mark.fault("H03", "O03")
def test_after_safe_a_shutdown_waits_for_no_set_that_cannot_fit(
    aws: Aws, bucket: Bucket, new_vm: NewVm
) -> None:
    """SAFE was reported, and the next periodic set needs twice the grace period: the daemon exits at once.

    The daemon has measured the rate of the store by then.
    """
    bucket.order("pace", total_bytes_per_s=1_000_000)
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    small = train(vm)
    until(lambda: len(trained(small)) > 3, what="steps")
    aws.notice(in_s=120)
    stood = safe(daemon)
    small.kill()
    large = train(vm, "--every-steps", "10", "--padding-bytes", "75000000")
    large.lines.wait(event="resumed", step=stood["step"])
    until(lambda: daemon.lines.all(event="sealed_set_found")[-1]["step"] > stood["step"])
    large.kill()
    until(lambda: vm.status()["bandwidth_bytes_per_s"], what="a measured bandwidth")
    ended_mono_s = time.monotonic()
    daemon.kill(signal.SIGTERM)
    assert daemon.wait(40) == 0
    took_s = time.monotonic() - ended_mono_s
    assert {verdict["verdict"] for verdict in verdicts(daemon)} == {"SAFE"}
    assert took_s < 5, f"the daemon waited {took_s:.1f} s for a set that cannot fit"


# ---------------------------------------------------------------- restarts of the daemon


@pytest.mark.fault("T12", "H02")
def test_a_new_start_that_reconnects_late_is_safe_by_its_own_commit_only(
    aws: Aws, bucket: Bucket, new_vm: NewVm, tmp_path: Path
) -> None:
    """A start from step 20, behind the commit of step 60, reconnects too late after the daemon was restarted.

    Until then no verdict is SAFE: the commits are of the line that was left.  Then its own checkpoint is.
    """
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, constants=RECONNECT)
    daemon = vm.start_daemon()
    first = train(vm, "--every-steps", "20", "--steps", "60")
    assert first.wait() == 0
    daemon.lines.wait(event="committed", step=60)
    chosen = tmp_path / "chosen"
    assert vm.swansong("restore", "--step", "20", "--to", str(chosen)).returncode == 0
    bucket.order("answer", status=503, method="PUT", match="/data/", times=1_000_000)
    second = train(vm, "--step-delay-s", "0.1", SWANSONG_RESTORE=str(chosen))
    until(lambda: len(trained(second)) > 5, what="steps of the second start")
    second.kill(signal.SIGSTOP)
    daemon.kill(signal.SIGINT)
    assert daemon.wait() == 0
    stood_at = trained(second)[-1]
    bucket.order("clear")
    daemon = vm.start_daemon()
    noticed_mono_s = time.monotonic()
    aws.notice(in_s=60)
    until(lambda: time.monotonic() > noticed_mono_s + 4)
    assert not [line for line in verdicts(daemon) if line["verdict"] == "SAFE"]
    second.kill(signal.SIGCONT)
    verdict = daemon.lines.wait(event="verdict", verdict="SAFE", timeout_s=20)
    after = new_vm("next", bucket.store)
    state = restored(after, after.disk / "restored")
    assert state == Position(stood_at.training, verdict["step"])
    assert state in trained(second)
    assert state.step >= stood_at.step
