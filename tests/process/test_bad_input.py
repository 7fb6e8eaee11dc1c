# SPDX-License-Identifier: Apache-2.0
"""Invalid configuration, paths and messages, a hostile bucket, a full disk: one clear line each."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swansong_bucket.format import manifest

from testkit.channel_peer import Client
from testkit.clouds import Bucket
from testkit.other_users import needs_root
from testkit.rig import BIN
from testkit.waiting import until

INVALID_CONFIG, BAD_STAGING = 2, 15


# ---------------------------------------------------------------- start of the daemon


@pytest.mark.fault("H11")
def test_all_problems_of_the_configuration_are_listed(new_vm: Any) -> None:
    """Five problems are five lines, each with its key; the exit code is 2, and staging is unchanged."""
    mistakes = {
        "run": {"name": "../up"},
        "store": {"url": "ftp://somewhere"},
        "sources": {"poll_interval_s": -1, "cluod": "aws"},
        "trainer": {"signal": "SIGKILL"},
    }
    vm = new_vm("vm", {}, settings=mistakes)
    daemon = vm.start_daemon(ready=False)
    assert daemon.wait() == INVALID_CONFIG
    problems = [line for line in daemon.lines.raw if "problem=" in line]
    for key in (
        "run.name",
        "store.url",
        "sources.poll_interval_s",
        "sources.cluod",
        "trainer.signal",
    ):
        assert len([line for line in problems if f"{key}:" in line]) == 1, (key, problems)
    assert len(problems) == 5
    assert list(vm.staging.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, ""),
        ({"run": {"name": "../up"}}, "run.name"),
        ({"trainer": {"users": ["no-such-user"]}}, "trainer.users"),
        ({"store": {"url": "s3://b"}}, "store.url"),
        ({"store": {"signing_key_file": "/nowhere/key"}}, "store.signing_key_file"),
        ({"mirror": {"url": "file://relative"}}, "mirror.url"),
    ],
)
def test_a_configuration_can_be_checked_before_it_counts(
    new_vm: Any, tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    """``swansongd --check`` refuses each problem that would end a start, and writes nothing."""
    vm = new_vm("vm", {"url": f"file://{tmp_path}/store"}, settings=settings)
    checked = vm.spawn([str(BIN / "swansongd"), "--config", str(vm.config), "--check"])
    assert checked.wait() == (INVALID_CONFIG if problem else 0)
    checked.lines.drained()
    found = [line for line in checked.lines.raw if "problem=" in line]
    assert len(found) == bool(problem)
    assert all(problem in line for line in found)
    assert list(vm.staging.iterdir()) == []


@pytest.mark.fault("D08")
def test_a_missing_staging_directory_is_reported_and_not_created(
    new_vm: Any, tmp_path: Path
) -> None:
    """The exit code is 15.  In place of a missing mount, a new directory would fill the root disk."""
    place = tmp_path / "nvme"
    store = {"url": f"file://{tmp_path}/store"}
    vm = new_vm("vm", store, settings={"staging": {"path": str(place)}})
    daemon = vm.start_daemon(ready=False)
    assert daemon.wait() == BAD_STAGING
    (problem, hint) = daemon.lines.all(event="cannot_start")
    assert str(place) in problem["problem"]
    assert "staging.path" in hint["hint"]
    assert not place.exists()


@pytest.mark.fault("D08")
def test_read_only_staging_is_reported(bucket: Bucket, new_vm: Any) -> None:
    """The exit code is 15, before the daemon writes to the bucket."""
    vm = new_vm("vm", bucket.store)
    with mounted_tmpfs(vm.staging, "ro,size=1m"):
        daemon = vm.start_daemon(ready=False)
        assert daemon.wait() == BAD_STAGING
    (problem, hint) = daemon.lines.all(event="cannot_start")
    assert "Read-only file system" in problem["problem"]
    assert "write" in hint["hint"]
    assert bucket.keys() == []


@pytest.mark.fault("H10")
def test_a_second_daemon_in_the_same_staging_is_refused(bucket: Bucket, new_vm: Any) -> None:
    """The second daemon names the conflict and exits; the first continues."""
    vm = new_vm("vm", bucket.store)
    first = vm.start_daemon()
    second = vm.start_daemon(ready=False)
    assert second.wait() == BAD_STAGING
    problem = second.lines.all(event="cannot_start")[0]["problem"]
    assert "another swansongd" in problem
    assert first.popen.poll() is None
    assert vm.status()["pid"] == first.pid


@pytest.mark.fault("O07")
def test_a_missing_bucket_is_reported_once_with_a_fix(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The daemon keeps running, because an operator may create the bucket; status shows the error."""
    vm = new_vm("vm", {**bucket.store, "url": "s3://no-such-bucket/team"})
    daemon = vm.start_daemon()
    line = daemon.lines.wait(event="health", source="store")
    assert line["health"] != "ok"
    assert "no-such-bucket" in line["reason"]
    assert "Create the bucket" in line["reason"]
    report = vm.status()
    assert (report["store"]["health"], report["store"]["reason"]) == (
        line["health"],
        line["reason"],
    )
    assert report["generation"] is None
    assert len(daemon.lines.all(event="health", source="store")) == 1
    assert daemon.popen.poll() is None


# ---------------------------------------------------------------- messages on the socket


INVALID = [
    ("65536 bytes", b"x" * 1_000_000),
    ("not JSON", b'{"type": "hello", '),
    ("hello: run is missing", b'{"type": "hello", "rank": "first"}'),
    ("not JSON", b"[" * 60_000),
    ("abracadabra", b'{"type": "abracadabra"}'),
]
"""Reasons of a refusal, each with a message."""


@pytest.mark.fault("S12", "S13")
def test_an_invalid_message_closes_its_connection(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The reply contains the reason, and the log that of the first; other trainers continue."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--every-steps", "20", script=witness)
    trainer.lines.wait(step=5)
    for reason, message in INVALID:
        with Client(vm.socket) as peer:
            peer.socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 2_000_000)
            peer.send(message)
            assert reason in peer.refusal()
    (line,) = until(lambda: _warnings(daemon), what="a line in the log")
    assert INVALID[0][0] in line["reason"]
    daemon.lines.wait(event="committed", step=20)
    assert len(_warnings(daemon)) == 1  # the log is limited


_SO_SNDBUFFORCE = 32
"""Requires root; a message of 1 MB exceeds the default buffer."""


def _warnings(daemon: Any) -> list[dict[str, Any]]:
    return [line for line in daemon.lines.all(level="warning") if "trainer" in line["event"]]


@needs_root
@pytest.mark.fault("S8")
def test_another_user_is_refused(bucket: Bucket, new_vm: Any, witness: str) -> None:
    """The kernel reports the uid of the peer, so that the mode of the socket does not matter."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=5)
    vm.socket.chmod(0o666)
    hello = {"type": "hello", "run": "run", "step": 0}
    stranger = f"""
import os, socket
os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
    peer.settimeout(10)
    peer.connect({vm.socket.name!r})  # relative: this user may not enter the directories above
    try:
        peer.send({json.dumps(hello).encode()!r})
    except BrokenPipeError:
        pass
    print(peer.recv(65536).decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", stranger],
        cwd=vm.disk,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["type"] == "refused"
    assert "65534" in answer["reason"]
    (line,) = until(lambda: _warnings(daemon), what="a line in the log")
    assert line["uid"] == 65534
    trainer.lines.wait(step=30)
    assert [item["pid"] for item in vm.status()["trainers"]] == [trainer.pid]


# ---------------------------------------------------------------- objects in the bucket


OUTSIDE = "../../../escaped", "/tmp/escaped-from-swansong"


@pytest.mark.fault("S6", "S24", "G16")
def test_a_manifest_that_points_outside_is_refused(
    bucket: Bucket, new_vm: Any, tmp_path: Path, witness: str
) -> None:
    """The digest is valid, the path is not: no file is written, and the older commit is restored."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--steps", "20", "--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed", step=20)
    assert trainer.wait() == 0
    (key,) = bucket.keys("run/commits/")
    honest = manifest.decode(bucket.get(key))
    for step, path in zip((40, 60), OUTSIDE, strict=True):
        shards = (replace(honest.shards[0], path=path), *honest.shards[1:])
        hostile = manifest.encode(replace(honest, step=step, shards=shards))
        bucket.put(key.replace("000000000020", f"{step:012d}"), hostile)

    place = vm.disk / "restored"
    answer = vm.swansong("restore", "--to", str(place), "--json")
    assert answer.returncode == 0, answer.stderr
    restored = json.loads(answer.stdout)
    assert restored["step"] == 20
    assert [skipped["step"] for skipped in restored["skipped"]] == [60, 40]
    assert all("not safe" in skipped["reason"] for skipped in restored["skipped"])
    assert not list(tmp_path.rglob("escaped*"))
    assert not Path("/tmp/escaped-from-swansong").exists()


# ---------------------------------------------------------------- disk and socket directory


@pytest.mark.fault("D01")
def test_a_full_staging_disk_fails_a_checkpoint_and_not_the_training(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """Training continues, one line per save states the reason, and older commits are unchanged."""
    vm = new_vm("vm", bucket.store)
    with mounted_tmpfs(vm.staging, "size=8m"):
        daemon = vm.start_daemon()
        first = vm.start_trainer("--steps", "20", "--every-steps", "20", script=witness)
        daemon.lines.wait(event="committed", step=20)
        assert first.wait() == 0
        before = bucket.objects("run/commits/")

        command = [sys.executable, "-u", witness, "--every-steps", "30", "--size-bytes", "5000000"]
        trainer = vm.spawn(command, SWANSONG_SOCKET=str(vm.socket))
        until(lambda: _about_the_disk(trainer), what="a line about the disk")
        seen = vm.status()["trainers"][-1]["step"]
        until(lambda: vm.status()["trainers"][-1]["step"] > seen + 10, what="further steps")

        lines = _about_the_disk(trainer)
        assert len(lines) == len(set(lines))  # one line per attempt, with its step
        assert trainer.popen.poll() is None
        assert daemon.popen.poll() is None
        assert bucket.objects("run/commits/") == before
        until(lambda: not list(vm.run_directory.glob("*.partial")), what="room again")
        for process in vm.processes:
            process.kill()


def _about_the_disk(trainer: Any) -> list[str]:
    return [line for line in trainer.lines.raw if "No space left on device" in line]


@contextmanager
def mounted_tmpfs(place: Path, options: str) -> Iterator[None]:
    """Mount a tmpfs at ``place``."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "swansong-test", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_missing_socket_directory_is_reported(new_vm: Any, tmp_path: Path) -> None:
    """One line contains the key and the path, another one the fix."""
    missing = tmp_path / "missing" / "trainer.sock"
    vm = new_vm(
        "vm",
        {"url": f"file://{tmp_path}/store"},
        settings={"trainer": {"socket": str(missing)}},
    )
    daemon = vm.start_daemon(ready=False)
    assert daemon.wait() == 2
    lines = daemon.lines.all(event="cannot_start")
    assert any(
        f"trainer.socket: cannot listen at {missing}" in line.get("problem", "") for line in lines
    )
    assert any("Create its directory" in line.get("hint", "") for line in lines)
    assert not any("Traceback" in line for line in daemon.lines.raw)
