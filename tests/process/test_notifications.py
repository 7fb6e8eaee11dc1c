# SPDX-License-Identifier: Apache-2.0
"""Notifications of a real daemon through evacuations: to a receiver, to a program, and past both."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.raw_server import Peer, RawServer
from testkit.rig import Process, Vm
from testkit.waiting import until

SECRET = "T0SECRET0B0"


class Receiver:
    """A webhook that accepts each notification; with ``hangs``, it reads requests and never answers."""

    def __init__(self) -> None:
        self.hangs = False
        self.bodies: list[dict[str, Any]] = []
        self.url = ""
        self.folder = Path()

    def __call__(self, peer: Peer) -> None:
        while (request := peer.request()) is not None:
            if self.hangs:
                self.bodies.append({"kind": "unanswered"})
                peer.wait_for_end()
                return
            if len(request.body) < int(request.header("content-length") or 0):
                return  # the daemon was killed
            self.bodies.append(json.loads(request.body))
            peer.answer(200, b"ok")

    def kinds(self) -> list[str]:
        return [body["kind"] for body in self.bodies if body["kind"] in ("notice", "verdict")]


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver()
    made.folder = tmp_path
    with RawServer(made) as server:
        made.url = f"{server.url}/services/{SECRET}"
        yield made


def secret_file(receiver: Receiver) -> str:
    path = receiver.folder / "webhook"
    path.write_text(f"{receiver.url}\n")
    path.chmod(0o400)
    return str(path)


def training(vm: Vm, witness: str) -> Process:
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=5)
    return daemon


@pytest.mark.fault("W05", "W06", "N09", "H01")
def test_a_daemon_that_is_killed_sends_one_notice_and_one_verdict(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str, receiver: Receiver
) -> None:
    """The next daemon knows what was sent.  Nothing that a daemon writes contains the address."""
    file = secret_file(receiver)
    settings = {"notify": {"webhook_url_file": file}}
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, settings=settings)
    daemon = training(vm, witness)
    bucket.order("answer", status=503, method="PUT", match="/data/", times=1_000_000)
    aws.notice(in_s=60)
    daemon.lines.wait(event="notification_sent", kind="notice")
    record = vm.run_directory / ".swansongd" / "notifications.json"
    until(lambda: "notice/" in record.read_text(), what="the record")
    daemon.kill()
    bucket.order("clear")

    restarted = vm.start_daemon()
    restarted.lines.wait(event="verdict", verdict="SAFE")
    restarted.lines.wait(event="notification_sent", kind="verdict")
    shown = vm.status()["notifications"]["webhook"]
    assert shown["failed"] == shown["dropped"] == shown["queued"] == 0
    assert receiver.kinds() == ["notice", "verdict"]
    notice, verdict = (b for b in receiver.bodies if b["kind"] in ("notice", "verdict"))
    assert notice["group"] == verdict["group"]
    assert (notice["source"], verdict["verdict"]) == ("aws.spot", "SAFE")
    assert 0 < notice["seconds_left"] <= 60

    process = Path("/proc", str(restarted.pid))
    places = [process / "environ", process / "cmdline", record]
    written = [path.read_text(errors="replace") for path in places]
    written += [*daemon.lines.raw, *restarted.lines.raw, json.dumps(vm.status())]
    written += [content.decode(errors="replace") for content in bucket.objects().values()]
    assert not any(SECRET in text for text in written)


@pytest.mark.fault("W01", "W04")
def test_a_receiver_and_a_program_that_hang_delay_no_verdict(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str, receiver: Receiver
) -> None:
    """Both hang from before the request until after the verdict; the program ends with the daemon."""
    receiver.hangs = True
    out = receiver.folder / "program"
    script = f'echo "$SWANSONG_EVENT $SWANSONG_SOURCE $SWANSONG_RUN $$" >{out}; sleep 600'
    notify = {
        "webhook_url": receiver.url,
        "heartbeat_url": receiver.url,
        "exec": ["/bin/sh", "-c", script],
        "exec_timeout_s": 600,
    }
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, settings={"notify": notify})
    daemon = training(vm, witness)
    until(lambda: receiver.bodies, what="a request that hangs")
    aws.notice(in_s=60)
    daemon.lines.wait(event="verdict", verdict="SAFE")
    until(out.exists, what="the program")
    event, source, run, pid = until(lambda: out.read_text().split(), what="its output")
    assert (event, source, run) == ("notice", "aws.spot", "run")
    shown = vm.status()["notifications"]
    assert shown["webhook"]["sent"] == shown["exec"]["sent"] == 0
    assert shown["exec"]["queued"] == 1

    daemon.kill(signal.SIGINT)
    assert daemon.wait(30) == 0
    until(lambda: not Path("/proc", pid).exists(), what="the end of the program")


def test_the_verdict_of_a_shutdown_is_sent_before_the_daemon_ends(
    bucket: Bucket, new_vm: Any, witness: str, receiver: Receiver
) -> None:
    """Without systemd, SIGTERM is a shutdown of the host: the daemon ends with its verdict."""
    vm = new_vm("vm", bucket.store, settings={"notify": {"webhook_url": receiver.url}})
    daemon = training(vm, witness)
    daemon.kill(signal.SIGTERM)
    assert daemon.wait(30) == 0
    assert receiver.kinds() == ["notice", "verdict"]
    assert receiver.bodies[-1]["verdict"] == "SAFE"
