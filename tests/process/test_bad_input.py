# SPDX-License-Identifier: Apache-2.0
"""Wrong configuration, a wrong place, wrong messages, a hostile bucket, a full disk: one clear line each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swansongd.bucket import manifest

from testkit.clouds import Bucket
from testkit.waiting import until

pytestmark = pytest.mark.timeout(60)

WRONG_CONFIG, BAD_STAGING = 2, 15


# ---------------------------------------------------------------- at the start


@pytest.mark.fault("H11")
def test_every_mistake_in_the_configuration_is_named_at_once(new_vm: Any) -> None:
    """Five mistakes, five lines, each with its key; exit code 2, and nothing was touched."""
    mistakes = {
        "run": {"name": "../up"},
        "store": {"url": "ftp://somewhere"},
        "sources": {"poll_interval_s": -1, "cluod": "aws"},
        "trainer": {"signal": "SIGKILL"},
    }
    vm = new_vm("vm", {}, settings=mistakes)
    daemon = vm.start_daemon(ready=False)
    assert daemon.wait() == WRONG_CONFIG
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


@pytest.mark.fault("D08")
@pytest.mark.parametrize("what", ["missing", "a file"])
def test_staging_that_cannot_be_used_is_said_and_not_made(
    new_vm: Any, tmp_path: Path, what: str
) -> None:
    """Were the mount missing, a directory made in its place would fill the root disk; exit code 15."""
    place = tmp_path / "nvme"
    if what == "a file":
        place.write_text("not a directory")
    store = {"url": f"file://{tmp_path}/store"}
    vm = new_vm("vm", store, settings={"staging": {"path": str(place)}})
    daemon = vm.start_daemon(ready=False)
    assert daemon.wait() == BAD_STAGING
    (problem, hint) = daemon.lines.all(event="cannot_start")
    assert str(place) in problem["problem"]
    assert "staging.path" in hint["hint"]
    assert not place.is_dir()


@pytest.mark.fault("D08")
def test_staging_that_cannot_be_written_to_is_said(bucket: Bucket, new_vm: Any) -> None:
    """A read-only file system: exit code 15 before anything is promised to anybody."""
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
    """It says who is in the way and leaves; the first does not notice."""
    vm = new_vm("vm", bucket.store)
    first = vm.start_daemon()
    second = vm.start_daemon(ready=False)
    assert second.wait() == BAD_STAGING
    problem = second.lines.all(event="cannot_start")[0]["problem"]
    assert "another swansongd" in problem
    assert first.popen.poll() is None
    assert vm.status()["pid"] == first.pid


@pytest.mark.fault("O07")
def test_a_bucket_that_does_not_exist_is_said_once_with_the_way_out(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The daemon stays, for somebody may create the bucket; status shows what is wrong."""
    vm = new_vm("vm", {**bucket.store, "url": "s3://no-such-bucket/team"})
    daemon = vm.start_daemon()
    line = daemon.lines.wait(event="health", source="store")
    assert line["health"] != "ok"
    assert "no-such-bucket" in line["reason"]
    assert "Make the bucket" in line["reason"]
    report = vm.status()
    assert (report["store"]["health"], report["store"]["reason"]) == (
        line["health"],
        line["reason"],
    )
    assert report["generation"] is None
    assert len(daemon.lines.all(event="health", source="store")) == 1
    assert daemon.popen.poll() is None


# ---------------------------------------------------------------- on the socket


@pytest.mark.fault("S12", "S13")
@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (b"x" * 1_000_000, "65536 bytes"),
        (b'{"type": "hello", ', "not JSON"),
        (b'{"type": "hello", "rank": "first"}', "hello: run is missing"),
        (b"[" * 60_000, "not JSON"),
        (b'{"type": "abracadabra"}', "abracadabra"),
    ],
    ids=["1 MB", "broken JSON", "wrong field", "deep", "unknown type"],
)
def test_a_bad_message_costs_its_sender_the_connection(
    bucket: Bucket, new_vm: Any, witness: str, message: bytes, complaint: str
) -> None:
    """One line in the log, one answer that says why; other trainers go on."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--every-steps", "20", script=witness)
    trainer.lines.wait(step=5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(10)
        peer.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 2_000_000)
        peer.connect(str(vm.socket))
        peer.send(message)
        answer = json.loads(peer.recv(65536))
        assert answer["type"] == "refused"
        assert complaint in answer["reason"]
        assert peer.recv(65536) == b""  # hung up
    (line,) = until(lambda: _complaints(daemon), what="a line in the log")
    assert complaint in line["reason"]
    daemon.lines.wait(event="committed", step=20)
    assert len(_complaints(daemon)) == 1


_SO_SNDBUFFORCE = 32
"""Only root may; a message of 1 MB does not fit the usual buffer."""


def _complaints(daemon: Any) -> list[dict[str, Any]]:
    return [line for line in daemon.lines.all(level="warning") if "trainer" in line["event"]]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.fault("S8")
def test_another_user_is_turned_away(bucket: Bucket, new_vm: Any, witness: str) -> None:
    """Even if the socket's mode lets everybody in: the kernel says who it is."""
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
    peer.connect({vm.socket.name!r})  # relative: the directories above are nobody's business
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
    (line,) = until(lambda: _complaints(daemon), what="a line in the log")
    assert line["uid"] == 65534
    trainer.lines.wait(step=30)
    assert [item["pid"] for item in vm.status()["trainers"]] == [trainer.pid]


# ---------------------------------------------------------------- from the bucket


@pytest.mark.fault("S6", "S24", "G16")
@pytest.mark.parametrize("path", ["../../../escaped", "/tmp/escaped-from-swansong"])
def test_a_manifest_that_points_outside_is_refused(
    bucket: Bucket, new_vm: Any, tmp_path: Path, witness: str, path: str
) -> None:
    """Its digest is right, its path is not: nothing of it is written, and the older commit is taken."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--steps", "20", "--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed", step=20)
    assert trainer.wait() == 0
    (key,) = bucket.keys("run/commits/")
    honest = manifest.decode(bucket.get(key))
    shards = (replace(honest.shards[0], path=path), *honest.shards[1:])
    hostile = manifest.encode(replace(honest, step=40, shards=shards))
    bucket.put(key.replace("000000000020", "000000000040"), hostile)

    elsewhere = new_vm("elsewhere", bucket.store)
    place = elsewhere.disk / "restored"
    answer = elsewhere.swansong("restore", "--to", str(place), "--json")
    assert answer.returncode == 0, answer.stderr
    restored = json.loads(answer.stdout)
    assert restored["step"] == 20
    assert "not safe" in restored["skipped"][0]["reason"]
    assert not list(tmp_path.rglob("escaped*"))
    assert not Path("/tmp/escaped-from-swansong").exists()


# ---------------------------------------------------------------- on the disk


@pytest.mark.fault("D01")
def test_a_full_staging_disk_costs_a_checkpoint_and_not_the_training(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """Training goes on, one line says why there is no checkpoint, and older commits are untouched."""
    vm = new_vm("vm", bucket.store)
    with mounted_tmpfs(vm.staging, "size=8m"):
        daemon = vm.start_daemon()
        first = vm.start_trainer("--steps", "20", "--every-steps", "20", script=witness)
        daemon.lines.wait(event="committed", step=20)
        assert first.wait() == 0
        before = bucket.objects("run/commits/")

        command = [sys.executable, "-u", witness, "--every-steps", "30", "--size-bytes", "5000000"]
        trainer = vm.spawn(command, SWANSONG_SOCKET=str(vm.socket))  # what it logs, this time
        until(lambda: _about_the_disk(trainer), what="a line about the disk")
        seen = vm.status()["trainers"][-1]["step"]
        until(lambda: vm.status()["trainers"][-1]["step"] > seen + 10, what="further steps")

        lines = _about_the_disk(trainer)
        assert len(lines) == len(set(lines))  # one for each attempt, naming its step
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
    """A disk of its own at ``place``."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "swansong-test", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_socket_that_cannot_be_made_is_explained(new_vm: Any, tmp_path: Path) -> None:
    """A missing directory of the socket is one line with the key, the path and the way out."""
    missing = tmp_path / "missing" / "trainer.sock"
    vm = new_vm(
        "vm",
        {"url": f"file://{tmp_path}/store"},
        settings={"trainer": {"socket": str(missing)}},
    )
    daemon = vm.start_daemon(ready=False)
    assert daemon.wait() == 2
    said = daemon.lines.all(event="cannot_start")
    assert any(
        f"trainer.socket: cannot listen at {missing}" in line.get("problem", "") for line in said
    )
    assert any("Create its directory" in line.get("hint", "") for line in said)
    assert not any("Traceback" in line for line in daemon.lines.raw)
