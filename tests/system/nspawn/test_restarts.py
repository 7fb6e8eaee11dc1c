# SPDX-License-Identifier: Apache-2.0
"""The daemon or the whole VM restarts during training."""

from __future__ import annotations

from typing import Any

import pytest
from swansong import layout

from testkit import REPOSITORY
from testkit.clouds import Aws, Bucket
from testkit.nspawn.container import DAEMON, TRAINER, Container
from testkit.waiting import until

pytestmark = pytest.mark.timeout(300, func_only=True)


WITHOUT_HOOKS = REPOSITORY / "systemd" / "trainer.service.d" / "without-hooks.conf"


def joined(vm: Container) -> list[dict[str, Any]]:
    """The trainers that are connected to the daemon."""
    trainers: list[dict[str, Any]] = vm.status()["trainers"]
    return trainers


@pytest.mark.fault("H02")
def test_restart_by_the_operator_disturbs_no_training(
    new_vm: Any, bucket: Bucket, aws: Aws, phases: Any
) -> None:
    """No checkpoint is taken, no connection is refused; generation and trainer process stay the same."""
    vm = new_vm(bucket)
    vm.power_on()
    vm.wait_active()
    until(lambda: joined(vm), what="the trainer's Hello")
    until(lambda: vm.status()["generation"], what="the generation")
    before, trainer = vm.status(), vm.main_pid(TRAINER)

    vm.run("systemctl", "restart", DAEMON)

    until(lambda: joined(vm), what="the trainer's Hello")
    until(lambda: vm.status()["generation"], what="the generation")
    after = vm.status()
    assert after["pid"] != before["pid"]
    assert after["generation"] == before["generation"]
    assert vm.main_pid(TRAINER) == trainer
    assert vm.journal.all(event="verdict") == []
    assert bucket.manifests() == []
    stopping = vm.journal.wait(event="stopping")
    first, second = vm.journal.all(event="started")
    phases.add("stopping", stopping)
    phases.add("started again", second)
    assert second.mono_s > stopping.mono_s > first.mono_s
    # The socket, in which connections wait during the restart.  The delay lock is not stored.
    assert int(vm.show(DAEMON, "NFileDescriptorStore")) == 1


def test_a_reload_takes_a_checked_configuration(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """A wrong one fails the reload, and the daemon continues; a right one counts, and training continues."""
    vm = new_vm(bucket)
    vm.power_on()
    vm.wait_active()
    # A systemd that is too busy to answer counts as one that shuts the host down.
    vm.run("systemctl", "is-system-running", "--wait", may_fail=True)
    until(lambda: joined(vm), what="the trainer's Hello")
    daemon, trainer = vm.main_pid(), vm.main_pid(TRAINER)
    path = "/etc/swansong/swansong.toml"
    right = vm.read(path)

    vm.write(path, right.replace("[trainer]", "[trainer]\nsettle_s = -1", 1))
    assert "failed" in vm.run("sh", "-c", f"systemctl reload {DAEMON} 2>&1", may_fail=True)
    vm.journal.wait("trainer.settle_s")
    assert vm.main_pid() == daemon

    vm.write(path, right.replace("[trainer]", "[trainer]\nstall_steps = 77", 1))
    vm.run("systemctl", "reload", DAEMON)
    until(lambda: vm.main_pid() not in (0, daemon), what="the next daemon")
    until(lambda: joined(vm), what="the trainer's Hello")
    assert vm.main_pid(TRAINER) == trainer
    assert vm.journal.all(event="verdict") == []


@pytest.mark.fault("H04")
def test_watchdog_restarts_a_hung_daemon(
    new_vm: Any, bucket: Bucket, aws: Aws, phases: Any
) -> None:
    """systemd kills it and starts another, which keeps the generation and still commits."""
    vm = new_vm(bucket)
    vm.drop_in(DAEMON, "[Service]\nWatchdogSec=2s\n")
    vm.power_on()
    vm.wait_active()
    until(lambda: joined(vm), what="the trainer's Hello")
    until(lambda: vm.status()["generation"], what="the generation")
    before, trainer = vm.status(), vm.main_pid(TRAINER)

    vm.run("kill", "-STOP", str(before["pid"]))

    timeout = vm.journal.wait("Watchdog timeout", unit=DAEMON)
    again = vm.journal.wait(event="started", since=timeout.mono_s)
    until(lambda: joined(vm), what="the trainer's Hello")
    until(lambda: vm.status()["generation"], what="the generation")
    assert vm.status()["generation"] == before["generation"]
    assert vm.main_pid(TRAINER) == trainer
    vm.wait_connected()
    aws.notice(in_s=30)
    verdict = vm.journal.wait(event="verdict")
    assert verdict.facts["verdict"] == "SAFE"
    phases.add("watchdog timeout", timeout)
    phases.add("started again", again)
    phases.add("verdict of a later notice", verdict)


def sealed_steps(vm: Container) -> list[int]:
    """Steps of the sealed sets on the disk of the VM, read from outside."""
    names = vm.names("/var/lib/swansong/staging/run")
    sealed = (layout.parse_sealed_name(name) for name in names)
    return sorted(each[0] for each in sealed if each is not None)


@pytest.mark.fault("D06")
def test_power_cut_and_boot(new_vm: Any, bucket: Bucket, aws: Aws, phases: Any) -> None:
    """After a power cut the trainer resumes from a set that survived, newer than the newest commit.

    The restore unit runs after the daemon and before the trainer, and gets the daemon's answer.
    """
    vm = new_vm(bucket, arguments="--steps 100000 --step-delay-s 0.02 --every-steps 25")
    vm.drop_in(TRAINER, WITHOUT_HOOKS.read_text().replace("my-run", "run"))
    vm.power_on()
    until(lambda: len(bucket.manifests()) >= 2, timeout_s=60, what="two commits")
    bucket.order("outage", seconds=600)
    until(lambda: len(sealed_steps(vm)) >= 4, timeout_s=60, what="sets that are not committed")

    vm.power_cut()
    bucket.order("clear")
    survived, before = max(sealed_steps(vm)), vm.journal
    newest = bucket.manifests()[0]["step"]
    assert survived > newest
    vm.power_on()

    first = vm.wait_step(survived + 1)
    assert first.facts["step"] == survived + 1
    until(
        lambda: survived in [manifest["step"] for manifest in bucket.manifests()],
        timeout_s=60,
        what="the commit of the surviving set",
    )
    phases.add("last entry before the power cut", before.all()[-1])
    begins = vm.journal.wait("Starting swansong-restore@run.service")
    # By systemd's own line: a thread of the daemon writes its lines a little later.
    assert vm.journal.wait("Started swansongd.service").mono_s < begins.mono_s < first.mono_s
    assert vm.journal.wait(event="resume").facts["step"] == survived
    phases.add("restore begins", begins)
    phases.add("restore done", vm.journal.wait("Finished swansong-restore@run.service"))
    phases.add("first step", first)
