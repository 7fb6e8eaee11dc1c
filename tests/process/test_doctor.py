# SPDX-License-Identifier: Apache-2.0
"""``swansong doctor`` against the emulated clouds: each fault has its own finding.

The checks that run as the daemon are called in this process; the others need the command and a daemon.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from swansong_bucket.stores.remote import WireLimits
from swansong_tools.doctor import checks
from swansong_tools.doctor.findings import examine
from swansong_tools.doctor.installation import Account, Installation, Options, account, own_account
from swansongd.config.config import parse

from testkit import TRAINERS
from testkit.as_user import place_for_all
from testkit.clouds import SPOT_PATH, Aws, Azure, Bucket, Gcp
from testkit.emulators.process import EmulatorProcess
from testkit.rig import BIN, CREDENTIALS, Vm, control, environment
from testkit.waiting import until
from testkit.warm import python_of

SECRET = "a-secret-that-is-never-printed"
NewVm = Callable[..., Vm]
WITNESS = str(TRAINERS / "witness.py")
NO_STORE = {"url": "s3://ckpt", "endpoint": "http://127.0.0.1:9", "region": "us-east-1"}
"""For checks that send no request to it."""
Findings = dict[str, dict[str, str]]


def run_doctor(
    vm: Vm, *arguments: str, prefix: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    python = prefix or (python_of(os.environ["SWANSONG_TEST_WARM"], "swansongd"),)
    done = subprocess.run(
        [*python, str(BIN / "swansong"), "--config", str(vm.config), "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=environment(**{**CREDENTIALS, **env}),
    )
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stdout + done.stderr
    return done


def findings_of(vm: Vm, *arguments: str, **options: Any) -> tuple[int, Findings]:
    """Exit code, and the findings by name."""
    done = run_doctor(vm, "--json", *arguments, **options)
    found = json.loads(done.stdout)
    by_name = {finding["name"]: finding for finding in found}
    assert len(by_name) == len(found)
    return done.returncode, by_name


def unconnected(vm: Vm) -> list[dict[str, Any]]:
    """Processes of users of the daemon that are not connected, as ``swansong status`` lists them."""
    shown = json.loads(vm.swansong("status", "--json").stdout)
    processes: list[dict[str, Any]] = shown["unconnected"]["processes"]
    return processes


def names(findings: Findings, level: str) -> set[str]:
    return {name for name, finding in findings.items() if finding["level"] == level}


def only_failure(findings: Findings, name: str) -> dict[str, str]:
    """The only failure; its name must be ``name``."""
    assert names(findings, "failure") == {name}, findings
    assert findings[name]["fix"]
    return findings[name]


# ---------------------------------------------------------------- checks in this process


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def examined(
    staging: Path,
    store: dict[str, str],
    cloud: Aws | Gcp | Azure | None = None,
    *,
    families: tuple[str, ...] = ("network", "metadata", "store"),
    user: Account | None = None,
) -> Findings:
    """The findings of the checks that run as the daemon."""
    name, url = cloud.metadata if cloud else ("none", None)
    sources = {"cloud": name, **({"metadata_url": url} if url else {})}
    tables = {"run": {"name": "run"}, "staging": {"path": str(staging)}, "store": store}
    vm = Installation(
        path=Path("/etc/swansong/swansong.toml"),
        configured=parse({**tables, "sources": sources}),
        user=user or own_account(),
        options=Options(trial=True),
    )
    wanted = [check for check in checks.AS_DAEMON if check.family in families]
    return {finding.name: asdict(finding) for finding in examine(vm, wanted)}


@pytest.mark.parametrize(
    ("fault", "found", "fix"),
    [
        ({"kind": "refuse-put"}, "hop limit", "--http-put-response-hop-limit 2"),
        ({"kind": "status", "value": 403, "path": "/latest/*"}, "403", "--http-endpoint enabled"),
    ],
)
def test_a_metadata_service_that_gives_no_token(
    monkeypatch: pytest.MonkeyPatch,
    staging: Path,
    aws: Aws,
    *,
    fault: dict[str, Any],
    found: str,
    fix: str,
) -> None:
    """The finding names the hop limit or the refusal, with its fix; the other paths are skipped."""
    monkeypatch.setattr("swansong_tools.doctor.cloud.TIMEOUT_MAX_S", 1.0)
    control(aws.url, "invalidate-tokens")
    control(aws.url, "fault", **fault)
    findings = examined(staging, NO_STORE, aws, families=("network", "metadata"))
    finding = only_failure(findings, "IMDS token")
    assert found in finding["found"]
    assert finding["fix"].endswith(fix)
    assert findings["spot notice"]["level"] == "skipped"


def test_doctor_waits_for_a_slow_metadata_service(staging: Path, aws: Aws) -> None:
    """Token and notice take 1.2 s, longer than the first timeout, as the sources accept."""
    for path in ("/latest/api/token", SPOT_PATH):
        control(aws.url, "fault", kind="delay", value=1.2, path=path)
    findings = examined(staging, NO_STORE, aws, families=("network", "metadata"))
    assert names(findings, "ok") >= {"IMDS token", "spot notice"}


@pytest.mark.fault("S18")
def test_a_good_installation_on_gcp_has_no_failure(staging: Path, gcp: Gcp) -> None:
    """An answer without the header Metadata-Flavor is not that of the metadata server."""
    with EmulatorProcess("testkit.emulators.gcs_server", "--port", "0", "--bucket", "ckpt") as gcs:
        store = {"url": "gs://ckpt/team", "endpoint": gcs.url}
        findings = examined(staging, store, gcp)
        control(gcp.url, "fault", kind="bare", path="/computeMetadata/v1/instance/id")
        bare = examined(staging, store, gcp, families=("network", "metadata"))
    assert names(findings, "failure") == set()
    assert names(findings, "warning") == {"versioning", "bucket policy"}
    assert names(findings, "ok") >= {
        "metadata server", "preemptible", "preempted", "maintenance-event", "upcoming-maintenance",
        "stop-state", "create-if-absent", "upload", "commit", "read back", "delete",
    }  # fmt: skip
    assert findings["preemptible"]["found"] == "TRUE: a Spot VM"
    assert "Metadata-Flavor" in only_failure(bare, "metadata server")["found"]


def test_a_vm_on_azure_is_asked_for_its_name_and_its_events(staging: Path, azure: Azure) -> None:
    """Both answers are shown; without Scheduled Events an eviction would not be detected."""
    look = partial(examined, staging, NO_STORE, azure, families=("network", "metadata"))
    findings = look()
    assert names(findings, "ok") >= {"instance metadata", "Scheduled Events", "clock (metadata)"}
    assert findings["instance metadata"]["found"] == "instance identity: trainers_0"
    assert '"Events": []' in findings["Scheduled Events"]["found"]
    control(azure.url, "fault", kind="status", value=404, path="/metadata/scheduledevents")
    finding = only_failure(look(), "Scheduled Events")
    assert "az vm show " in finding["fix"]


def test_no_credentials(staging: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing credentials are the only failure; the other checks of the store are skipped."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    findings = examined(staging, bucket.store)
    finding = only_failure(findings, "credentials")
    assert "no credentials" in finding["found"]
    assert "/etc/swansong/aws/credentials" in finding["fix"], (
        "no role of AWS helps at this endpoint"
    )
    asked = ("bucket", "write", "create-if-absent", "upload", "commit", "read back", "delete")
    assert names(findings, "skipped") >= set(asked)


@pytest.mark.fault("O14")
def test_store_that_ignores_preconditions(staging: Path, bucket: Bucket) -> None:
    """A second create that succeeds is a failure: two VMs could overwrite each other's commits."""
    bucket.order("preconditions", honour=0)
    finding = only_failure(examined(staging, bucket.store), "create-if-absent")
    assert "ignores create-if-absent" in finding["found"]


def test_a_silent_store_is_bounded_and_isolated(
    staging: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that accepts the connection and never answers fails its own check only."""
    monkeypatch.setattr("swansong_tools.doctor.rehearsal._BUDGET_S", 0.5)
    monkeypatch.setattr("swansong_tools.doctor.store._DATE_TIMEOUT_S", 0.5)
    brief = partial(WireLimits, read_timeout_s=1.0)
    monkeypatch.setattr("swansong_bucket.stores.opening.WireLimits", brief)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = {**bucket.store, "endpoint": address}
        findings = examined(staging, store, families=("network", "store", "staging"))
    assert address in only_failure(findings, "bucket")["fix"]
    assert findings["disk speed"]["level"] == "ok"


def test_staging_not_writable() -> None:
    """The permissions are checked for the daemon's user."""
    with place_for_all(0) as disk:
        place = disk / "staging"
        place.mkdir(mode=0o555)
        user = account(65534) if os.geteuid() == 0 else own_account()
        findings = examined(place, NO_STORE, families=("staging",), user=user)
    finding = only_failure(findings, "staging rights")
    assert "may not write" in finding["found"]
    assert f"chown {pwd.getpwuid(65534).pw_name} " in finding["fix"]
    assert findings["disk speed"]["level"] == "skipped"


# ---------------------------------------------------------------- the command and a daemon


@pytest.fixture
def vm(new_vm: NewVm, bucket: Bucket, aws: Aws) -> Vm:
    """A VM on AWS without faults; the daemon does not run yet."""
    made: Vm = new_vm("a", bucket.store, metadata=aws.metadata)
    return made


@pytest.fixture
def installed_vm(new_vm: NewVm, bucket: Bucket, aws: Aws) -> Vm:
    """Like ``vm``, with the installed daemon: /proc, which doctor reads, has no environment of a fork."""
    made: Vm = new_vm("a", bucket.store, metadata=aws.metadata, warm=None)
    return made


@pytest.mark.fault("S16")
def test_a_good_installation_on_aws_has_no_failure(installed_vm: Vm, bucket: Bucket) -> None:
    """The exit code is 0, every path and kind of request was checked, no object is left in the bucket.

    Only the daemon's environment contains the right credentials.
    """
    installed_vm.start_daemon()
    wrong = {"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": SECRET}
    code, findings = findings_of(installed_vm, **wrong, HOME="/nonexistent")
    assert code == 0, findings
    assert names(findings, "failure") == set()
    assert names(findings, "warning") == {"versioning", "bucket policy"}
    assert names(findings, "ok") >= {
        "configuration", "cloud", "environment", "IMDS token", "instance-life-cycle", "spot notice",
        "rebalance", "Auto Scaling", "scheduled events", "event history", "clock (metadata)",
        "credentials", "bucket", "write", "create-if-absent", "upload", "commit",
        "read back", "delete", "clock (store)", "staging", "staging rights", "staging parents",
        "free space", "disk speed", "socket directory", "daemon", "version", "trainer users", "socket",
        "object lock", "lifecycle rule",
    }  # fmt: skip
    assert "MB/s" in findings["disk speed"]["found"]
    assert bucket.keys("run/probes/") == []


def test_people_get_lines_with_failures_last(vm: Vm) -> None:
    """Findings are grouped by family, without colors; failures come last, with their fixes."""
    vm.lose_staging()
    done = run_doctor(vm)
    assert done.returncode == 12
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout
    families = [line for line in lines if not line.startswith(" ")]
    wanted = ["configuration", "host", "network", "metadata", "store", "staging", "trainers"]
    assert [family for family in dict.fromkeys(families) if family in wanted] == wanted
    failures = lines[lines.index("FAILURES") :]
    assert failures[1].startswith("  failure  staging: staging: staging.path ")
    assert failures[2].startswith("           fix: install -d -m 2750 ")
    assert str(vm.staging) in failures[2]
    assert lines[-1].startswith("ok 2")
    assert not any(line.startswith("  failure") for line in lines[: lines.index("FAILURES")])
    assert done.stderr.startswith("swansong: 1 of ")


def test_a_disk_without_room(new_vm: NewVm, tmp_path: Path) -> None:
    """Too few bytes in staging and too few inodes in the store are failures, which their fixes remove.

    A store on the boot disk is lost with the VM: without ``--trial`` that is a failure.
    """
    mount = ("unshare", "--user", "--map-root-user", "--mount")
    if subprocess.run([*mount, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs user namespaces")
    store = tmp_path / "store"
    store.mkdir()
    vm = new_vm("a", {"url": store.as_uri()})
    small = (
        f"mount -t tmpfs -o mode=0755,size=1m none {vm.staging} && "
        f"mount -t tmpfs -o mode=0755,nr_inodes=60 none {store} && "
        'exec "$0" "$@"'
    )
    code, findings = findings_of(vm, prefix=(*mount, "sh", "-c", small))
    assert code == 12
    assert names(findings, "failure") == {"free space", "store disk", "store space", "daemon"}
    enlarge = [findings[name]["fix"] for name in ("free space", "store space")]
    assert "tmpfs" in findings["staging"]["found"]
    assert findings["disk speed"]["level"] == "skipped"
    assert " more files" in findings["store space"]["found"]
    assert "is lost with the VM" in findings["store disk"]["found"]
    assert "swansong doctor --trial" in findings["store disk"]["found"]
    fixed = small.replace("exec", " && ".join([*enlarge, "exec"]))
    code, findings = findings_of(vm, "--trial", prefix=(*mount, "sh", "-c", fixed))
    assert names(findings, "failure") == {"daemon"}
    assert findings["store disk"]["level"] == "warning"


def test_a_trainer_that_never_reached_the_daemon_is_named(
    installed_vm: Vm, warm_python: str
) -> None:
    """Doctor and status name the configured process with a fix until it connects, and then not any more."""
    vm = installed_vm
    vm.config.write_text(
        vm.config.read_text().replace("[trainer]", f'[trainer]\npid_file = "{vm.pid_file}"')
    )
    vm.start_daemon()
    vm.warm = warm_python  # for the trainer and the commands
    with subprocess.Popen(["sleep", "600"]) as trainer:
        vm.pid_file.write_text(str(trainer.pid))
        vm.pid_file.chmod(0o600)
        try:
            code, findings = findings_of(vm)
            assert (code, findings["unconnected trainers"]["level"]) == (0, "warning")
            assert f"process {trainer.pid} (sleep)" in findings["unconnected trainers"]["found"]
            assert "swansong.attach()" in findings["unconnected trainers"]["fix"]
            (named,) = unconnected(vm)
            assert (named["pid"], named["seen"]) == (
                trainer.pid, "is the process of trainer.pid_file",
            )  # fmt: skip
            words = vm.status_words()
            assert f"not connected process {trainer.pid} (sleep) of user" in words
        finally:
            trainer.kill()
    connected = vm.start_trainer(script=WITNESS)
    connected.lines.wait(step=5)
    vm.pid_file.write_text(str(connected.pid))
    assert not unconnected(vm)
    assert findings_of(vm)[1]["unconnected trainers"]["level"] in ("ok", "skipped")


def test_the_command_that_starts_the_daemon_works(vm: Vm) -> None:
    """A daemon that does not run is the only failure; the printed command starts it without systemd."""
    code, findings = findings_of(vm)
    assert code == 12
    fix = only_failure(findings, "daemon")["fix"]
    assert fix == f"{BIN}/swansongd --config {vm.config} &"
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["sh", "-c", fix], check=True, env=environment(**CREDENTIALS), **silent)
    until(lambda: vm.swansong("status").returncode == 0, what="the daemon")
    try:
        assert findings_of(vm)[0] == 0
    finally:
        os.kill(vm.status()["pid"], signal.SIGKILL)


@pytest.mark.fault("S15", "S16")
def test_variables_that_redirect_the_daemon_are_a_warning(installed_vm: Vm) -> None:
    """Doctor reads the names from the daemon's environment; it never prints values, which may be secret."""
    variables = ("HTTP_PROXY", "AWS_EC2_METADATA_SERVICE_ENDPOINT")
    daemon = installed_vm.start_daemon(
        **dict.fromkeys(variables, f"http://user:{SECRET}@127.0.0.1:9")
    )
    findings = findings_of(installed_vm)[1]
    # The daemon also uses the proxy for its store.  This proxy does not exist, so the store fails.
    assert names(findings, "failure") == {"bucket"}, findings
    assert findings["environment"]["level"] == "warning"
    assert f"process {daemon.pid}" in findings["environment"]["found"]
    for name in variables:
        assert name in findings["environment"]["found"]
        assert name in findings["environment"]["fix"]
