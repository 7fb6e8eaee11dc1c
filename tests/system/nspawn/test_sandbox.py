# SPDX-License-Identifier: Apache-2.0
"""The directories that the daemon's unit may write to, and trainers that try to misuse them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testkit import TRAINERS
from testkit.clouds import Aws, Bucket
from testkit.nspawn.container import DAEMON, TRAINER, Container
from testkit.waiting import until

pytestmark = pytest.mark.timeout(300, func_only=True)

STATE = "/var/lib/swansong"
RUN = f"{STATE}/staging/run"
STORE = f"{STATE}/store"
SOCKET = "/run/swansong/trainer.sock"
ATTACK = TRAINERS / "hostile_trainer.py"

# Run as root, which ignores modes: finds the directories that the mounts of the namespace make writable.
PROBE = """
import json, os
writable = []
for directory, below, _ in os.walk("/"):
    if directory in ("/proc", "/sys") or any(directory.startswith(f"{path}/") for path in writable):
        below.clear()
        continue
    name = os.path.join(directory, ".probe")
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(name)
    except OSError:
        continue
    writable.append(directory)
    below.clear()
print(json.dumps(writable))
"""


def in_sandbox_of(vm: Container, unit: str, *command: str) -> str:
    """Run a command as root in the mount namespace of a unit."""
    namespace = ("nsenter", "--target", str(vm.main_pid(unit)), "--mount")
    return vm.run(*namespace, *command)


@pytest.mark.fault("S27")
def test_only_its_own_directories_are_writable(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """In the daemon's mount namespace even root can write only to staging, store and runtime directory."""
    vm = new_vm(bucket)
    vm.power_on()
    vm.wait_active()
    # Not to the private /tmp, /dev/shm, or directories of other services in /run.
    writable = json.loads(in_sandbox_of(vm, DAEMON, "python3", "-c", PROBE))
    assert sorted(writable) == ["/run/swansong", f"{STATE}/staging", STORE]


@pytest.mark.fault("S16", "S27")
def test_daemon_has_no_home(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """systemd sets the unit's HOME, and the SDKs look for files only where only root can write."""
    vm = new_vm(bucket)
    vm.power_on()
    vm.wait_active()
    lines = vm.run("cat", f"/proc/{vm.main_pid()}/environ").split("\0")
    environment = dict(line.split("=", 1) for line in lines if "=" in line)
    assert environment["HOME"] == "/nonexistent"
    assert environment["AWS_CONFIG_FILE"] == "/etc/swansong/aws/config"
    assert environment["AWS_SHARED_CREDENTIALS_FILE"] == "/etc/swansong/aws/credentials"
    assert environment["CLOUDSDK_CONFIG"] == "/etc/swansong/gcloud"
    assert vm.run("getent", "passwd", "swansong").split(":")[5] == "/nonexistent"
    assert vm.run("stat", "-c", "%U %a", STATE, "/etc/swansong", "/run/swansong-restore") == (
        "root 750\nroot 755\nroot 755"
    )


@pytest.fixture
def attacked(new_vm: Any, aws: Aws) -> Container:
    """A VM with a commit in a directory store that the daemon may write; neither trainer nor daemon runs."""
    vm: Container = new_vm(
        store={"url": f"file://{STORE}"},
        arguments="--steps 100000 --step-delay-s 0.02 --every-steps 20",
    )
    vm.write("/usr/local/lib/hostile_trainer.py", ATTACK.read_text())
    vm.power_on()
    until(lambda: treasure(vm, f"{STORE}/run/commits"), timeout_s=60, what="a commit")
    vm.run("systemctl", "stop", TRAINER)
    vm.run("systemctl", "stop", DAEMON)
    return vm


def treasure(vm: Container, *places: str) -> str:
    """Every file below these paths, with owner, mode and content."""
    script = 'find "$@" -type f -printf "%p %u %m " -exec sha256sum {} \\; | sort'
    return vm.run("sh", "-c", script, "sh", *places, may_fail=True)


def attack(vm: Container, mode: str, target: str) -> dict[str, Any]:
    """Run the hostile trainer; returns its report."""
    group = vm.run("getent", "group", "swansong-trainers").split(":")[2]
    as_trainer = ("setpriv", "--reuid=trainer", "--regid=trainer", f"--groups={group}")
    script = ("/opt/train/bin/python", "/usr/local/lib/hostile_trainer.py")
    report: dict[str, Any] = json.loads(
        vm.run(*as_trainer, *script, mode, RUN, SOCKET, target, timeout_s=120)
    )
    return report


def without_local_sets(vm: Container) -> None:
    """Force restores to download: a sealed set in staging that is as new would be used instead."""
    vm.run("bash", "-c", f"rm -rf {RUN}/step-*")


def without_claims(listing: str) -> list[str]:
    """The lines of a listing, except those of claims and of their record."""
    return [
        line
        for line in listing.splitlines()
        if "/generations/" not in line and not line.startswith(f"{RUN}/.swansongd/claim.json ")
    ]


@pytest.mark.fault("S1", "S2", "S24")
@pytest.mark.parametrize("target", [STORE, f"{RUN}/.swansongd", f"{STATE}/restored"])
def test_hostile_trainer_redirects_no_write(attacked: Container, target: str) -> None:
    """Links, forged partial restores and exchanged directories damage no commit and plant nothing."""
    vm = attacked
    own = f"{RUN}/.swansongd"
    places = (STORE, f"{STATE}/restored", f"{own}/claim.json", "/run/swansong-restore", "/etc")
    without_local_sets(vm)
    # As an older version left it: the trainer can take the name before the daemon starts.
    vm.run("rm", "-rf", f"{RUN}/restored")
    vm.run("ln", "-s", target, f"{RUN}/restored")
    vm.run("chown", "--no-dereference", "trainer:", f"{RUN}/restored")
    before = treasure(vm, *places)

    vm.run("systemctl", "start", DAEMON)
    reports = [attack(vm, "link", target)]
    for mode in ("partials", "exchange"):  # a restarted daemon has no reply cached
        vm.run("systemctl", "restart", DAEMON)
        reports.append(attack(vm, mode, target))
    vm.run("systemctl", "stop", DAEMON)

    # Each start of the attacker claims a generation, which the record in staging notes.
    assert without_claims(treasure(vm, *places)) == without_claims(before)
    assert vm.run("ls", "-A", STATE).split() == ["restored", "staging", "store"]
    # The daemon's own directory holds only plain files of the daemon, and nothing restored.
    odd = ("!", "(", "-type", "f", "-user", "swansong", "-perm", "600", ")")
    assert vm.run("find", own, "-mindepth", "1", *odd) == ""
    assert vm.run("ls", "-A", STORE).split() == [".swansong-store.json", ".swansong-tmp", "run"]
    for report in reports:
        assert report["answer"].get("error") == "", report
        assert Path(report["answer"]["path"]).parent == Path(RUN, "restored")
    # Once the daemon owns the directory, it stays.
    for report in reports[1:]:
        assert not {"link for restored", "partial in restored"} & set(report["planted"])


@pytest.mark.fault("S24")
def test_restore_unit_gives_the_trainer_one_fixed_line(attacked: Container) -> None:
    """Root writes the environment file; odd instance names restore nothing and remove nothing."""
    vm = attacked
    unit = "swansong-restore@run.service"
    without_local_sets(vm)
    vm.run("systemctl", "start", unit)
    environment = "/run/swansong-restore/run.env"
    assert vm.run("cat", environment) == f"SWANSONG_RESTORE={STATE}/restored/run"
    assert vm.run("stat", "-c", "%U", environment) == "root"
    restored = vm.run("find", f"{STATE}/restored", "-mindepth", "1", "-printf", "%U:%m\n").split()
    assert len(restored) > 1
    daemon = vm.run("id", "--user", "swansong")
    assert {line.split(":")[0] for line in restored} == {daemon}
    assert not [line for line in restored if int(line.split(":")[1], 8) & 0o022]

    before = treasure(vm, STATE, "/run/swansong-restore")
    for name in ("..", ".", "-", r"\x2e\x2e", r"run\x2f..\x2f..\x2fstore"):
        vm.run("systemctl", "start", f"swansong-restore@{name}.service", may_fail=True)
        assert treasure(vm, STATE, "/run/swansong-restore") == before, name
