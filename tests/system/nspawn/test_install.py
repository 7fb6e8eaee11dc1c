# SPDX-License-Identifier: Apache-2.0
"""Upgrade, a second job, and uninstallation on a running VM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.nspawn import build
from testkit.nspawn.container import DAEMON, TRAINER, Container
from testkit.waiting import until

pytestmark = pytest.mark.timeout(300, func_only=True)

PAGE = build.REPOSITORY / "docs" / "operations" / "install.md"
SECOND = "swansongd-second.service"
POLKIT = "/usr/share/dbus-1/system-services/org.freedesktop.PolicyKit1.service"
STAGING = "d /mnt/nvme/staging 2750 swansong swansong-trainers -"


def uninstall_commands() -> str:
    """The commands of docs/operations/install.md, for root."""
    return PAGE.read_text().partition("## Uninstall\n")[2].split("```")[1].replace("sudo ", "")


def second_job_commands() -> str:
    """The commands of docs/operations/install.md for a second job, for root, with sed as the editor."""
    socket = r's|^\[trainer\]$|&\nsocket = "/run/swansong-second/trainer.sock"|'
    edit = f"""sed -i -e 's|^name = .*|name = "second"|' -e '{socket}'"""
    commands = PAGE.read_text().partition("## Two jobs on one VM\n")[2].split("```")[1]
    commands = commands.replace("sudoedit", edit).replace("sudo ", "")
    return commands.replace("TRAINER", "trainer-second")


def version_finding(vm: Container) -> dict[str, str]:
    """The finding of ``swansong doctor`` about the versions."""
    findings = json.loads(vm.run("swansong", "doctor", "--json", may_fail=True, timeout_s=60))
    found: dict[str, str] = next(one for one in findings if one["name"] == "version")
    return found


def test_an_upgrade_asks_for_a_restart(
    new_vm: Any, bucket: Bucket, aws: Aws, tmp_path: Path
) -> None:
    """provision.sh prints the command while the daemon runs; doctor warns until the restart."""
    wheels = build.given(tmp_path / "given", "3.11")
    options = (f"--bind-ro={build.REPOSITORY}:/srv/swansong", f"--bind-ro={wheels}:/srv/given")
    vm = new_vm(bucket, options=options)
    vm.power_on()
    vm.wait_active()
    assert version_finding(vm)["level"] == "ok"

    again = "/srv/swansong/packer/provision.sh --no-packages --wheelhouse /srv/given/wheels"
    output = vm.run("sh", "-c", again, timeout_s=100)
    assert "systemctl restart swansongd" in output
    assert "systemctl start swansongd" not in output
    assert output.splitlines()[:-1] == ["provision: kept /etc/swansong/swansong.toml"]

    init = vm.run("sh", "-c", "ls /opt/swansong/lib/python3*/site-packages/swansongd/__init__.py")
    vm.run("sed", "-i", 's/^__version__ = "[^"]*/&.1/', init)
    finding = version_finding(vm)
    assert finding["level"] == "warning"
    assert finding["found"].startswith("the daemon runs version ")
    vm.run("sh", "-c", finding["fix"].removeprefix("sudo "))
    until(lambda: vm.status()["version"] in finding["found"], what="the new daemon")
    assert version_finding(vm)["level"] == "ok"


def test_two_jobs_on_one_vm_are_both_saved(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """Each job has its daemon, and a shutdown without logind's lock stops each daemon before its trainer."""
    vm = new_vm(bucket)
    vm.remove(POLKIT)
    vm.remove("/usr/lib/systemd/system/polkit.service")
    vm.drop_in(DAEMON, "[Unit]\nAfter=network.target\n")
    vm.power_on()
    vm.wait_active()
    vm.wait_connected()
    vm.run("bash", "-ex", "-c", second_job_commands(), timeout_s=60)
    larger = "sed 's|$ARGUMENTS|& --pad-mb 20|' trainer.service >trainer-second.service"
    vm.run("sh", "-ec", f"cd /etc/systemd/system; {larger}; systemctl daemon-reload")
    vm.run("systemctl", "start", "trainer-second")
    status = ("swansong", "--config", "/etc/swansong/second.toml", "status", "--json")
    second = until(lambda: json.loads(vm.run(*status))["trainers"], what="the second trainer")
    assert len(second) == len(vm.status()["trainers"]) == 1
    vm.slow_wire(4_000_000)

    vm.run("systemctl", "poweroff")

    assert vm.wait_off() == 0
    for daemon, trainer in ((DAEMON, TRAINER), (SECOND, "trainer-second.service")):
        verdict = vm.journal.wait(unit=daemon, event="verdict")
        assert verdict.facts["verdict"] == "SAFE"
        assert verdict.mono_s < vm.journal.wait(f"Stopping {trainer}").mono_s


def test_uninstalling_a_running_vm_leaves_nothing(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """No link, no line of tmpfiles and no delay of logind remains after the steps of the operations page."""
    vm = new_vm(bucket)
    vm.write("/etc/tmpfiles.d/swansong-staging.conf", f"{STAGING}\n")
    vm.drop_in(DAEMON, "[Unit]\nAfter=network.target\n")
    vm.power_on()
    vm.wait_active()
    vm.run("systemctl", "enable", "swansong-nvme.service")
    vm.run("systemctl", "disable", "--now", "trainer.service")

    vm.run("bash", "-ex", "-c", uninstall_commands(), timeout_s=60)

    places = ("/etc", "/usr", "/opt", "/var/lib", "/run/swansong", "/run/swansong-restore")
    search = ("find", *places, "-xdev", "-iname", "*swansong*")
    left = vm.run(*search, may_fail=True).splitlines()
    assert [path for path in left if not path.startswith(("/etc/trainer", "/opt/train/"))] == []
    assert vm.run("find", "/etc/systemd", "-xtype", "l", "!", "-lname", "/dev/null") == ""
    output = vm.run("sh", "-c", "systemd-tmpfiles --create 2>&1 || echo failed")
    assert "swansong" not in output
    delay = ("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1")
    delay += ("org.freedesktop.login1.Manager", "InhibitDelayMaxUSec")
    assert vm.run(*delay) == "t 5000000"
    units = vm.run("systemctl", "list-units", "--all", "--plain", "--no-legend", "--type=service")
    assert [line for line in units.splitlines() if "swansong" in line] == []
    for database in ("passwd", "group"):
        assert "swansong" not in vm.run("getent", database)
