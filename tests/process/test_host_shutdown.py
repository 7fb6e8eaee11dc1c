# SPDX-License-Identifier: Apache-2.0
"""The host shuts down without an earlier notice: SIGTERM to the daemon is the notice."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Bucket
from testkit.rig import newest_step
from testkit.waiting import until


@pytest.mark.skipif(
    Path("/run/systemd/system").is_dir(),
    reason="does not apply: under systemd the daemon distinguishes a stop from a shutdown",
)
@pytest.mark.fault("H03")
@pytest.mark.parametrize("is_trainer_ended", [False, True])
def test_sigterm_outside_systemd_is_a_notice(
    is_trainer_ended: bool, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The trainer saves, its checkpoint is committed, the farewell is written; then the daemon exits.

    The trainer may get the signal a moment earlier, as in a pod: it ends after its checkpoint.
    """
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=5)

    if is_trainer_ended:
        trainer.kill(signal.SIGTERM)
    daemon.kill(signal.SIGTERM)

    assert daemon.wait() == 0
    verdict = daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "SAFE"
    (manifest,) = bucket.manifests()
    assert (manifest["kind"], manifest["step"]) == ("emergency", verdict["step"])
    (farewell,) = bucket.farewells()
    assert farewell["timeline"][0]["kind"] == "os-shutdown"
    if is_trainer_ended:
        assert trainer.wait() == -signal.SIGTERM
    else:
        trainer.lines.wait(step=verdict["step"] + 20)


@pytest.mark.fault("H02", "H15", "O02")
def test_sigint_exits_without_a_checkpoint(bucket: Bucket, new_vm: Any, witness: str) -> None:
    """An operator's Ctrl-C stops the daemon immediately, with a thread in a request that hangs.

    The trainer continues.
    """
    vm = new_vm("vm", bucket.store, settings={"run": {"checkpoint_interval_s": 1}})
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=5)
    bucket.order("stall", match="/data/", times=1000)
    until(lambda: bucket.order("hits"), what="a request that hangs")

    daemon.kill(signal.SIGINT)

    assert daemon.wait(timeout_s=5) == 0
    assert not daemon.lines.all(event="verdict")
    step = newest_step(trainer)
    trainer.lines.wait(step=step + 20)


@pytest.mark.fault("N09")
@pytest.mark.parametrize("last", [signal.SIGINT, signal.SIGKILL])
def test_the_next_container_has_no_notice_of_the_last_one(
    last: int, bucket: Bucket, new_vm: Any
) -> None:
    """SIGTERM ends a container.  The next one has its disk and the boot of its machine, and no notice."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    if last == signal.SIGINT:
        assert vm.swansong("notify", "--in", "1h").returncode == 0
    daemon.kill(signal.SIGTERM)
    daemon.lines.wait(event="evacuation", phase="notice")
    daemon.kill(last)
    daemon.wait()
    vm.start_daemon()
    shown = vm.swansong("notify", "--in", "2h", "--json")  # decided after the recorded ones
    assert len(json.loads(shown.stdout)["notices"]) == 1, shown


@pytest.mark.fault("H02", "H03")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_does_not_wait_for_the_next_tick(number: int, bucket: Bucket, new_vm: Any) -> None:
    """A daemon without events and ticks answers a signal: of 25 s, none may pass before the notice."""
    vm = new_vm("vm", bucket.store, constants={"swansongd.service.service._TICK_S": 600.0})
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store")

    daemon.kill(number)

    if number == signal.SIGTERM:
        daemon.lines.wait(event="notice", timeout_s=20)
    else:
        assert daemon.wait(timeout_s=60) == 0
