# SPDX-License-Identifier: Apache-2.0
"""``swansong doctor`` on a real installation: its findings are true, and its fixes work as printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.nspawn.container import DAEMON, TRAINER, Container
from testkit.rig import control
from testkit.waiting import until

pytestmark = pytest.mark.timeout(400, func_only=True)

STATE = "/var/lib/swansong"
CONFIG = "/etc/swansong/swansong.toml"
DROP_IN = f"/etc/systemd/system/{DAEMON}.d"
HOME_KEYS = "/root/.aws/credentials"
DAEMON_KEYS = "/etc/swansong/aws/credentials"
KEYS = "[default]\\naws_access_key_id = emulated\\naws_secret_access_key = emulated\\n"
ROUNDS = 2
Findings = list[dict[str, str]]


@dataclass(frozen=True)
class Setup:
    """One broken setup."""

    name: str
    breaks: str
    """Shell commands, run as root."""
    cause: str
    """Name of the finding that is expected first."""


def doctor(vm: Container, *arguments: str) -> Findings:
    done = vm.run("swansong", "doctor", "--json", *arguments, may_fail=True, timeout_s=90)
    found: Findings = json.loads(done)
    return found


def failures(findings: Findings) -> Findings:
    return [finding for finding in findings if finding["level"] == "failure"]


def fixed(vm: Container, setup: Setup, *arguments: str) -> list[str]:
    """Break the setup, run the printed fixes verbatim; returns descriptions of wrong findings."""
    vm.run("bash", "-c", setup.breaks)
    found = failures(doctor(vm, *arguments))
    if not found or found[0]["name"] != setup.cause:
        return [f"{setup.name}: expected {setup.cause} first, got {found}"]
    tried = []
    for _ in range(ROUNDS):
        for finding in found:
            tried.append(finding["fix"])
            vm.run("bash", "-c", finding["fix"], may_fail=True, timeout_s=60)
        found = failures(doctor(vm, *arguments))
        if not found:
            return []
    return [f"{setup.name}: after {tried} doctor still reports {found}"]


def all_fixed(vm: Container, setups: list[Setup], *arguments: str) -> None:
    """Break and fix each setup by itself; all wrong findings are reported together."""
    assert failures(doctor(vm, *arguments)) == []
    assert [wrong for setup in setups for wrong in fixed(vm, setup, *arguments)] == []


THE_UNIT = [
    Setup("daemon stopped", "systemctl stop swansongd", "daemon"),
    Setup("unit disabled", "systemctl disable --now swansongd", "unit file"),
    Setup(
        "runtime directory gone",
        "systemctl stop swansongd; rm -r /run/swansong",
        "socket directory",
    ),
    Setup("closed directory above a socket in use", "chmod 700 /run/swansong", "socket"),
    Setup("socket for root alone", "chmod 600 /run/swansong/trainer.sock", "socket"),
    Setup(
        "configuration refused, then put right",
        f"cp -p {CONFIG} /tmp/good; echo nonsense >>{CONFIG}; systemctl restart swansongd; "
        f"until systemctl is-failed -q swansongd; do sleep 0.1; done; cp -p /tmp/good {CONFIG}",
        "daemon",
    ),
    Setup(
        "stop timeout too short",
        f"mkdir -p {DROP_IN}; printf '[Service]\\nTimeoutStopSec=10s\\n' >{DROP_IN}/op.conf; "
        "systemctl daemon-reload; systemctl restart swansongd",
        "unit",
    ),
    Setup(
        "a path of the sandbox is gone",
        f"printf '[Service]\\nReadWritePaths=/mnt/gone\\n' >{DROP_IN}/gone.conf; "
        "systemctl daemon-reload; systemctl restart --no-block swansongd",
        "sandbox",
    ),
    Setup("no network", "ip link set host0 down", "network"),
]

USERS_AND_DIRECTORIES = [
    Setup("configuration closed", f"chmod 600 {CONFIG}; systemctl stop swansongd", "permissions"),
    Setup(
        "staging gone",
        f"systemctl stop swansongd; rm -r {STATE}/staging",
        "sandbox",
    ),
    Setup(
        "staging of root",
        f"systemctl stop swansongd; rm -r {STATE}/staging/run; chown root: {STATE}/staging; "
        f"chmod 755 {STATE}/staging",
        "staging rights",
    ),
    Setup("everything writable for all", f"chmod 777 {STATE}", "permissions"),
    Setup(
        "no tmpfiles, no directories",
        f"systemctl stop swansongd; rm -r /usr/lib/tmpfiles.d/swansong.conf {STATE}",
        "permissions",
    ),
    Setup("user gone", "systemctl stop swansongd; userdel swansong", "users"),
    Setup(
        "unknown trainer",
        f'sed -i \'s/^users = .*/users = ["trainer", "newcomer"]/\' {CONFIG}; '
        "systemctl restart --no-block swansongd",
        "trainer users",
    ),
    Setup(
        "trainer not in the group",
        "rm /etc/systemd/system/trainer.service.d/swansong.conf; systemctl daemon-reload; "
        "gpasswd -d trainer swansong-trainers; true",
        "socket",
    ),
    Setup(
        "no credentials but in a home",
        f"mkdir -p /root/.aws; printf '{KEYS}' >{HOME_KEYS}; systemctl restart swansongd",
        "credentials",
    ),
    Setup(
        "credentials that only root can read",
        f"chmod 600 {DAEMON_KEYS}; chown root: {DAEMON_KEYS}; systemctl restart swansongd",
        "credentials",
    ),
]

STORES_OF_FILES = [
    Setup(
        "store of root",
        f"systemctl stop swansongd; rm -rf {STATE}/store/*; "
        f"mkdir -p {STATE}/store/run; chown -R root: {STATE}/store",
        "bucket",
    ),
    Setup(
        "store outside of the sandbox",
        f"install -d -o swansong /srv/store; sed -i 's|^url = .*|url = \"file:///srv/store\"|' {CONFIG}; "
        "systemctl restart swansongd",
        "sandbox",
    ),
    Setup(
        "staging outside of the sandbox",
        f"sed -i 's|^path = .*|path = \"/srv/staging\"|' {CONFIG}; "
        "systemctl restart --no-block swansongd",
        "sandbox",
    ),
]


def no_role(aws: Aws) -> None:
    """The VM has no instance profile."""
    control(aws.url, "fault", kind="status", value=404, path="/latest/meta-data/iam/*")


def test_fixes_of_the_unit(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """Faults of systemd, logind and the network: the cause comes first, and each fix works verbatim.

    ``--fix`` runs those that start, create and enable, and leaves those that open a file to the operator.
    During an evacuation it runs none.
    """
    vm = new_vm(bucket)
    vm.power_on()
    vm.wait_active()
    all_fixed(vm, THE_UNIT)
    harmless = ("unit disabled", "runtime directory gone", "stop timeout too short")
    vm.run("rm", "-r", DROP_IN)
    for setup in THE_UNIT:
        if setup.name in harmless:
            vm.run("bash", "-c", setup.breaks, may_fail=True)
    vm.run("systemctl", "disable", "--now", DAEMON)
    said = vm.run("swansong", "doctor", "--fix", timeout_s=120)
    assert said.startswith("FIXES\n  failure  ")
    assert said.count("the fix ran") >= 2
    assert "failure 0" in said
    assert vm.run("systemctl", "is-enabled", DAEMON) == "enabled"
    vm.run("chmod", "600", "/run/swansong/trainer.sock")
    vm.run("chmod", "o+w", CONFIG)
    vm.run("swansong", "drill", "--in", "120s", "--wait")
    assert vm.run("swansong", "doctor", "--fix", may_fail=True, timeout_s=120) == ""
    vm.run("swansong", "notify", "--withdraw")
    until(lambda: not vm.status()["evacuation"], what="the end of the drill")
    said = vm.run("swansong", "doctor", "--fix", may_fail=True, timeout_s=120)
    assert f"fix: chmod o-w {CONFIG}\n           the fix ran" in said
    assert said.count("the fix ran") == 1
    assert "failure 1" in said


def test_fixes_of_users_and_directories(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """Faults of users, groups, owners, modes and credentials: the same."""
    vm = new_vm(bucket)
    vm.power_on()
    vm.wait_active()
    vm.run("systemctl", "disable", "--now", TRAINER)
    no_credentials = [setup for setup in USERS_AND_DIRECTORIES if setup.cause == "credentials"]
    all_fixed(vm, [setup for setup in USERS_AND_DIRECTORIES if setup not in no_credentials])
    no_role(aws)
    wrong = [problem for setup in no_credentials for problem in fixed(vm, setup)]
    assert wrong == []


def test_fixes_of_stores_of_files(new_vm: Any, aws: Aws) -> None:
    """A directory as a store, which the sandbox and the modes must make writable: the same."""
    vm = new_vm(store={"url": f"file://{STATE}/store"})
    vm.power_on()
    vm.wait_active()
    vm.run("systemctl", "disable", "--now", TRAINER)
    all_fixed(vm, STORES_OF_FILES, "--trial")


# ---------------------------------------------------------------- true findings


def test_root_creates_nothing_that_the_daemon_cannot_write(new_vm: Any, aws: Aws) -> None:
    """Before the daemon's first start doctor creates nothing as root; a store on the boot disk fails."""
    vm = new_vm(store={"url": f"file://{STATE}/store"})
    vm.power_on()
    vm.wait_booted()
    vm.run("systemctl", "stop", TRAINER, DAEMON)
    vm.run("rm", "-r", f"{STATE}/store")
    vm.run("rm", "-rf", f"{STATE}/staging/run")

    found = {finding["name"]: finding for finding in doctor(vm)}

    assert vm.run("find", STATE, "-user", "root") == STATE
    assert found["store disk"]["level"] == "failure"
    assert "is lost with the VM" in found["store disk"]["found"]
    assert found["bucket"]["level"] == "failure"
    vm.run("bash", "-c", found["bucket"]["fix"])
    left = failures(doctor(vm))
    assert [finding["name"] for finding in left] == ["store disk"]
    assert failures(doctor(vm, "--trial")) == []


def test_running_daemon_that_cannot_write_is_a_failure(new_vm: Any, aws: Aws) -> None:
    """The store was repaired after the daemon started: the daemon's own error counts."""
    vm = new_vm(store={"url": f"file://{STATE}/store"})
    vm.power_on()
    vm.wait_active()
    vm.run("systemctl", "stop", TRAINER)
    away = f"mv {STATE}/store {STATE}/away"
    vm.run("bash", "-c", f"systemctl stop {DAEMON}; {away}; systemctl start {DAEMON}")
    vm.run("mv", f"{STATE}/away", f"{STATE}/store")
    # Before that the directory is missing, which is another error.
    until(lambda: "Read-only" in str(vm.status()["store"]), timeout_s=60, what="a retry")

    (finding,) = failures(doctor(vm, "--trial"))

    assert finding["name"] == "store health"
    assert "Read-only file system" in finding["found"]
    vm.run("bash", "-c", finding["fix"])
    assert failures(doctor(vm, "--trial")) == []


def test_credentials_of_the_unit_are_found(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """In the unit's environment, in a systemd credential, in the unit's HOME: no false failure."""
    no_role(aws)
    vm = new_vm(bucket)
    for path in ("/etc/keys", "/srv/home/.aws/credentials"):
        vm.write(path, KEYS.replace("\\n", "\n"))
    vm.power_on()
    for lines in (
        "Environment=AWS_ACCESS_KEY_ID=emulated AWS_SECRET_ACCESS_KEY=emulated",
        "LoadCredential=aws:/etc/keys\\nEnvironment=AWS_SHARED_CREDENTIALS_FILE=%%d/aws",
        "Environment=HOME=/srv/home\\nUnsetEnvironment=AWS_SHARED_CREDENTIALS_FILE",
    ):
        vm.run(
            "bash",
            "-c",
            f"mkdir -p {DROP_IN}; printf '[Service]\\n{lines}\\n' >{DROP_IN}/keys.conf",
        )
        vm.run("bash", "-c", f"systemctl daemon-reload; systemctl restart {DAEMON}")
        found = doctor(vm)
        assert failures(found) == [], lines
        assert next(f for f in found if f["name"] == "credentials")["level"] == "ok"


def test_trainer_with_supplementary_groups_passes(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """The trainer's unit adds the group, although its user is not a member, running or stopped."""
    vm = new_vm(bucket)
    vm.power_on()
    vm.wait_active()
    assert failures(doctor(vm)) == []
    vm.run("systemctl", "stop", TRAINER)
    found = doctor(vm)
    assert failures(found) == []
    assert TRAINER in next(f for f in found if f["name"] == "socket")["found"]


def test_only_root_can_check_as_the_daemon(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """Doctor of another user always fails: it cannot test what the daemon's sandbox permits."""
    vm = new_vm(bucket)
    vm.power_on()
    vm.wait_active()
    as_trainer = ("setpriv", "--reuid=trainer", "--regid=trainer", "--clear-groups")
    found = json.loads(vm.run(*as_trainer, "swansong", "doctor", "--json", may_fail=True))
    first = failures(found)[0]
    assert first["name"] == "as the daemon"
    assert first["fix"].endswith("swansong doctor")
