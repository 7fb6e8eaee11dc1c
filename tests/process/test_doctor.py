# SPDX-License-Identifier: Apache-2.0
"""``swansong doctor`` as a process, against the emulated clouds: each fault has its own finding."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from swansong_bucket.stores.file.tree import MARKER

from testkit import TRAINERS
from testkit.clouds import SPOT_PATH, Aws, Azure, Bucket, Gcp
from testkit.emulators.process import EmulatorProcess
from testkit.rig import BIN, CREDENTIALS, Vm, control, environment
from testkit.waiting import until
from testkit.warm import python_of

SECRET = "a-secret-that-is-never-printed"
ELSEWHERE = "# with rights on the account: "
"""Prefix of a command that needs rights on the cloud account."""
NewVm = Callable[..., Vm]
WITNESS = str(TRAINERS / "witness.py")
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
        env=environment(**({**CREDENTIALS, "AWS_SECRET_ACCESS_KEY": SECRET} | env)),
    )
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stdout + done.stderr
    return done


def examine(vm: Vm, *arguments: str, **options: Any) -> tuple[int, Findings]:
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


def only_failure(result: tuple[int, Findings], name: str) -> dict[str, str]:
    """The only failure; its name must be ``name``."""
    code, findings = result
    assert names(findings, "failure") == {name}, findings
    assert code == 12
    assert findings[name]["fix"]
    return findings[name]


@pytest.fixture
def new_vm(new_vm: NewVm) -> NewVm:
    """VMs that start the installed daemon: /proc, which doctor reads, has no environment of a fork."""
    return partial(new_vm, warm=None)


@pytest.fixture
def vm(new_vm: NewVm, bucket: Bucket, aws: Aws) -> Vm:
    """A VM on AWS without faults; the daemon runs."""
    vm = new_vm("a", bucket.store, metadata=aws.metadata)
    vm.start_daemon()
    return vm


# ---------------------------------------------------------------- no faults


def test_a_good_installation_on_aws_has_no_failure(vm: Vm, bucket: Bucket) -> None:
    """The exit code is 0, every path and kind of request was checked, no object is left in the bucket."""
    code, findings = examine(vm)
    assert code == 0, findings
    assert names(findings, "failure") == set()
    assert names(findings, "warning") == {"versioning", "bucket policy"}
    assert names(findings, "ok") >= {
        "configuration", "cloud", "environment", "IMDS token", "instance-life-cycle", "spot notice",
        "rebalance", "Auto Scaling", "scheduled events", "event history", "clock (metadata)",
        "credentials", "bucket", "write", "create-if-absent", "upload", "commit",
        "read back", "delete", "clock (store)", "staging", "staging rights", "staging parents", "file system",
        "free space", "disk speed", "socket directory", "daemon", "version", "trainer users", "socket",
        "object lock", "lifecycle rule",
    }  # fmt: skip
    assert "MB/s" in findings["disk speed"]["found"]
    assert bucket.keys("run/probes/") == []


def test_a_good_installation_on_gcp_has_no_failure(new_vm: NewVm, gcp: Gcp, tmp_path: Path) -> None:
    """The same with the metadata server of Compute Engine and a GCS bucket."""
    with EmulatorProcess("testkit.emulators.gcs_server", "--port", "0", "--bucket", "ckpt") as gcs:
        store = {"url": "gs://ckpt/team", "endpoint": gcs.url}
        vm = new_vm("a", store, metadata=gcp.metadata)
        vm.start_daemon()
        code, findings = examine(vm)
    assert code == 0, findings
    assert names(findings, "warning") == {"versioning", "bucket policy"}
    assert names(findings, "ok") >= {
        "metadata server", "preemptible", "preempted", "maintenance-event", "upcoming-maintenance",
        "stop-state", "create-if-absent", "upload", "commit", "read back", "delete",
    }  # fmt: skip
    assert findings["preemptible"]["found"] == "TRUE: a Spot VM"


def test_a_vm_on_azure_is_asked_for_its_name_and_its_events(
    new_vm: NewVm, bucket: Bucket, azure: Azure
) -> None:
    """Both answers are shown; without Scheduled Events an eviction would not be detected."""
    vm = new_vm("a", bucket.store, metadata=azure.metadata)
    vm.start_daemon()
    _, findings = examine(vm)
    assert names(findings, "ok") >= {"instance metadata", "Scheduled Events", "clock (metadata)"}
    assert findings["instance metadata"]["found"] == "instance identity: trainers_0"
    assert '"Events": []' in findings["Scheduled Events"]["found"]
    control(azure.url, "fault", kind="status", value=404, path="/metadata/scheduledevents")
    finding = only_failure(examine(vm), "Scheduled Events")
    assert "az vm show " in finding["fix"]


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
    assert lines[-1].startswith("ok 2")
    assert not any(line.startswith("  failure") for line in lines[: lines.index("FAILURES")])
    assert done.stderr.startswith("swansong: 1 of ")


def test_speed_shows_the_bytes_that_fit_into_a_notice(new_vm: NewVm, tmp_path: Path) -> None:
    """``--speed`` measures the bandwidth, and no object of the measurement remains."""
    store = tmp_path / "store"
    store.mkdir()
    vm = new_vm("a", {"url": store.as_uri()}, settings={"flush": {"connections": 1}})
    vm.start_daemon()
    code, findings = examine(vm, "--speed", "--trial")
    assert code == 0, findings
    assert "GB fit into the 24 s of a notice" in findings["speed"]["found"]
    kept = ("generations", MARKER)
    files = [path for path in store.rglob("*") if path.is_file()]
    assert [path for path in files if not any(name in path.parts for name in kept)] == []


# ---------------------------------------------------------------- metadata


def test_hop_limit_is_named(vm: Vm, aws: Aws) -> None:
    """If the service answers but no token arrives, the finding names the hop limit and its fix."""
    control(aws.url, "invalidate-tokens")
    control(aws.url, "fault", kind="refuse-put")
    finding = only_failure(result := examine(vm), "IMDS token")
    assert "hop limit" in finding["found"]
    assert finding["fix"].endswith("--http-put-response-hop-limit 2")
    assert result[1]["spot notice"]["level"] == "skipped"


def test_metadata_off_is_a_failure(vm: Vm, aws: Aws) -> None:
    """HTTP 403 means that the service is disabled."""
    control(aws.url, "fault", kind="status", value=403, path="/latest/*")
    finding = only_failure(examine(vm), "IMDS token")
    assert finding["fix"].endswith("--http-endpoint enabled")


def test_doctor_and_the_sources_are_equally_patient(
    new_vm: NewVm, bucket: Bucket, aws: Aws
) -> None:
    """Token and notice take 1.2 s, longer than the first timeout; doctor and the daemon accept them."""
    for path in ("/latest/api/token", SPOT_PATH):
        control(aws.url, "fault", kind="delay", value=1.2, path=path)
    vm = new_vm("slow", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="aws.spot", health="ok")
    _, findings = examine(vm)
    assert findings["IMDS token"]["level"] == "ok"
    assert findings["spot notice"]["level"] == "ok"
    control(aws.url, "clear")


@pytest.mark.fault("S18")
def test_an_answer_without_the_flavor_is_not_the_metadata_server(
    new_vm: NewVm, bucket: Bucket, gcp: Gcp
) -> None:
    """Doctor rejects an answer without the header Metadata-Flavor."""
    vm = new_vm("a", bucket.store, metadata=gcp.metadata)
    vm.start_daemon()
    control(gcp.url, "fault", kind="bare", path="/computeMetadata/v1/instance/id")
    finding = only_failure(examine(vm), "metadata server")
    assert "Metadata-Flavor" in finding["found"]


def test_a_notice_in_force_is_a_warning(vm: Vm, aws: Aws) -> None:
    """A notice is not a fault of the installation."""
    aws.notice("terminate", in_s=3000)
    code, findings = examine(vm)
    assert code == 0
    assert findings["spot notice"]["level"] == "warning"
    assert '"terminate"' in findings["spot notice"]["found"]


# ---------------------------------------------------------------- the store


def test_no_credentials(new_vm: NewVm, bucket: Bucket, aws: Aws) -> None:
    """Missing credentials are the only failure; the other checks of the store are skipped."""
    vm = new_vm("a", bucket.store, metadata=aws.metadata)
    vm.start_daemon(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="", HOME="/nonexistent")
    result = examine(vm)
    finding = only_failure(result, "credentials")
    assert "no credentials" in finding["found"]
    assert "/etc/swansong/aws/credentials" in finding["fix"], (
        "no role of AWS helps at this endpoint"
    )
    for name in (
        "bucket",
        "write",
        "create-if-absent",
        "upload",
        "commit",
        "read back",
        "delete",
        "store health",
    ):
        assert result[1][name]["level"] == "skipped"


def test_bucket_missing(new_vm: NewVm, bucket: Bucket, aws: Aws) -> None:
    """The only failure contains the command that creates the bucket at this endpoint."""
    vm = new_vm("a", {**bucket.store, "url": "s3://absent/x"}, metadata=aws.metadata)
    with_daemon(vm)
    assert only_failure(examine(vm), "bucket")["fix"] == (
        f"{ELSEWHERE}aws s3 mb s3://absent --endpoint-url {bucket.endpoint} --region us-east-1"
    )


@pytest.mark.fault("O14")
def test_store_that_ignores_preconditions(vm: Vm, bucket: Bucket) -> None:
    """A second create that succeeds is a failure: two VMs could overwrite each other's commits."""
    bucket.order("preconditions", honour=0)
    finding = only_failure(examine(vm), "create-if-absent")
    assert "ignores create-if-absent" in finding["found"]


def test_no_right_to_write(vm: Vm, bucket: Bucket) -> None:
    """The fix of a refused write describes the missing right without AWS commands: the store is not AWS."""
    bucket.order("answer", status=403, code="AccessDenied", method="PUT", match="/probes/", times=9)
    finding = only_failure(examine(vm), "write")
    assert "s3:PutObject" not in finding["fix"]
    assert "create objects" in finding["fix"]
    assert bucket.endpoint in finding["fix"]


@pytest.mark.fault("S21")
def test_no_right_to_delete_is_fine(vm: Vm, bucket: Bucket) -> None:
    """A role without this right is recommended; the finding states the objects and bytes that remain."""
    for match in ("/absent", "/generations/"):
        bucket.order("answer", status=403, code="AccessDenied", method="DELETE", match=match)
    code, findings = examine(vm)
    assert code == 0, findings
    left = bucket.keys("run/probes/doctor-")
    size_bytes = sum(len(bucket.get(key)) for key in left)
    (place,) = {"/".join(key.split("/")[:3]) for key in left}
    assert (
        f"{len(left)} objects with {size_bytes} bytes stay below {place}"
        in findings["delete"]["found"]
    )


@pytest.mark.fault("S16")
def test_credentials_of_the_running_daemon_count(vm: Vm) -> None:
    """Only the daemon's environment contains credentials; doctor uses them and finds no failure."""
    hidden = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": "/nonexistent"}
    code, findings = examine(vm, **hidden)
    assert code == 0, findings
    assert findings["credentials"]["level"] == "ok"


def test_store_that_is_lost_with_the_vm(new_vm: NewVm, tmp_path: Path) -> None:
    """A directory on the boot disk is a failure, and a warning with ``--trial``."""
    store = tmp_path / "store"
    store.mkdir()
    vm = new_vm("a", {"url": store.as_uri()})
    vm.start_daemon()
    finding = only_failure(examine(vm), "store disk")
    assert "is lost with the VM" in finding["found"]
    assert "swansong doctor --trial" in finding["found"]
    code, findings = examine(vm, "--trial")
    assert code == 0, findings
    assert findings["store disk"]["level"] == "warning"


def test_doctor_does_not_create_the_store(new_vm: NewVm, tmp_path: Path) -> None:
    """A missing directory may be a missing mount: doctor names the directory and does not create it."""
    store = tmp_path / "above" / "store"
    vm = new_vm("a", {"url": store.as_uri()})
    findings = examine(vm, "--trial")[1]
    assert findings["bucket"]["level"] == "failure"
    assert str(store) in findings["bucket"]["fix"]
    assert not store.parent.exists()


def test_unreadable_lifecycle_rules_are_skipped(vm: Vm, bucket: Bucket) -> None:
    """A role without the right to read the rules is not a failure."""
    bucket.order("answer", status=403, code="AccessDenied", method="GET", match="?lifecycle")
    code, findings = examine(vm)
    assert code == 0
    assert findings["lifecycle rule"]["level"] == "skipped"


def test_a_lifecycle_rule_that_deletes_by_age_is_a_failure(vm: Vm, bucket: Bucket) -> None:
    rule = {"ID": "x", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 9999}}
    with lifecycle_of(bucket, {"Rules": [rule]}):
        assert examine(vm)[1]["lifecycle rule"]["level"] == "failure"


@contextmanager
def lifecycle_of(bucket: Bucket, rules: dict[str, Any]) -> Iterator[None]:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=bucket.endpoint,
        region_name="us-east-1",
        aws_access_key_id="emulated",
        aws_secret_access_key="emulated",
    )
    client.put_bucket_lifecycle_configuration(Bucket="ckpt", LifecycleConfiguration=rules)
    try:
        yield
    finally:  # further tests have the same bucket
        client.delete_bucket_lifecycle(Bucket="ckpt")
        client.close()


# ---------------------------------------------------------------- staging


def with_daemon(vm: Vm) -> None:
    """Start another daemon on the socket, because the configured one would not start."""
    healthy = vm.disk / "other"
    healthy.mkdir()
    (healthy / "store").mkdir()
    twin = Vm(healthy, {"url": (healthy / "store").as_uri()})
    twin.config.write_text(
        twin.config.read_text().replace(str(twin.socket), str(vm.socket)), encoding="utf-8"
    )
    vm.processes.append(twin.start_daemon())


def test_staging_missing(vm: Vm) -> None:
    """A missing staging directory is the only failure, with the command that creates it."""
    vm.lose_staging()
    finding = only_failure(examine(vm), "staging")
    assert str(vm.staging) in finding["fix"]


@pytest.fixture
def open_disk() -> Iterator[Path]:
    """A directory that all users may enter."""
    path = Path(tempfile.mkdtemp(prefix="doctor-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_staging_not_writable(open_disk: Path) -> None:
    """The permissions are checked for the calling user."""
    store = open_disk / "store"
    store.mkdir()
    if os.geteuid() == 0:
        os.chown(store, 65534, 65534)
    with Vm(open_disk, {"url": store.as_uri()}) as vm:
        vm.staging.chmod(0o555)
        unprivileged = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
        prefix = unprivileged if os.geteuid() == 0 else ()
        code, findings = examine(vm, "--trial", prefix=prefix)
        vm.staging.chmod(0o755)
    assert code == 12
    # The user cannot start a daemon here.
    assert names(findings, "failure") == {"staging rights"}
    assert findings["daemon"]["level"] == "skipped"
    assert "may not write" in findings["staging rights"]["found"]
    assert f"chown {pwd.getpwuid(65534).pw_name} " in findings["staging rights"]["fix"]
    assert findings["disk speed"]["level"] == "skipped"


def on_a_disk_of(size: str, place: Path) -> tuple[str, ...]:
    """Prefix of a command that mounts a file system of this size at ``place``."""
    mount = ("unshare", "--user", "--map-root-user", "--mount")
    if subprocess.run([*mount, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs user namespaces")
    return (
        *mount,
        "sh",
        "-c",
        f'mount -t tmpfs -o mode=0755,{size} none {place} && exec "$0" "$@"',
    )


def test_staging_full(vm: Vm) -> None:
    """Too little space for a checkpoint is a failure; the speed is not measured."""
    result = examine(vm, prefix=on_a_disk_of("size=1m", vm.staging))
    finding = only_failure(result, "free space")
    assert finding["fix"].startswith("df -h ")
    assert "tmpfs" in result[1]["staging"]["found"]
    assert result[1]["disk speed"]["level"] == "skipped"


def test_store_of_files_full(new_vm: NewVm, tmp_path: Path) -> None:
    """A directory with 4 MB or 60 inodes is too small for a checkpoint; the finding states the numbers."""
    store = tmp_path / "store"
    store.mkdir()
    vm = new_vm("a", {"url": store.as_uri()})
    vm.start_daemon().lines.wait(event="health", source="store", health="ok")
    # With the record of the daemon, doctor would report the empty disk as another store.
    record = vm.run_directory / ".swansongd" / "claim.json"
    until(record.exists, what="the record")
    record.unlink()
    for size, number, fix in (
        ("size=4m", " MB free in ", "df -h "),
        ("nr_inodes=60", " more files", "df -i "),
    ):
        result = examine(vm, "--trial", prefix=on_a_disk_of(size, store))
        finding = only_failure(result, "store space")
        assert number in finding["found"]
        assert finding["fix"].startswith(fix)


# ---------------------------------------------------------------- configuration, trainers, daemon


def test_unknown_trainer_user(vm: Vm) -> None:
    """With an unknown user in the configuration the daemon would not start."""
    text = vm.config.read_text().replace("[trainer]", '[trainer]\nusers = ["nosuchuser"]')
    vm.config.write_text(text)
    finding = only_failure(examine(vm), "trainer users")
    assert finding["fix"].startswith("useradd ")


@pytest.mark.parametrize("arguments", [[], ["--image"]])
def test_an_invalid_configuration_lists_all_problems(vm: Vm, arguments: list[str]) -> None:
    """Each problem is a separate failure; the exit code is 12, for tests of images."""
    vm.config.write_text('[run]\nname = "-"\n[staging]\npath = "relative"\n')
    done = run_doctor(vm, "--json", *arguments)
    assert done.returncode == 12
    found = [f for f in json.loads(done.stdout) if f["name"] == "configuration"]
    assert [finding["found"].partition(":")[0] for finding in found] == [
        "run.name", "staging.path", "store.url",
    ]  # fmt: skip
    (fix,) = {finding["fix"] for finding in found}
    assert fix.endswith(f" {vm.config}")


def test_a_trainer_that_never_reached_the_daemon_is_named(
    new_vm: NewVm, bucket: Bucket, aws: Aws
) -> None:
    """Doctor and status name the configured process with a fix until it connects, and then not any more."""
    vm = new_vm("a", bucket.store, metadata=aws.metadata)
    vm.config.write_text(
        vm.config.read_text().replace("[trainer]", f'[trainer]\npid_file = "{vm.pid_file}"')
    )
    vm.start_daemon()
    with subprocess.Popen(["sleep", "600"]) as trainer:
        vm.pid_file.write_text(str(trainer.pid))
        vm.pid_file.chmod(0o600)
        try:
            code, findings = examine(vm)
            assert (code, findings["unconnected trainers"]["level"]) == (0, "warning")
            assert f"process {trainer.pid} (sleep)" in findings["unconnected trainers"]["found"]
            assert "swansong.attach()" in findings["unconnected trainers"]["fix"]
            (named,) = unconnected(vm)
            assert (named["pid"], named["seen"]) == (
                trainer.pid, "is the process of trainer.pid_file",
            )  # fmt: skip
            words = " ".join(vm.swansong("status").stdout.split())
            assert f"not connected process {trainer.pid} (sleep) of user" in words
        finally:
            trainer.kill()
    connected = vm.start_trainer(script=WITNESS)
    connected.lines.wait(step=5)
    vm.pid_file.write_text(str(connected.pid))
    assert not unconnected(vm)
    assert examine(vm)[1]["unconnected trainers"]["level"] in ("ok", "skipped")


def test_missing_configuration(vm: Vm) -> None:
    """The fix copies the example."""
    vm.config.unlink()
    done = run_doctor(vm, "--json")
    assert done.returncode == 12
    first = json.loads(done.stdout)[0]
    source, _, target = first["fix"].removeprefix("install -D -m 0644 ").partition(" ")
    assert Path(source).is_file()
    assert target == str(vm.config)


def test_daemon_not_running(vm: Vm) -> None:
    """The only failure contains the start command, without systemd."""
    assert vm.daemon is not None
    vm.daemon.kill()
    start = f"{BIN}/swansongd --config {vm.config} &"
    assert only_failure(examine(vm), "daemon")["fix"] == start


def test_the_command_that_starts_the_daemon_works(vm: Vm) -> None:
    """The printed command starts the daemon; doctor then finds no failure."""
    assert vm.daemon is not None
    vm.daemon.kill()
    fix = only_failure(examine(vm), "daemon")["fix"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["sh", "-c", fix], check=True, env=environment(**CREDENTIALS), **silent)
    until(lambda: vm.swansong("status").returncode == 0, what="the daemon")
    try:
        assert examine(vm)[0] == 0
    finally:
        os.kill(vm.status()["pid"], signal.SIGKILL)


def test_socket_directory_missing(vm: Vm) -> None:
    """Without the directory the daemon could not create its socket."""
    vm.config.write_text(vm.config.read_text().replace(str(vm.socket), f"{vm.disk}/gone/s"))
    result = examine(vm)
    assert only_failure(result, "socket directory")["fix"].startswith(
        f"install -d {vm.disk}/gone && "
    )
    assert result[1]["daemon"]["level"] == "skipped"


@pytest.mark.fault("S15", "S16")
@pytest.mark.parametrize("name", ["HTTP_PROXY", "AWS_EC2_METADATA_SERVICE_ENDPOINT"])
def test_variables_that_redirect_the_daemon_are_a_warning(
    new_vm: NewVm, bucket: Bucket, aws: Aws, name: str
) -> None:
    """Doctor reads the names from the daemon's environment; it never prints values, which may be secret."""
    vm = new_vm("a", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon(**{name: f"http://user:{SECRET}@127.0.0.1:9"})
    findings = examine(vm)[1]
    # The daemon also uses the proxy for its store.  This proxy does not exist, so the store fails.
    expected = {"bucket"} if name == "HTTP_PROXY" else set()
    assert names(findings, "failure") == expected, findings
    assert findings["environment"]["level"] == "warning"
    assert name in findings["environment"]["found"]
    assert f"process {daemon.pid}" in findings["environment"]["found"]
    assert name in findings["environment"]["fix"]


@pytest.mark.fault("S11")
def test_trainer_that_does_not_catch_the_signal(vm: Vm) -> None:
    """The signal would kill the trainer, so the daemon would refuse to send it; doctor reports that."""
    trainer = vm.spawn(["sleep", "60"])
    vm.pid_file.write_text(str(trainer.pid))
    with_signal = f'[trainer]\nsignal = "SIGUSR1"\npid_file = "{vm.pid_file}"'
    vm.config.write_text(vm.config.read_text().replace("[trainer]", with_signal))
    assert "has no handler for SIGUSR1" in only_failure(examine(vm), "signal")["found"]


def test_a_silent_store_is_bounded_and_isolated(vm: Vm) -> None:
    """A store that accepts the connection and never answers fails its own check only."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        text = vm.config.read_text()
        endpoint = next(line for line in text.splitlines() if line.startswith("endpoint"))
        vm.config.write_text(text.replace(endpoint, f'endpoint = "{address}"'))
        result = examine(vm)
    finding = only_failure(result, "bucket")
    assert address in finding["fix"]
    assert result[1]["disk speed"]["level"] == "ok"
