# SPDX-License-Identifier: Apache-2.0
"""SAFE is reported only if a restore on a new VM returns the newest state of the training that runs.

In these histories the newest commit is not that state.  Two witnesses are independent of the daemon: the
trainer prints its steps, and a restore on another VM shows the state that survives.  The simulation has many
more histories.
"""

from __future__ import annotations

from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.positions import Position, restored, train
from testkit.rig import Vm
from testkit.waiting import until
from tests.process.conftest import NewVm

OLD, NEW = "old", "new"
"""Names of two trainings: the one that was discarded, and the one that runs."""
RECONNECT = {"swansongd.core.arrival.RECONNECT_S": 2.0}
"""The hooks reconnect to a restarted daemon within this time; without this constant within 10 s."""


def expect(vm: Vm, verdict: dict[str, Any], word: str) -> None:
    """Require this verdict in a line of the log, and in the status."""
    assert verdict["verdict"] == word, verdict["reason"]
    assert vm.status()["last_verdict"]["verdict"] == word


@pytest.mark.fault("T01")
def test_a_trainer_that_the_daemon_never_saw_gets_no_promise(
    aws: Aws, bucket: Bucket, new_vm: NewVm
) -> None:
    """The trainer has a wrong path of the socket, and trains beyond the newest commit.

    The verdict is NO_TRAINING, and names that commit.
    """
    before = new_vm("before", bucket.store)
    earlier = before.start_daemon()
    train(before, "--training", OLD, "--save-at", "20")
    earlier.lines.wait(event="committed", step=20)
    before.power_off()
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, constants=RECONNECT)
    chosen = vm.disk / "chosen"
    assert restored(vm, chosen) == Position(OLD, 20)
    wrong = str(vm.disk / "wrong.sock")
    trainer = train(vm, "--training", NEW, SWANSONG_SOCKET=wrong, SWANSONG_RESTORE=str(chosen))
    trainer.lines.wait(step=40)
    daemon = vm.start_daemon()
    aws.notice(in_s=4)
    verdict = daemon.lines.wait(event="verdict")
    expect(vm, verdict, "NO_TRAINING")
    elsewhere = new_vm("elsewhere", bucket.store)
    assert restored(elsewhere, elsewhere.disk / "restored") == Position(OLD, 20)
    assert "SAFE" not in [farewell["verdict"] for farewell in bucket.farewells()]
    newest = vm.commits()[0]
    assert (verdict["generation"], verdict["step"]) == (newest["generation"], newest["step"])


@pytest.mark.fault("H01", "T09")
def test_a_resumed_evacuation_does_not_repeat_safe_after_training_was_rewound(
    aws: Aws, bucket: Bucket, new_vm: NewVm
) -> None:
    """The verdict is SAFE.  Then the daemon is killed, and training is started again from step 20.

    The restarted daemon has no connection to that training: its verdict is PARTIAL.
    """
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, constants=RECONNECT)
    daemon = vm.start_daemon()
    first = train(vm, "--training", OLD, "--save-at", "20")
    daemon.lines.wait(event="committed", step=20)
    first.lines.wait(step=60)
    aws.notice(in_s=6)
    assert daemon.lines.wait(event="verdict")["verdict"] == "SAFE"
    daemon.kill()
    first.kill()
    chosen, never = vm.disk / "chosen", str(vm.disk / "never")
    assert restored(vm, chosen, "--step", "20") == Position(OLD, 20)
    waiting = ("--training", NEW, "--attach-when", never)
    second = train(vm, *waiting, SWANSONG_RESTORE=str(chosen))
    second.lines.wait(event="started")
    daemon = vm.start_daemon()
    expect(vm, daemon.lines.wait(event="verdict"), "PARTIAL")
    elsewhere = new_vm("elsewhere", bucket.store)
    found = restored(elsewhere, elsewhere.disk / "restored")
    assert found.step > 20, "the next VM resumes from the very state that was loaded"
    until(  # the daemon writes it after the log
        lambda: [farewell["verdict"] for farewell in bucket.farewells()][-1:] == ["PARTIAL"],
        timeout_s=10,
        what="farewell: PARTIAL",
    )
