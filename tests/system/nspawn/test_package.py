# SPDX-License-Identifier: Apache-2.0
"""The Debian package on a VM that trains: upgrade, downgrade, removal, purge."""

from __future__ import annotations

import json
from typing import Any

import pytest

from testkit import REPOSITORY
from testkit.clouds import Aws, Bucket
from testkit.nspawn.container import DAEMON, TRAINER, Container
from testkit.waiting import until

pytestmark = pytest.mark.timeout(600, func_only=True)

OLD, NEW, TREE = "/srv/swansong.deb", "/srv/newer.deb", "/srv/tree"
CONFIG = "/etc/swansong/swansong.toml"
STAGING = "/var/lib/swansong/staging"
NEWER = f"""
dpkg-deb -R {OLD} {TREE}
sed -i 's/^Version: .*/&.1/' {TREE}/DEBIAN/control
sed -i 's/^__version__ = "[^"]*/&.1/' {TREE}/opt/swansong/lib/python3*/site-packages/swansongd/__init__.py
dpkg-deb --root-owner-group -Znone -b {TREE} {NEW}
"""
"""The same package as a later version."""


def install(vm: Container, package: str) -> str:
    """Install it without a terminal, as an unattended upgrade does; returns the output."""
    return vm.run("sh", "-c", f"dpkg --force-unsafe-io --install {package} 2>&1", timeout_s=180)


def purge_command() -> str:
    """The command of docs/operations/install.md, for root without a terminal."""
    page = (REPOSITORY / "docs" / "operations" / "install.md").read_text()
    command = page.partition("## Uninstall\n")[2].split("```")[1].partition("#")[0]
    return command.strip().replace("sudo apt-get", "apt-get --yes")


def version_finding(vm: Container) -> dict[str, str]:
    """The finding of ``swansong doctor`` about the versions."""
    findings = json.loads(vm.run("swansong", "doctor", "--json", may_fail=True, timeout_s=180))
    found: dict[str, str] = next(one for one in findings if one["name"] == "version")
    return found


@pytest.mark.fault("H14")
def test_a_package_changes_under_a_running_trainer(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """An upgrade restarts the daemon, which sends the set that it had not sent; in an evacuation it waits.

    Trainer and configuration stay as they are.  A removal keeps what is configured and enabled, and purge
    keeps nothing but checkpoints.
    """
    vm = new_vm(bucket, arguments="--steps 100000 --step-delay-s 0.02 --pad-mb 10")
    vm.write(
        "/etc/tmpfiles.d/swansong-staging.conf", "d /mnt/staging 2750 swansong swansong-trainers -"
    )
    vm.drop_in(DAEMON, "[Unit]\nAfter=network.target\n")
    vm.power_on()
    vm.wait_active()
    vm.wait_connected()
    vm.run("sh", "-ec", NEWER, timeout_s=180)
    config = vm.read(CONFIG)
    older, trainer = vm.status(), vm.main_pid(TRAINER)
    vm.slow_wire(100_000)
    vm.run("swansong", "drill", "--in", "250s")
    found = vm.journal.wait(event="sealed_set_found")
    vm.run("swansong", "notify", "--withdraw")
    vm.journal.wait(event="notice_withdrawn")

    install(vm, NEW)

    until(lambda: vm.status()["trainers"], what="the trainer's Hello")
    newer = vm.status()
    assert newer["version"] == f"{older['version']}.1"
    assert newer["pid"] != older["pid"]
    assert vm.main_pid(TRAINER) == trainer
    assert vm.read(CONFIG) == config
    assert vm.journal.all(event="committed") == []
    vm.run("tc", "qdisc", "del", "dev", "host0", "root")
    assert vm.journal.wait(event="committed").facts["step"] == found.facts["step"]

    vm.run("swansong", "drill", "--in", "120s")
    until(lambda: " s left;" in vm.show(DAEMON, "StatusText"), what="the evacuation")
    assert "is in an evacuation" in install(vm, OLD)
    assert vm.status()["pid"] == newer["pid"]
    finding = version_finding(vm)
    assert finding["level"] == "warning"
    vm.run("sh", "-c", finding["fix"].removeprefix("sudo "))
    until(lambda: vm.status()["version"] == older["version"], what="the old daemon")
    assert version_finding(vm)["level"] == "ok"
    assert vm.main_pid(TRAINER) == trainer

    remove = "systemctl enable swansong-nvme && dpkg --remove swansong"
    vm.run("sh", "-ec", remove, timeout_s=180)
    assert vm.main_pid() == 0
    assert vm.main_pid(TRAINER) == trainer
    assert vm.read(CONFIG) == config
    install(vm, NEW)
    assert vm.run("systemctl", "is-enabled", DAEMON) == "enabled"
    assert vm.read(CONFIG) == config

    vm.run("mkdir", "-p", "/mnt/staging/run/step-1")
    kept = vm.run("sh", "-c", f"{purge_command()} 2>&1", timeout_s=180)
    assert "because it contains checkpoints" in kept
    assert vm.run("find", STAGING, "-name", "step-*", "-prune") != ""
    vm.run("sh", "-ec", f"rm -r {STAGING}; {TREE}/DEBIAN/postrm purge")
    vm.run("test", "-d", "/mnt/staging/run/step-1")
    assert left(vm) == []


def left(vm: Container) -> list[str]:
    """Files, links, settings, units and users of an installation that are still there."""
    places = ("/etc", "/usr", "/opt", "/var/lib", "/run/swansong", "/run/swansong-restore")
    found = vm.run("find", *places, "-xdev", "-iname", "*swansong*", may_fail=True).splitlines()
    found = [path for path in found if not path.startswith("/opt/train/")]
    found += vm.run("find", "/etc/systemd", "-xtype", "l", "!", "-lname", "/dev/null").splitlines()
    output = vm.run("sh", "-c", "systemd-tmpfiles --create 2>&1 || echo failed")
    found += [line for line in output.splitlines() if "swansong" in line]
    delay = ("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1")
    delay += ("org.freedesktop.login1.Manager", "InhibitDelayMaxUSec")
    found += [line for line in [vm.run(*delay)] if line != "t 5000000"]
    for database in ("passwd", "group"):
        entries = vm.run("getent", database).splitlines()
        found += [line for line in entries if "swansong" in line]
    return found
