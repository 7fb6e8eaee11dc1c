# SPDX-License-Identifier: Apache-2.0
"""The judgements of ``swansong doctor``, and how its checks are run."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from swansong import openat
from swansongd.config import parse
from swansongd.doctor.accounts import daemon_account
from swansongd.doctor.checkup import grace_s, longest_grace_s
from swansongd.doctor.clock import judge_skew, skew_s
from swansongd.doctor.configuration import judge_cloud, judge_environment, judge_signing_key
from swansongd.doctor.findings import (
    Check,
    Judgement,
    Level,
    examine,
    failure,
    of_error,
    ok,
    skipped,
)
from swansongd.doctor.host import (
    judge_accounts,
    judge_delay,
    judge_unit,
    seconds,
    written_directories,
)
from swansongd.doctor.staging import (
    file_system,
    judge_devices,
    judge_parents,
    judge_space,
    newest_bytes,
)
from swansongd.doctor.store import judge_speed, mending
from swansongd.doctor.trainers import judge_version
from swansongd.errors import NotFound, Permanent, Transient

GB = 10**9
UNIT = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "NRestarts": "0",
    "TimeoutStopUSec": "2min 30s",
    "WatchdogUSec": "45s",
    "ReadWritePaths": "/var/lib/swansong",
}


def config(**tables: dict[str, object]):  # noqa: ANN201
    base = {"run": {"name": "r"}, "staging": {"path": "/s"}, "store": {"url": "s3://bucket/x"}}
    return parse({**base, **tables})


# ---------------------------------------------------------------- running checks


def test_a_check_that_raises_or_hangs_is_a_failure_of_that_check_alone() -> None:
    """Each gives one finding, in order, within its limit; the one after it is asked all the same."""
    never = threading.Event()

    def broken() -> Judgement:
        raise KeyError("oops")

    def hangs() -> Judgement:
        never.wait()
        return ok("late")

    def check(name: str, ask: object, limit_s: float = 10.0) -> Check:
        return Check(family="f", name=name, ask=ask, mend=f"mend {name}", limit_s=limit_s)  # type: ignore[arg-type]

    found = list(
        examine(
            [check("a", broken), check("b", hangs, 0.05), check("c", lambda: ok("well"))],
        )
    )
    never.set()
    assert [finding.name for finding in found] == ["a", "b", "c"]
    assert [finding.level for finding in found] == [Level.FAILURE, Level.FAILURE, Level.OK]
    assert "KeyError" in found[0].found
    assert found[1].found == "no answer within 0.05 s"
    assert found[1].mend == "mend b"


def test_what_needs_a_failed_check_is_skipped_and_so_is_what_needs_that() -> None:
    """One fault gives one failure, not one for each of its consequences."""

    def check(name: str, judgement: Judgement, needs: str = "") -> Check:
        return Check(family="f", name=name, ask=lambda: judgement, needs=needs)

    well = ok("well")
    found = examine(
        [
            check("a", failure("bad", "mend")),
            check("b", well, "a"),
            check("c", well, "b"),
            check("d", well),
            check("e", skipped("not here")),
            check("f", well, "e"),
        ]
    )
    assert [finding.level.value for finding in found] == [
        "failure", "skipped", "skipped", "ok", "skipped", "skipped",
    ]  # fmt: skip


def test_the_command_in_the_words_of_an_error_mends_it() -> None:
    """What stands between backticks wins over the command of the check."""
    judged = of_error(Permanent("too low; mend it with `raise it`"), "other")
    assert (judged.found, judged.mend) == ("too low", "raise it")
    judged = of_error(Permanent("no", hint="Do that"), "other")
    assert (judged.found, judged.mend) == ("no. Do that", "other")


# ---------------------------------------------------------------- judgements


@pytest.mark.fault("S25")
def test_signing_key(tmp_path: Path) -> None:
    """The daemon would not start with a key that others may read, or that is not there."""
    key = tmp_path / "signing key"
    account = daemon_account()
    missing = judge_signing_key(key, account)
    assert (missing.level, "cannot be used" in missing.found) == ("failure", True)
    key.write_bytes(b"k" * 32)
    key.chmod(0o444)
    public = judge_signing_key(key, account)
    assert public.level == "failure"
    assert public.mend == f"chown {account.name}: '{key}' && chmod 0400 '{key}'"
    key.chmod(0o400)
    os.chown(key, account.uid, account.gid)
    assert judge_signing_key(key, account).level == "ok"


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
    """The cloud that is watched must be the one that the firmware names, an emulator excepted."""
    assert judge_cloud(configured, detected, emulated=emulated, mend="m").level == level


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
def test_environment(names: list[str], level: str) -> None:
    """A proxy is a warning unless exceptions are named; another metadata service always is."""
    assert judge_environment(names, "x").level == level


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
    """What the second of Date, or a slow answer, can explain is no skew."""
    assert skew_s("Thu, 01 Jan 1970 00:01:40 GMT", asked, answered) == pytest.approx(skew)


def test_clock_judgement() -> None:
    """Seconds are a warning, many minutes a failure; no Date is no finding."""
    judged = [judge_skew(s, "it").level.value for s in (4.0, -30.0, 600.0, None)]
    assert judged == ["ok", "warning", "failure", "skipped"]
    assert "30 s behind" in judge_skew(-30.0, "it").found
    assert skew_s("yesterday", 0.0, 0.0) is None


@pytest.mark.parametrize(
    ("free", "newest", "level"),
    [
        (10 * GB, 6 * GB, "warning"),
        (12 * GB, 6 * GB, "ok"),
        (5 * GB, 6 * GB, "failure"),
        (10**6, 0, "failure"),
        (GB // 2, 0, "warning"),
        (2 * GB, 0, "ok"),
    ],
)
def test_space(free: int, newest: int, level: str) -> None:
    """Two checkpoints should fit, one must."""
    assert judge_space(Path("/s"), free, newest).level == level


@pytest.mark.fault("S1", "S7")
def test_size_of_the_newest_set_leads_nowhere_else(tmp_path: Path) -> None:
    """Links are not followed, and a directory of any depth is looked at."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "step-1" / "rank-00000").mkdir(parents=True)
    (run / "step-1" / "rank-00000" / "model").write_bytes(bytes(1000))
    outside.mkdir()
    (outside / "large").write_bytes(bytes(10**6))
    (run / "step-2").symlink_to(outside)
    assert newest_bytes(run) == 1000
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
        assert 1000 <= newest_bytes(run) < 10**5
    finally:
        openat.remove_tree("run", dir_fd=tmp_fd)  # pytest could not
        os.close(tmp_fd)


def test_devices() -> None:
    """A run directory that is a mount of its own breaks renames."""
    levels = [judge_devices(Path("/s"), Path("/s/r"), 1, n).level.value for n in (None, 1, 2)]
    assert levels == ["ok", "ok", "failure"]


def test_file_system_is_that_of_the_deepest_mount() -> None:
    """As /proc/self/mountinfo has it; a mount on top of another wins."""
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:5 / /mnt rw - xfs /dev/nvme rw\n"
        "3 1 0:6 / /mnt rw - tmpfs none rw\n"
    )
    assert file_system(Path("/mnt/s"), mounts) == "tmpfs"
    assert file_system(Path("/mntx"), mounts) == "ext4"


@pytest.mark.parametrize(
    ("delay_s", "shutdown_s", "level"),
    [(5.0, None, "warning"), (24.0, 30.0, "ok"), (60.0, 30.0, "warning"), (60.0, None, "ok")],
)
def test_logind_delay(delay_s: float, shutdown_s: float | None, level: str) -> None:
    """Long enough to flush, shorter than the cloud waits."""
    assert judge_delay(delay_s, wanted_s=20.0, shutdown_s=shutdown_s).level == level


@pytest.mark.parametrize(
    ("change", "staging", "level"),
    [
        ({}, "/var/lib/swansong/staging", "ok"),
        ({"LoadState": "not-found"}, "/var/lib/swansong/staging", "failure"),
        ({"TimeoutStopUSec": "1min 30s"}, "/var/lib/swansong/staging", "failure"),
        ({"TimeoutStopUSec": "infinity"}, "/var/lib/swansong/staging", "ok"),
        ({}, "/mnt/staging", "failure"),
        ({"ReadWritePaths": "/var/lib/swansong /mnt"}, "/mnt/staging", "ok"),
        ({"ActiveState": "inactive"}, "/var/lib/swansong/staging", "warning"),
        ({"NRestarts": "7"}, "/var/lib/swansong/staging", "warning"),
        ({"WatchdogUSec": "0"}, "/var/lib/swansong/staging", "warning"),
    ],
)
def test_unit(change: dict[str, str], staging: str, level: str) -> None:
    """systemd must give the daemon its time and its staging."""
    assert judge_unit({**UNIT, **change}, stop_s=123.0, written=[Path(staging)]).level == level


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("s3://bucket", ["/s"]),
        ("file:///srv/a%20b", ["/s", "/srv/a b"]),
    ],
)
def test_daemon_writes_to_staging_and_to_a_store_of_files(url: str, places: list[str]) -> None:
    """The sandbox must let both be written; a bucket needs no directory."""
    made = config(store={"url": url}, staging={"path": "/s"})
    assert written_directories(made) == [Path(place) for place in places]


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
def test_nobody_else_can_replace_staging(change: dict[str, tuple[int, int]], level: str) -> None:
    """Staging is not the group's, and the directories above it are root's."""
    facts = {"/mnt/s": (7, 0o2750), "/mnt": (0, 0o755), "/": (0, 0o755), **change}
    judged = judge_parents({Path(place): found for place, found in facts.items()}, 7)
    assert judged.level == level


def test_time_spans_of_systemd() -> None:
    """As ``systemctl show`` prints them."""
    spans = ["2min 30s", "45s", "500ms", "1h 1min", "1.5s", "0", "infinity", ""]
    assert [seconds(span) for span in spans] == [150, 45, 0.5, 3660, 1.5, 0, None, None]


def test_accounts() -> None:
    """Everything that is missing is named at once."""
    assert judge_accounts(user=True, group=True).level is Level.OK
    missing = judge_accounts(user=False, group=False)
    assert missing.found == "there is no user swansong and no group swansong-trainers"


def test_speed_in_the_planners_words() -> None:
    """Bandwidth times what a notice leaves, reserve excluded."""
    assert "10 GB fit into the 20 s" in judge_speed(GB, 2.0, 20.0).found


def test_grace_periods_of_the_clouds() -> None:
    """What a notice leaves, and the longest that may be under way at SIGTERM."""
    default = config()
    assert (grace_s(default, "aws"), longest_grace_s(default, "aws")) == (120.0, 120.0)
    assert (grace_s(default, "gcp"), longest_grace_s(default, "gcp")) == (25.0, 120.0)
    short = config(sources={"gcp_preemption_notice_s": 0})
    assert longest_grace_s(short, "gcp") == 25.0
    assert longest_grace_s(default, "none") == 25.0


def test_each_refusal_of_a_store_has_its_command() -> None:
    """By scheme and by kind of error."""
    s3, gs = config(), config(store={"url": "gs://bucket/x"})
    file = config(store={"url": "file:///srv/a%20b"})
    assert mending(s3, NotFound("")) == "aws s3 mb s3://bucket"
    assert mending(gs, NotFound("")) == "gcloud storage buckets create gs://bucket"
    assert mending(s3, Transient("")) == "curl -sSI https://s3.amazonaws.com"
    assert mending(s3, Permanent("")).startswith("aws iam put-role-policy ")
    assert "packer/permissions/gcp-vm.yaml" in mending(gs, Permanent(""))
    assert mending(file, NotFound("")).endswith("'/srv/a b'")


@pytest.mark.parametrize(
    ("running", "level"),
    [("0.1.0+1.gabc", Level.OK), ("0.1.0", Level.WARNING), (None, Level.WARNING)],
)
def test_running_and_installed_version(running: object, level: Level) -> None:
    """After an upgrade the daemon needs a restart; both versions and the command are named."""
    judgement = judge_version(running, "0.1.0+1.gabc")
    assert judgement.level is level
    assert "0.1.0+1.gabc" in judgement.found
    if level is Level.WARNING:
        assert judgement.mend == "sudo systemctl restart swansongd"
        assert str(running) in judgement.found
