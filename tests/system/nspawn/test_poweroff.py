# SPDX-License-Identifier: Apache-2.0
"""The operating system shuts down without a notice from the cloud."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.nspawn.container import DAEMON, TRAINER, Container
from testkit.waiting import until

pytestmark = pytest.mark.timeout(300, func_only=True)

SLOW = 4_000_000
"""Bytes a second on the network: the flush of PADDED takes some seconds."""
SLOWER = 200_000
"""The flush of PADDED takes longer than logind's delay."""
TOO_SHORT_S = 2
"""A stop timeout that is too short for that flush."""
PADDED = "--steps 100000 --step-delay-s 0.02 --pad-mb 20"
POLKIT = "/usr/share/dbus-1/system-services/org.freedesktop.PolicyKit1.service"


def training(vm: Container, bytes_per_s: int = SLOW) -> None:
    """Boot and wait until the trainer trains; from then on the network is slow."""
    vm.power_on()
    vm.wait_step(20)
    vm.journal.wait(source="logind", event="health")
    vm.wait_connected()
    vm.slow_wire(bytes_per_s)


def assert_flushed_before_the_shutdown(vm: Container, bucket: Bucket, phases: Any) -> None:
    """The verdict came before the trainer and the network stopped, and the state is in the bucket."""
    verdict = vm.journal.wait(event="verdict")
    assert verdict.facts["verdict"] == "SAFE"
    stopping = vm.journal.wait("Stopping trainer.service")
    no_network = vm.journal.wait("Stopped target network.target")
    phases.begin(vm.journal.wait(event="evacuation", phase="notice"))
    for phase in ("sealed", "flushed", "committed"):
        phases.add(phase, vm.journal.wait(event="evacuation", phase=phase))
    phases.add("verdict", verdict)
    phases.add("trainer stopping", stopping)
    phases.add("network down", no_network)
    phases.add("last entry of the journal", vm.journal.all()[-1])
    assert verdict.mono_s < min(stopping.mono_s, no_network.mono_s)
    (manifest,) = bucket.manifests()
    assert (manifest["kind"], manifest["step"]) == ("emergency", verdict.facts["step"])
    # The trainer continued during the upload of its checkpoint.
    steps = [e.facts["step"] for e in vm.journal.all(unit=TRAINER) if "step" in e.facts]
    assert max(steps) > manifest["step"]


@pytest.mark.fault("H03", "O16")
def test_poweroff_waits_for_the_flush(new_vm: Any, bucket: Bucket, aws: Aws, phases: Any) -> None:
    """logind delays the shutdown exactly until the checkpoint is committed."""
    vm = new_vm(bucket, arguments=PADDED)
    training(vm)

    vm.run("systemctl", "poweroff")

    assert vm.wait_off() == 0
    assert_flushed_before_the_shutdown(vm, bucket, phases)
    notice = vm.journal.wait(event="evacuation", phase="notice")
    assert notice.facts["source"] == "logind"


@pytest.mark.fault("H03")
def test_poweroff_without_polkit(new_vm: Any, bucket: Bucket, aws: Aws, phases: Any) -> None:
    """No delay lock is available, and the source reports it.  SIGTERM is the notice, the daemon extends its
    stop timeout during the flush, and the stop order of the units keeps the network up."""
    vm = new_vm(bucket, arguments=PADDED)
    vm.drop_in(DAEMON, f"[Service]\nTimeoutStopSec={TOO_SHORT_S}s\n")
    vm.remove(POLKIT)
    vm.remove("/usr/lib/systemd/system/polkit.service")
    training(vm)
    (logind,) = (one for one in vm.status()["sources"] if one["name"] == "logind")
    assert logind["health"] == "degraded"
    assert "polkit" in logind["reason"]

    vm.run("systemctl", "poweroff")

    assert vm.wait_off() == 0
    assert_flushed_before_the_shutdown(vm, bucket, phases)
    stopping = vm.journal.wait("Stopping swansongd.service")
    assert vm.journal.wait(event="verdict").mono_s - stopping.mono_s > TOO_SHORT_S


def test_crash_during_a_flush_keeps_the_lock(
    new_vm: Any, bucket: Bucket, aws: Aws, phases: Any
) -> None:
    """Killed during a delayed shutdown, the daemon restarts and continues; the shutdown is still delayed."""
    vm = new_vm(bucket, arguments=PADDED)
    training(vm)
    vm.run("systemctl", "poweroff")
    flushing = vm.journal.wait(event="evacuation", phase="flush")

    killed = vm.main_pid()
    vm.run("kill", "-KILL", str(killed))

    assert vm.wait_off() == 0
    phases.add("flush begins", flushing)
    phases.add("daemon killed", vm.journal.wait("Main process exited", unit=DAEMON))
    again = vm.journal.wait(event="started", since=flushing.mono_s)
    phases.add("daemon started again", again)
    assert again.pid != killed
    assert_flushed_before_the_shutdown(vm, bucket, phases)
    first, second = (
        entry for entry in vm.journal.all(event="evacuation", phase="notice", unit=DAEMON)
    )
    assert first.facts["seconds_left"] + first.mono_s == pytest.approx(
        second.facts["seconds_left"] + second.mono_s, abs=0.5
    )


CLOSED_STAGING = "chown root:root /var/lib/swansong/staging && chmod 0700 /var/lib/swansong/staging"
"""After this command the program starts and exits with an error."""
NO_PROGRAM = "mv /opt/swansong/bin/swansongd /opt/swansong/bin/swansongd.gone"
"""After this command systemd has no program to start."""
DELAY_OVER = "inhibitor timeout is reached"


@pytest.mark.parametrize("fault", [CLOSED_STAGING, NO_PROGRAM], ids=["starts and ends", "no start"])
def test_crash_loop_does_not_delay_the_shutdown(
    new_vm: Any, bucket: Bucket, aws: Aws, phases: Any, fault: str
) -> None:
    """logind waits only for a running daemon, not for one that systemd restarts repeatedly."""
    vm = new_vm(bucket)
    vm.power_on()
    vm.journal.wait(source="logind", event="health", health="ok")
    vm.run("sh", "-c", fault)
    vm.run("kill", "-KILL", str(vm.main_pid()))
    until(lambda: int(vm.show(DAEMON, "NRestarts")) >= 3, timeout_s=60, what="a crash loop")
    phases.begin(vm.journal.all()[-1])

    vm.run("systemctl", "poweroff")

    assert vm.wait_off() == 0
    phases.add("last entry of the journal", vm.journal.all()[-1])
    assert vm.journal.all(DELAY_OVER) == []


def test_crash_during_a_flush_without_a_start_releases_the_lock(
    new_vm: Any, bucket: Bucket, aws: Aws, phases: Any
) -> None:
    """A daemon that takes the lock over and cannot start does not leave the lock behind."""
    vm = new_vm(bucket, arguments=PADDED)
    training(vm, SLOWER)
    vm.run("systemctl", "poweroff")
    phases.add("flush begins", vm.journal.wait(event="evacuation", phase="flush"))
    vm.run("sh", "-c", CLOSED_STAGING)
    vm.run("kill", "-KILL", str(vm.main_pid()))

    assert vm.wait_off() == 0
    phases.add("start failed", vm.journal.wait(event="cannot_start"))
    phases.add("last entry of the journal", vm.journal.all()[-1])
    assert vm.journal.all(DELAY_OVER) == []


def test_second_crash_during_a_shutdown_releases_the_lock(
    new_vm: Any, bucket: Bucket, aws: Aws, phases: Any
) -> None:
    """A shutdown waits for one restart of the daemon, not for a daemon that crashes in each evacuation."""
    vm = new_vm(bucket, arguments=PADDED)
    training(vm, SLOWER)
    vm.run("systemctl", "poweroff")
    flushing = vm.journal.wait(event="evacuation", phase="flush")
    phases.add("flush begins", flushing)
    vm.run("kill", "-KILL", str(vm.main_pid()))
    again = vm.journal.wait(event="evacuation", phase="flush", since=flushing.mono_s + 0.001)
    phases.add("flush continues", again)
    vm.run("sh", "-c", CLOSED_STAGING)
    vm.run("kill", "-KILL", str(vm.main_pid()))

    assert vm.wait_off() == 0
    phases.add("last entry of the journal", vm.journal.all()[-1])
    assert vm.journal.all(DELAY_OVER) == []


# Like a debugger: systemd sends SIGCONT to a process that it stops, which would resume it after SIGSTOP.
HOLD = """
import contextlib, ctypes, os, sys
PTRACE_ATTACH, WALL = 16, 0x40000000
for thread in sorted(map(int, os.listdir(f"/proc/{sys.argv[1]}/task")), reverse=True):
    ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_ATTACH, thread, 0, 0)
with contextlib.suppress(ChildProcessError):
    while True:
        os.waitpid(-1, WALL)
"""


def test_stop_takes_too_long(new_vm: Any, bucket: Bucket, aws: Aws, phases: Any) -> None:
    """An unresponsive daemon is killed after its stop timeout; the VM shuts down, and commits remain."""
    vm = new_vm(bucket, arguments="--steps 100000 --step-delay-s 0.02 --every-steps 20")
    vm.drop_in(DAEMON, "[Service]\nTimeoutStopSec=3s\n")
    vm.write("/etc/systemd/logind.conf.d/zzz-test.conf", "[Login]\nInhibitDelayMaxSec=1s\n")
    vm.power_on()
    until(bucket.manifests, timeout_s=60, what="a commit")
    pid = vm.main_pid()
    hold = ("/opt/swansong/bin/python", "-c", HOLD, str(pid))
    vm.run("systemd-run", "--quiet", "--property=DefaultDependencies=no", *hold)
    until(lambda: "tracing stop" in vm.run("cat", f"/proc/{pid}/status"), what="the daemon to hang")

    vm.run("systemctl", "poweroff")

    assert vm.wait_off() == 0
    delay_over = vm.journal.wait("inhibitor timeout is reached")
    killed = vm.journal.wait("timed out. Killing", unit=DAEMON)
    phases.add("delay over, daemon stopping", delay_over)
    phases.add("killed by systemd", killed)
    phases.add("last entry of the journal", vm.journal.all()[-1])
    assert killed.mono_s - delay_over.mono_s < 10
    assert bucket.manifests()
