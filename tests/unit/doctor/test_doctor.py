# SPDX-License-Identifier: Apache-2.0
"""The judgements of ``swansong doctor``, and the loop that runs its checks."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swansong import openat
from swansong_bucket.errors import (
    FencedError,
    Forbidden,
    NotFound,
    Permanent,
    StoreError,
    Transient,
)
from swansong_bucket.model import Health
from swansong_bucket.stores.azure import auth
from swansong_bucket.stores.file.mount_points import parsed
from swansong_bucket.stores.s3.access import CREDENTIALS_HINT
from swansong_tools.commands.main import main
from swansong_tools.doctor import checks, cloud, daemon, fixes, host, staging
from swansong_tools.doctor import store as of_store
from swansong_tools.doctor.cloud import judge_skew, judge_spot, skew_s
from swansong_tools.doctor.daemon import judge_down
from swansong_tools.doctor.findings import Check, Judgement, Level, examine, failure, ok, skipped
from swansong_tools.doctor.fixes import for_this_shell
from swansong_tools.doctor.host import judge_paths, written_directories
from swansong_tools.doctor.installation import (
    DaemonAnswer,
    Installation,
    Options,
    ask_nothing,
    daemon_account,
    grace_s,
    longest_grace_s,
)
from swansong_tools.doctor.sandbox import failed_to_run, findings, unit_text
from swansong_tools.doctor.staging import Room, dies_with_vm, judge_parents, judge_space, newest
from swansong_tools.doctor.store import judge_transport, signing_key
from swansong_tools.doctor.store_fixes import (
    of_credentials,
    of_refusal,
    put_lifecycle,
    request_by_hand,
)
from swansongd import __version__
from swansongd.config.config import parse
from swansongd.observe.status import DaemonStatus, HealthStatus, RefusedStatus

from testkit import REPOSITORY
from testkit.committed import configuration
from testkit.other_users import needs_root
from testkit.status_picture import status

GB = 10**9
UNIT = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "NRestarts": "0",
    "TimeoutStopUSec": "2min 30s",
    "WatchdogUSec": "45s",
    "ReadWritePaths": "/var/lib/swansong",
}


CONFIG = Path("/etc/swansong/swansong.toml")


def config(**tables: dict[str, object]):  # noqa: ANN201
    base = {"run": {"name": "r"}, "staging": {"path": "/s"}, "store": {"url": "s3://bucket/x"}}
    return parse({**base, **tables})


def installation(
    answer: DaemonStatus | None = None,
    options: Options = Options(),  # noqa: B008 - it is frozen
    **tables: dict[str, object],
) -> Installation:
    """A VM whose daemon has this status; None: no daemon answers."""
    return Installation(
        options=options,
        path=CONFIG,
        configured=config(**tables),
        user=daemon_account(),
        ask=ask_nothing if answer is None else lambda _: DaemonAnswer(answer, 0),
    )


# ---------------------------------------------------------------- running checks


def test_a_check_that_raises_or_hangs_fails_alone() -> None:
    """Each check yields one finding, in order, within its time limit; the next check still runs."""
    never = threading.Event()

    def broken(_: Installation) -> Judgement:
        raise KeyError("oops")

    def hangs(_: Installation) -> Judgement:
        never.wait()
        return ok("late")

    def check(name: str, ask: object, limit_s: float = 10.0) -> Check:
        return Check(name, ask, "host", fix=lambda _: f"fix {name}", limit_s=limit_s)  # type: ignore[arg-type]

    checks = [check("a", broken), check("b", hangs, 0.05), check("c", lambda _: ok("well"))]
    found = list(examine(installation(), checks))
    never.set()
    assert [finding.name for finding in found] == ["a", "b", "c"]
    assert [finding.level for finding in found] == [Level.FAILURE, Level.FAILURE, Level.OK]
    assert "KeyError" in found[0].found
    assert found[1].found == "timed out after 0.05 s"
    assert [finding.fix for finding in found] == ["fix a", "fix b", ""]


def test_a_check_that_depends_on_a_failure_is_skipped() -> None:
    """One fault is one failure: direct and indirect consequences are skipped."""

    def check(name: str, judgement: Judgement, *needs: str) -> Check:
        return Check(name, lambda _: judgement, "host", needs)

    well = ok("well")
    found = examine(
        installation(),
        [
            check("a", failure("bad", "fix")),
            check("b", well, "a"),
            check("c", well, "b"),
            check("d", well),
            check("e", skipped("not here")),
            check("f", well, "e"),
        ],
    )
    assert [finding.level.value for finding in found] == [
        "failure", "skipped", "skipped", "ok", "skipped", "skipped",
    ]  # fmt: skip


def test_a_check_whose_condition_or_fix_fails_is_a_finding() -> None:
    """It is neither left out nor the end of doctor, and names what failed."""

    def fails(_: Installation) -> Any:
        raise OSError("the record cannot be read")

    check = Check("a", fails, "host", applies=fails, fix=fails)
    (found,) = examine(installation(), [check])
    assert (found.level, found.found, found.fix) == (
        Level.FAILURE,
        "the check crashed: OSError: the record cannot be read",
        "",
    )


def test_a_failure_may_settle() -> None:
    """A probe that succeeds within its time counts: its cause was fixed a moment ago."""
    judged = [failure("not yet", ""), ok("now")]

    def probe(_: Installation) -> Judgement:
        return judged.pop(0)

    (found,) = examine(installation(), [Check("a", probe, "host", settle_s=60.0)])
    assert (found.level, judged) == (Level.OK, [])


# ---------------------------------------------------------------- the configuration


def problems(
    path: Path, capfd: pytest.CaptureFixture[str], *arguments: str
) -> list[dict[str, str]]:
    """The findings about this configuration; the exit code is that of a failure."""
    assert main(["--config", str(path), "doctor", "--json", *arguments]) == 12
    found = json.loads(capfd.readouterr().out)
    return [finding for finding in found if finding["name"] == "configuration"]


@pytest.mark.parametrize("arguments", [[], ["--image"]])
def test_an_invalid_configuration_lists_all_problems(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """Each problem is a separate failure; the exit code is 12, for tests of images."""
    path = tmp_path / "swansong.toml"
    path.write_text('[run]\nname = "-"\n[staging]\npath = "relative"\n')
    found = problems(path, capfd, *arguments)
    assert [finding["found"].partition(":")[0] for finding in found] == [
        "run.name", "staging.path", "store.url",
    ]  # fmt: skip
    (fix,) = {finding["fix"] for finding in found}
    assert fix.endswith(f" {path}")


def test_missing_configuration(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The fix copies the example."""
    (first,) = problems(tmp_path / "swansong.toml", capfd)
    source, _, target = first["fix"].removeprefix("install -D -m 0644 ").partition(" ")
    assert Path(source).is_file()
    assert target == str(tmp_path / "swansong.toml")


# ---------------------------------------------------------------- judgements


def test_a_notice_in_force_is_a_warning() -> None:
    """A notice is not a fault of the installation."""
    judged = judge_spot(200, '{"action": "terminate"}')
    assert judged.level == "warning"
    assert '"terminate"' in judged.found
    assert judge_spot(404, "").level == "ok"


@pytest.mark.fault("S25")
def test_signing_key(tmp_path: Path) -> None:
    """A key that is missing or readable for others is a failure: the daemon would not start."""
    key = tmp_path / "signing key"
    vm = installation(store={"url": "s3://bucket/x", "signing_key_file": str(key)})
    account = vm.user
    missing = signing_key(vm)
    assert (missing.level, "cannot be used" in missing.found) == ("failure", True)
    key.write_bytes(b"k" * 32)
    key.chmod(0o444)
    public = signing_key(vm)
    assert public.level == "failure"
    assert public.fix.startswith(f"sudo chown {account.name}: '{key}' && sudo chmod 0400 '{key}'")
    key.chmod(0o400)
    os.chown(key, account.uid, account.gid)
    assert signing_key(vm).level == "ok"


@pytest.mark.parametrize(
    ("configured", "detected", "emulated", "level"),
    [
        ("auto", "aws", False, "ok"),
        ("auto", "none", False, "warning"),
        ("aws", "aws", False, "ok"),
        ("aws", "gcp", False, "failure"),
        ("gcp", "none", False, "warning"),
        ("gcp", "none", True, "ok"),
        ("none", "none", False, "ok"),
        ("none", "gcp", False, "warning"),
    ],
)
def test_cloud(configured: str, detected: str, *, emulated: bool, level: str) -> None:
    """The configured cloud must be the one that the firmware names, except with an emulator."""
    sources = {"cloud": configured, **({"metadata_url": "http://[::1]"} if emulated else {})}
    vm = installation(sources=sources)
    vm.detected_cloud = detected
    assert cloud.cloud(vm).level == level


@pytest.mark.fault("S15", "S16")
@pytest.mark.parametrize(
    ("names", "level"),
    [
        (["PATH", "HOME"], "ok"),
        (["https_proxy"], "warning"),
        (["https_proxy", "NO_PROXY"], "ok"),
        (["GCE_METADATA_HOST", "no_proxy"], "warning"),
    ],
)
def test_environment(monkeypatch: pytest.MonkeyPatch, names: list[str], level: str) -> None:
    """A proxy without NO_PROXY is a warning, another metadata service always."""
    monkeypatch.setattr(os, "environ", dict.fromkeys(names, "x"))
    assert cloud.environment(installation()).level == level


@pytest.mark.parametrize(
    ("asked", "answered", "skew"),
    [
        (100.0, 100.2, 0.0),
        (100.9, 101.5, 0.0),
        (90.0, 91.0, -9.0),
        (90.0, 105.0, 0.0),
        (111.0, 111.1, 10.0),
    ],
)
def test_clock_skew(asked: float, answered: float, skew: float) -> None:
    """Differences within the resolution of Date and the latency of the answer are not skew."""
    assert skew_s("Thu, 01 Jan 1970 00:01:40 GMT", asked, answered) == pytest.approx(skew)


def test_clock_judgement() -> None:
    """Seconds of skew are a warning, minutes a failure; without a Date the check is skipped."""
    judged = [judge_skew(s, "it").level.value for s in (4.0, -30.0, 600.0, None)]
    assert judged == ["ok", "warning", "failure", "skipped"]
    assert "30 s behind" in judge_skew(-30.0, "it").found
    assert skew_s("yesterday", 0.0, 0.0) is None


MANY = 10**9
"""Files, more than any limit."""


@pytest.mark.parametrize(
    ("free", "newest", "level"),
    [
        (Room(10 * GB, MANY), Room(6 * GB, 9), "warning"),
        (Room(12 * GB, MANY), Room(6 * GB, 9), "ok"),
        (Room(5 * GB, MANY), Room(6 * GB, 9), "failure"),
        (Room(10**6, MANY), Room(0, 0), "failure"),
        (Room(GB // 2, MANY), Room(0, 0), "warning"),
        (Room(2 * GB, MANY), Room(0, 0), "ok"),
        (Room(2 * GB, 3), Room(0, 0), "failure"),
        (Room(2 * GB, 999), Room(1, 1000), "failure"),
        (Room(2 * GB, 1999), Room(1, 1000), "warning"),
    ],
)
def test_space(free: Room, newest: Room, level: str) -> None:
    """Room for one checkpoint is required, for two recommended: in bytes and in files."""
    judged = judge_space(Path("/s"), free, newest)
    assert judged.level == level
    assert bool(judged.fix) == (level != "ok")


@pytest.mark.fault("S1", "S7")
def test_size_of_the_newest_set_follows_no_link(tmp_path: Path) -> None:
    """Links are not followed, and directories of any depth are supported."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "step-1" / "rank-00000").mkdir(parents=True)
    (run / "step-1" / "rank-00000" / "model").write_bytes(bytes(1000))
    outside.mkdir()
    (outside / "large").write_bytes(bytes(10**6))
    (run / "step-2").symlink_to(outside)
    assert newest(run) == Room(1000, 3)
    (run / "step-1" / "links").symlink_to(outside)
    tmp_fd = openat.open_directory(tmp_path)
    try:
        fd = os.open(run / "step-1", os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=fd)
            below = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        os.close(fd)
        assert 1000 <= newest(run).size_bytes < 10**5
    finally:
        openat.remove_tree("run", dir_fd=tmp_fd)  # pytest could not
        os.close(tmp_fd)


@pytest.mark.parametrize(
    ("delay_s", "shutdown_s", "level"),
    [(5.0, None, "warning"), (24.0, 30.0, "ok"), (60.0, 30.0, "warning"), (60.0, None, "ok")],
)
def test_logind_delay(
    monkeypatch: pytest.MonkeyPatch, delay_s: float, shutdown_s: float | None, level: str
) -> None:
    """The delay must cover a flush and end before the cloud cuts the power."""
    monkeypatch.setattr(host, "read_inhibit_delay_max_s", lambda: delay_s)
    monkeypatch.setattr(host, "SHUTDOWN_S", {"none": shutdown_s})
    assert host.logind_delay(installation(sources={"cloud": "none"})).level == level


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({}, "ok"),
        ({"TimeoutStopUSec": "1min 30s"}, "failure"),
        ({"TimeoutStopUSec": "infinity"}, "ok"),
        ({"NRestarts": "7"}, "warning"),
        ({"WatchdogUSec": "0"}, "warning"),
        ({"WatchdogUSec": "infinity"}, "warning"),
        ({"WatchdogUSec": "infinity", "ActiveState": "inactive"}, "ok"),
        ({"Type": "simple"}, "warning"),
    ],
)
def test_unit(monkeypatch: pytest.MonkeyPatch, change: dict[str, str], level: str) -> None:
    """systemd must give the daemon enough time to stop, wait until it is ready, and watch it."""
    monkeypatch.setattr(host, "of_unit", lambda: {**UNIT, **change})
    assert host.unit(installation(sources={"cloud": "aws"})).level == level


@pytest.mark.parametrize(
    ("words", "staging", "is_strict", "missing", "level"),
    [
        (["/var/lib/swansong"], "/var/lib/swansong/staging", True, [], "ok"),
        (["/var/lib/swansong"], "/mnt/staging", True, [], "failure"),
        (["/var/lib/swansong"], "/mnt/staging", False, [], "ok"),
        (["/var/lib/swansong", "-/mnt"], "/mnt/staging", True, [], "ok"),
        (["/var/lib/swansong", "/mnt/stag"], "/mnt/staging", True, [], "failure"),
        (["/mnt/staging"], "/mnt/staging", True, ["/mnt/staging"], "failure"),
    ],
)
def test_paths_of_the_sandbox(
    words: list[str], staging: str, is_strict: bool, missing: list[str], level: str
) -> None:
    """The unit must start, and must be able to write to staging."""
    judged = judge_paths(words, [Path(staging)], is_strict=is_strict, missing=missing)
    assert judged.level == level
    assert not judged.fix or staging in judged.fix


def test_daemon_writes_to_staging_and_to_a_store_of_files() -> None:
    """The sandbox must allow writes to both; a bucket needs no directory."""
    made = config(store={"url": "file:///srv/a%20b"}, staging={"path": "/s"})
    assert written_directories(made) == [Path("/s"), Path("/srv/a b")]
    assert written_directories(config()) == [Path("/s")]


@pytest.mark.fault("S8", "S27")
@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({}, "ok"),
        ({"/mnt/s": (7, 0o2750)}, "ok"),
        ({"/mnt/s": (0, 0o2770)}, "failure"),
        ({"/mnt/s": (0, 0o3770)}, "failure"),
        ({"/mnt": (0, 0o777)}, "failure"),
        ({"/mnt": (0, 0o1777)}, "ok"),
        ({"/mnt": (1000, 0o755)}, "failure"),
    ],
)
def test_only_root_and_the_daemon_can_replace_staging(
    change: dict[str, tuple[int, int]], level: str
) -> None:
    """Staging is not group-writable, and root owns the directories above it."""
    facts = {"/mnt/s": (7, 0o2750), "/mnt": (0, 0o755), "/": (0, 0o755), **change}
    judged = judge_parents({Path(place): found for place, found in facts.items()}, 7)
    assert judged.level == level


def test_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One finding names everything that is missing."""
    monkeypatch.setattr(host, "DAEMON_USER", "nosuchuser")
    monkeypatch.setattr(host, "TRAINER_GROUP", "nosuchgroup")
    assert host.users(installation()).found == "user nosuchuser and group nosuchgroup do not exist"


def test_grace_periods_of_the_clouds() -> None:
    """The grace period of a notice, and the longest one that may be in progress at SIGTERM."""
    default = config()
    assert (grace_s(default, "aws"), longest_grace_s(default, "aws")) == (120.0, 120.0)
    assert (grace_s(default, "gcp"), longest_grace_s(default, "gcp")) == (25.0, 120.0)
    assert (grace_s(default, "azure"), longest_grace_s(default, "azure")) == (30.0, 30.0)
    short = config(sources={"gcp_preemption_notice_s": 0})
    assert longest_grace_s(short, "gcp") == 25.0
    assert longest_grace_s(default, "none") == 25.0


def refused_by(store: dict[str, object], error: StoreError) -> str:
    return of_refusal(config(store=store), CONFIG, error)


def test_each_refusal_of_a_store_has_its_command() -> None:
    """Scheme and class of the error select the fix."""
    s3, gs = {"url": "s3://bucket/x"}, {"url": "gs://bucket/x"}
    assert refused_by(s3, NotFound("")) == "aws s3 mb s3://bucket"
    assert refused_by(gs, NotFound("")) == "gcloud storage buckets create gs://bucket"
    assert "https://s3.amazonaws.com" in refused_by(s3, Transient(""))
    assert refused_by(s3, Permanent("")).startswith("aws iam put-role-policy ")
    wrong_key = Permanent("", hint=CREDENTIALS_HINT)
    assert refused_by(s3, wrong_key).startswith("aws ec2 associate-iam-instance-profile ")
    assert "packer/permissions/gcp-vm.yaml" in refused_by(gs, Forbidden(""))
    assert refused_by(gs, Permanent("401")).startswith("gcloud compute instances ")
    az: dict[str, object] = {"url": "az://acct/box/x"}
    assert refused_by(az, NotFound("")).startswith(
        "az storage container create --account-name acct"
    )
    role = "Storage Blob Data Contributor"
    assert role in (fix := refused_by(az, Forbidden("")))
    assert "storageAccounts/acct/blobServices/default/containers/box" in fix
    no_identity = Permanent("", hint=auth.CREDENTIALS_HINT)
    assert refused_by(az, no_identity).startswith("az vm identity assign ")
    assert "https://acct.blob.core.windows.net" in refused_by(az, Transient(""))
    azurite = {**az, "endpoint": "http://127.0.0.1:10000/acct"}
    assert "AZURE_STORAGE_KEY" in refused_by(azurite, no_identity)
    assert "az " not in refused_by(azurite, NotFound(""))
    assert "'/srv/a b'" in refused_by({"url": "file:///srv/a%20b"}, NotFound(""))


def test_fixes_for_a_compatible_store_name_no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands contain the endpoint and its certificates, and never roles of AWS or Google."""
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE", raising=False)
    at, ca = "https://store:9000", "/etc/our ca.pem"
    s3: dict[str, object] = {
        "url": "s3://bucket/x",
        "endpoint": at,
        "region": "eu",
        "ca_bundle": ca,
    }
    gs: dict[str, object] = {"url": "gs://bucket/x", "endpoint": at}
    options = f"--endpoint-url {at} --region eu --ca-bundle '{ca}'"
    assert refused_by(s3, NotFound("")) == f"aws s3 mb s3://bucket {options}"
    assert options in put_lifecycle(config(store=s3), {})
    assert ca in refused_by(s3, Transient(""))
    for store in (s3, gs):
        for fix in (
            refused_by(store, Permanent("405")),
            refused_by(store, Forbidden("403")),
            refused_by(store, NotFound("")),
            of_credentials(config(store=store), ""),
        ):
            assert "aws iam" not in fix
            assert "aws ec2" not in fix
            assert not re.search(r"\bgcloud (storage|compute)", fix)
            assert at in fix or "/etc/swansong/" in fix
    of_aws: dict[str, object] = {
        "url": "s3://bucket/x",
        "endpoint": "https://b.vpce-1.s3.eu-west-1.vpce.amazonaws.com",
    }
    assert refused_by(of_aws, Permanent("")).startswith("aws iam ")


def test_an_untrusted_certificate_is_fixed_by_ca_bundle() -> None:
    """The fix names the key of the configuration for all stores."""
    error = Permanent("untrusted")
    error.__cause__ = ssl.SSLCertVerificationError()
    assert 'ca_bundle = "/PATH/OF/AUTHORITY.pem"' in refused_by({"url": "s3://bucket/x"}, error)


def test_the_request_by_hand_uses_the_certificates_of_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CA bundle is the configured file, else that of the environment."""
    monkeypatch.setenv("AWS_CA_BUNDLE", "/aws.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/requests.pem")
    asked = [
        request_by_hand(config(store=store))
        for store in (
            {"url": "s3://bucket/x"},
            {"url": "gs://bucket/x"},
            {"url": "s3://bucket/x", "ca_bundle": "/own.pem"},
            {"url": "s3://bucket/x", "endpoint": "http://plain"},
        )
    ]
    found = [re.findall(r"/[a-z]+\.pem", command) for command in asked]
    assert found == [["/aws.pem"], ["/requests.pem"], ["/own.pem"], []]


def test_running_and_installed_version() -> None:
    """A difference is a warning with both versions and the command that starts the daemon."""
    same = replace(status(0.0), version=__version__)
    assert daemon.version(installation(same)).level is Level.OK
    vm = installation(replace(same, version="0.0.1"))
    other = daemon.version(vm)
    assert (other.level, other.fix) == (Level.WARNING, fixes.start(vm.path))
    assert {"0.0.1", __version__} <= set(re.split(r"[ ,]+", other.found))


# ---------------------------------------------------------------- the disk of a file:// store

MOUNTS = r"""
1 0 259:2 / / rw - ext4 /dev/nvme0n1p2 rw
2 1 259:1 / /boot/efi rw - vfat /dev/nvme0n1p1 rw
3 1 0:44 / /mnt/data rw - tmpfs none rw
3 1 259:9 / /mnt/data rw - xfs /dev/nvme1n1 rw
4 1 259:9 / /mnt/local rw - xfs /dev/nvme2n1 rw
5 1 0:40 / /mnt/nfs rw - nfs4 server:/export rw
6 1 0:41 / /mnt/gcs rw - fuse.gcsfuse bucket rw
7 1 0:42 / /mnt/tmp rw - tmpfs none rw
8 1 253:0 / /mnt/lvm rw - ext4 /dev/mapper/vg-lv rw
9 1 0:43 / /mnt/with\040blank rw - btrfs /dev/nvme1n1 rw
10 1 7:0 / /mnt/loop rw - ext4 /dev/loop0 rw
""".replace("259:9 / /mnt/local", "259:10 / /mnt/local")


@pytest.fixture
def disks(tmp_path: Path) -> Path:
    """A copy of /sys with a boot disk, a persistent disk, and one that is erased with the VM."""
    devices = {
        "259:2": "nvme0n1/nvme0n1p2", "259:1": "nvme0n1/nvme0n1p1", "259:9": "nvme1n1",
        "259:10": "nvme2n1", "253:0": "dm-0", "7:0": "loop0",
    }  # fmt: skip
    links = tmp_path / "dev" / "block"
    links.mkdir(parents=True)
    (tmp_path / "class" / "block").mkdir(parents=True)
    for number, name in devices.items():
        device = tmp_path / "devices" / name
        device.mkdir(parents=True, exist_ok=True)
        (links / number).symlink_to(device)
        (tmp_path / "class" / "block" / device.name).symlink_to(device)
        if "/" in name:
            (device / "partition").write_text("1\n")
    # LVM on a partition of the boot disk.
    slaves = tmp_path / "devices" / "dm-0" / "slaves"
    slaves.mkdir()
    (slaves / "nvme0n1p2").symlink_to(tmp_path / "devices" / "nvme0n1" / "nvme0n1p2")
    (tmp_path / "devices" / "nvme2n1" / "device").mkdir()
    model = tmp_path / "devices" / "nvme2n1" / "device" / "model"
    model.write_text("Amazon EC2 NVMe Instance Storage        \n")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/var/lib/swansong/store", "it is on the boot disk nvme0n1"),
        ("/mnt/lvm/store", "it is on the boot disk nvme0n1"),
        ("/mnt/local/store", "the disk nvme2n1 is erased when the VM is terminated"),
        ("/mnt/tmp/store", "it is in memory"),
        ("/mnt/loop/store", "no disk backs it"),
        ("/mnt/data/store", ""),
        ("/mnt/with blank/store", ""),
        ("/mnt/nfs/store", ""),
        ("/mnt/gcs/store", ""),
    ],
)
def test_a_store_that_is_lost_with_the_vm(disks: Path, path: str, reason: str) -> None:
    """Only file servers and persistent disks other than the boot disk outlive the VM."""
    assert dies_with_vm(Path(path), parsed(MOUNTS), disks)[0] == reason


@pytest.mark.parametrize(
    ("reason", "trial", "level"),
    [("in memory", False, "failure"), ("in memory", True, "warning"), ("", False, "ok")],
)
def test_a_trial_accepts_a_store_that_is_lost_with_the_vm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, level: str, *, trial: bool
) -> None:
    """The finding names the device and the option for a trial."""
    monkeypatch.setattr(staging, "dies_with_vm", lambda *_: (reason, "on /dev/a1"))
    vm = installation(options=Options(trial=trial), store={"url": tmp_path.as_uri()})
    judged = of_store.StoreProbe(vm).disk()
    assert (judged.level, "/dev/a1" in judged.found) == (level, True)
    assert ("swansong doctor --trial" in judged.found) == (level == "failure")


# ---------------------------------------------------------------- the daemon


@pytest.mark.parametrize(
    ("trainer", "name", "fix"),
    [
        ({"users": ["nosuchuser"], "socket": "/s"}, "trainer users", "sudo useradd "),
        ({"socket": "/nowhere/s"}, "socket directory", "sudo install -d /nowhere && "),
    ],
)
def test_a_cause_that_stops_the_daemon_is_the_only_failure(
    trainer: dict[str, object], name: str, fix: str
) -> None:
    """With an unknown user, or without the directory of its socket, the daemon would not start."""
    found = {each.name: each for each in examine(installation(trainer=trainer), checks.DAEMON)}
    assert {each.name for each in found.values() if each.level == "failure"} == {name}
    assert found[name].fix.startswith(fix)
    assert found["daemon"].level == "skipped"


@pytest.mark.fault("S11")
def test_a_trainer_that_does_not_catch_the_signal(tmp_path: Path) -> None:
    """The signal would kill the trainer, so the daemon would refuse to send it; doctor reports that."""
    path = tmp_path / "trainer.pid"
    vm = installation(trainer={"signal": "SIGUSR1", "pid_file": str(path)})
    with subprocess.Popen(["sleep", "60"]) as trainer:
        path.write_text(str(trainer.pid))
        judged = daemon.signal(vm)
        trainer.kill()
    assert judged.level == "failure"
    assert "has no handler for SIGUSR1" in judged.found


def writable_for_all(path: Path, pid: int) -> None:
    path.write_text(str(pid))
    path.chmod(0o666)


def of_another_user(path: Path, pid: int) -> None:
    path.write_text(str(pid))
    os.chown(path, 4_000_000, -1)


def stale(path: Path, _pid: int) -> None:
    path.write_text("4194303")


HANDLES = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: None)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.fault("S11")
@pytest.mark.parametrize(
    "breaks",
    [
        writable_for_all,
        pytest.param(of_another_user, marks=needs_root),
        stale,
    ],
)
def test_a_fix_of_the_pid_file_works_as_printed(
    tmp_path: Path, breaks: Callable[[Path, int], None]
) -> None:
    """Afterwards the pid file is right, or gone until the training script writes it again."""
    path = tmp_path / "trainer's.pid"
    vm = installation(trainer={"signal": "SIGUSR1", "pid_file": str(path)})
    with subprocess.Popen([sys.executable, "-c", HANDLES], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        try:
            trainer.stdout.readline()
            breaks(path, trainer.pid)
            judged = daemon.signal(vm)
            assert judged.level == "failure"
            subprocess.run(judged.fix.removeprefix("sudo "), shell=True, check=True)
            after = daemon.signal(vm)
        finally:
            trainer.kill()
    assert after.level == ("ok" if path.exists() else "warning"), after.found


@pytest.mark.parametrize(
    ("facts", "found", "fix"),
    [
        ({"Result": "oom-kill", "MemoryMax": "1000"}, "out of memory", "MemoryMax=infinity"),
        (
            {
                "Result": "exit-code",
                "ExecMainCode": "1",
                "ExecMainStatus": str(FencedError.exit_code),
            },
            "newer",
            "# only if",
        ),
        (
            {"Result": "exit-code", "ExecMainCode": "1", "ExecMainStatus": "5"},
            "status 5",
            "journal",
        ),
        ({"Result": "watchdog", "ExecMainCode": "3", "ExecMainStatus": "6"}, "signal 6", "journal"),
    ],
)
def test_why_the_daemon_does_not_run(facts: dict[str, str], found: str, fix: str) -> None:
    """The finding names the cause that systemd recorded, with its fix."""
    judged = judge_down({"ActiveState": "failed", **facts}, Path("/s/r/.swansongd/claim.json"))
    assert judged.level == "failure"
    assert found in judged.found
    assert fix in judged.fix


@pytest.mark.parametrize(
    ("trainers", "refused", "level"),
    [
        (0, RefusedStatus(), "skipped"),
        (2, RefusedStatus(), "ok"),
        (1, RefusedStatus(count=2, last="rank 0 of 1 is connected already", age_s=3.0), "warning"),
        (1, RefusedStatus(count=2, last="rank 0", age_s=7200.0), "ok"),
    ],
)
def test_processes_that_were_refused_for_their_rank(
    trainers: int, refused: RefusedStatus, level: str
) -> None:
    """The finding contains the daemon's reason."""
    connected = status(0.0).trainers[:trainers]
    answer = replace(status(0.0), trainers=connected, trainers_refused=refused)
    judged = daemon.ranks(installation(answer))
    assert judged.level == level
    assert level != "warning" or "rank 0 of 1 is connected already" in judged.found


def test_the_daemons_health_of_its_store() -> None:
    """Any health but ok is a failure, with the daemon's reason."""
    good = HealthStatus(name="store", health=Health.OK, reason="answers", for_s=1.0)
    bad = replace(good, health=Health.DEGRADED, reason="Read-only file system")
    for store, level, words in (
        (None, "failure", "yet"),
        (good, "ok", ""),
        (bad, "failure", bad.reason),
    ):
        judged = daemon.store_health(installation(replace(status(0.0), store=store)))
        assert judged.level == level
        assert words in judged.found


# ---------------------------------------------------------------- the sandbox, and fixes


def test_checks_run_in_a_copy_of_the_unit() -> None:
    """The copy has the daemon's [Service] section, drop-ins included, and runs only the checks."""
    cat = """# /etc/systemd/system/swansongd.service
[Unit]
Requires=other.service
[Service]
ExecStartPre=/bin/dangerous
ReadWritePaths=/a \\
  /b
[Install]
WantedBy=multi-user.target
# /etc/systemd/system/swansongd.service.d/x.conf
[Service]
Environment=HOME=/c%d
"""
    lines = unit_text(cat, ["/p", 'a"b$%'], Path("/run/d")).splitlines()
    assert lines[:4] == ["[Service]", "ExecStartPre=/bin/dangerous", "ReadWritePaths=/a \\", "  /b"]
    assert "Environment=HOME=/c%d" in lines
    assert "Requires=other.service" not in lines
    assert lines.index("ExecStartPre=") > lines.index("ExecStartPre=/bin/dangerous")
    assert 'ExecStart="/p" "a\\"b$$%%"' in lines
    # Temporary files go to the one directory that the sandbox allows and systemd removes.
    assert lines[lines.index("RuntimeDirectory=") + 1] == "RuntimeDirectory=d-scratch"
    assert "RuntimeDirectoryPreserve=no" in lines
    assert "Environment=TMPDIR=%t/d-scratch" in lines


def test_only_root_can_check_as_the_daemon_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user gets a failure, although the permissions could not be checked either."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    vm = installation()
    vm.by_systemd = True
    (found,) = findings(vm, lacking="permissions")
    assert (found.level, found.fix) == ("failure", "sudo swansong doctor")


def test_checks_that_run_out_of_memory_name_the_cause() -> None:
    """The copy has the daemon's limits, so the daemon would be killed as well."""
    killed = failed_to_run({"Result": "oom-kill", "ExecMainStatus": "9"}, "")
    assert killed.level == "failure"
    assert "out of memory" in killed.found
    assert "MemoryMax=infinity" in killed.fix
    assert "status 226" in failed_to_run({"Result": "exit-code", "ExecMainStatus": "226"}, "").found


def test_without_a_temporary_directory_the_other_checks_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A read-only root is a finding with a fix, and the checks of daemon and trainers follow."""
    (tmp_path / "staging").mkdir()
    path = configuration(tmp_path, more='[sources]\ncloud = "none"\n')
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    found = {each.name: each for each in checks.check(path, ask_nothing, Options())}
    assert found["as the daemon"].level == "failure"
    assert "missing" in found["as the daemon"].found
    assert found["as the daemon"].fix == "# set TMPDIR to a writable directory"
    assert "daemon" in found


@pytest.mark.parametrize(
    ("fix", "for_root"),
    [
        ("sudo true && printf x | sudo tee /f", "true && printf x | tee /f"),
        ("aws s3 mb s3://b", "# with rights on the account: aws s3 mb s3://b"),
        ("sudo no-such-tool x", "# no-such-tool is not on this machine: no-such-tool x"),
        ("# a word", "# a word"),
        ("sudoedit /f", '"${EDITOR:-vi}" /f'),
        ("", ""),
    ],
)
def test_fixes_can_be_pasted(monkeypatch: pytest.MonkeyPatch, fix: str, for_root: str) -> None:
    """Root needs no sudo; a command with a missing tool or a cloud's tool becomes a comment."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("SUDO_USER", raising=False)
    assert for_this_shell(fix) == for_root


def test_fixes_under_sudo_keep_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process under sudo was started from a user's shell; without sudo the fix becomes a comment."""
    monkeypatch.setenv("SUDO_USER", "someone")
    there = {"sudo", "true"}
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    assert for_this_shell("sudo true && sudo true") == "sudo true && sudo true"
    there.remove("sudo")
    assert for_this_shell("sudo true && sudo true") == "# as root: true && true"


def test_the_unit_is_the_one_that_starts_a_daemon_with_this_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks and fixes of the second job are for its unit; an unknown configuration has the first one."""
    monkeypatch.setattr(fixes, "BOOTED", tmp_path)
    first = (REPOSITORY / "systemd/swansongd.service").read_text()
    own = first.replace("/%i/swansong.toml", "/own.toml")
    (tmp_path / "swansongd.service").write_text(first)
    (tmp_path / "swansongd@.service").write_text(first)
    (tmp_path / "swansongd-own.service").write_text(own)
    (tmp_path / "swansongd-bad.service").write_bytes(b"\xff")
    (tmp_path / "swansongd-gone.service").symlink_to(tmp_path / "missing")
    for name, unit, file in (
        ("second/swansong", "swansongd@second", "swansongd@"),
        ("a.b/swansong", "swansongd@a.b", "swansongd@"),
        ("own", "swansongd-own", "swansongd-own"),
        ("swansong", "swansongd", "swansongd"),
        ("third", "swansongd", "swansongd"),
        ("a/b/swansong", "swansongd", "swansongd"),
    ):
        fixes.choose_unit(Path(f"/etc/swansong/{name}.toml"), tmp_path)
        assert fixes.unit_file() == tmp_path / f"{file}.service" or unit == file == "swansongd"
        assert fixes.restart().endswith(f"systemctl restart {unit}.service")
        assert f"/{unit}.service.d/zz-swansong-memory.conf" in fixes.more_memory()
        assert fixes.log("-f") == f"journalctl -u {unit} -f -o cat"


def test_a_daemon_of_swansong_run_has_no_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doctor neither misses nor restarts the unit of another daemon, also on a machine with systemd."""
    monkeypatch.setattr(fixes, "BOOTED", tmp_path)
    monkeypatch.setattr(host, "BOOTED", tmp_path)
    monkeypatch.setattr(fixes, "_FIRST", tmp_path / "swansongd.service")
    (tmp_path / "swansongd.service").touch()
    (tmp_path / "staging").mkdir()
    more = f'[sources]\ncloud = "none"\n[trainer]\nsocket = "{tmp_path}/trainer.sock"\n'
    path = configuration(tmp_path, more=more)
    path.write_text(f"{fixes.WRITTEN_BY_RUN}\n{path.read_text()}")
    found = {each.name: each for each in checks.check(path, ask_nothing, Options())}
    assert not {"unit", "unit file", "users", "sandbox"} & found.keys()
    assert not [each for each in found.values() if "systemctl" in each.fix]
    assert found["store disk"].fix.startswith("# give swansong run other options")
    assert found["daemon"].fix.startswith("# run the swansong run of this job again")


@pytest.mark.parametrize(
    ("server", "level"),
    [
        ("", "ok"),
        ("https://s3.amazonaws.com", "ok"),
        ("http://127.0.0.1:9000", "ok"),
        ("http://[::1]:9000", "ok"),
        ("http://minio.example.org:9000", "warning"),
        ("http://10.0.0.1", "warning"),
    ],
)
def test_a_store_of_another_machine_without_tls_is_a_warning(server: str, level: str) -> None:
    """A host on the path can act as a bucket writer and as a false store."""
    assert judge_transport("s3://b/p", server, "fix").level == level
