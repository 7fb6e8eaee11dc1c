# SPDX-License-Identifier: Apache-2.0
"""Two jobs on one VM, set up as docs/operations/install.md has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.nspawn import build
from testkit.nspawn.container import DAEMON, TRAINER, Container
from testkit.waiting import until

pytestmark = pytest.mark.timeout(300, func_only=True)

PAGE = build.REPOSITORY / "docs" / "operations" / "install.md"
CONFIG = "/etc/swansong/second/swansong.toml"
SECOND = "swansongd@second.service"
SECOND_TRAINER = "trainer-second.service"
POLKIT = "/usr/share/dbus-1/system-services/org.freedesktop.PolicyKit1.service"


def setup_commands() -> str:
    """The commands of the page, for root, with sed as the editor and status in the place of doctor."""
    commands = PAGE.read_text().partition("## Two jobs on one VM\n")[2].split("```")[1]
    commands = commands.replace("sudoedit", """sed -i 's|^name = .*|name = "second"|'""")
    commands = commands.replace("sudo ", "").replace("doctor", "status")
    return commands.replace("TRAINER.", "trainer-second.")


def status(vm: Container) -> dict[str, Any]:
    """The status of the second daemon."""
    report: dict[str, Any] = json.loads(vm.run("swansong", "--config", CONFIG, "status", "--json"))
    return report


def doctor(vm: Container) -> dict[str, dict[str, str]]:
    """The findings of doctor about the second daemon, by name."""
    command = ("swansong", "--config", CONFIG, "doctor", "--json")
    printed = vm.run(*command, may_fail=True, timeout_s=60)
    return {finding["name"]: finding for finding in json.loads(printed)}


def test_one_notice_saves_both_jobs(new_vm: Any, bucket: Bucket, aws: Aws, phases: Any) -> None:
    """Each job has its daemon, socket, status and doctor, and the stop of one does not concern the other.

    Both states together fit through the wire before the deadline.  A shutdown without logind's lock stops
    each daemon before its trainer.
    """
    vm = new_vm(bucket, arguments="--steps 100000 --step-delay-s 0.02 --pad-mb 10")
    vm.remove(POLKIT)
    vm.remove("/usr/lib/systemd/system/polkit.service")
    vm.drop_in(DAEMON, "[Unit]\nAfter=network.target\n")
    vm.power_on()
    vm.wait_active()
    vm.run("cp", f"/etc/systemd/system/{TRAINER}", f"/etc/systemd/system/{SECOND_TRAINER}")
    vm.run("bash", "-ex", "-c", setup_commands(), timeout_s=60)
    vm.run("systemctl", "start", SECOND_TRAINER)
    vm.wait_connected()
    until(lambda: status(vm)["trainers"], what="the second trainer")

    assert (vm.status()["run"], status(vm)["run"]) == ("run", "second")
    assert "network.target" in vm.show(SECOND, "After").split(), "a drop-in of the first daemon"
    found = doctor(vm)
    checks = ("configuration", "unit file", "unit syntax", "unit", "sandbox", "commit", "socket")
    assert [found[name]["level"] for name in checks] == ["ok"] * len(checks), found
    assert SECOND in found["unit file"]["found"]

    vm.slow_wire(8_000_000)
    aws.notice(in_s=30)
    for daemon in (DAEMON, SECOND):
        verdict = vm.journal.wait(unit=daemon, event="verdict")
        assert verdict.facts["verdict"] == "SAFE"
        phases.begin(vm.journal.wait(unit=daemon, event="evacuation", phase="notice"))
        for phase in ("sealed", "flushed"):
            wanted = {"event": "evacuation", "phase": phase}
            phases.add(f"{daemon} {phase}", vm.journal.wait(unit=daemon, **wanted))

    pid = vm.main_pid()
    vm.run("systemctl", "stop", SECOND)
    asked = vm.run("sh", "-c", f"swansong --config {CONFIG} status 2>&1", may_fail=True)
    assert "systemctl status swansongd@second" in asked
    assert vm.show(TRAINER, "ActiveState") == vm.show(SECOND_TRAINER, "ActiveState") == "active"
    assert vm.status()["trainers"][0]["connected"]
    assert vm.main_pid() == pid
    vm.run("systemctl", "start", SECOND)
    until(lambda: status(vm)["trainers"], what="the second trainer again")
    drop_in = "/etc/systemd/system/swansong-restore@second.service.d"
    vm.run(
        "sh",
        "-ec",
        f"mkdir {drop_in}; printf '[Service]\\nEnvironment=JOB=second' >{drop_in}/a.conf",
    )
    vm.run("systemctl", "daemon-reload")
    vm.run("systemctl", "start", "swansong-restore@second")
    assert "/restored/second" in vm.run("cat", "/run/swansong-restore/second.env")

    off = vm.journal.all()[-1]
    vm.run("systemctl", "poweroff")
    assert vm.wait_off() == 0
    for daemon, trainer in ((DAEMON, TRAINER), (SECOND, SECOND_TRAINER)):
        stopping = vm.journal.wait(unit=daemon, event="stopping", since=off.mono_s)
        assert stopping.mono_s < vm.journal.wait(f"Stopping {trainer}", since=off.mono_s).mono_s
