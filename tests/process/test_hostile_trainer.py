# SPDX-License-Identifier: Apache-2.0
"""A registered trainer sends false numbers or floods the socket: the evacuation continues."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import Any

import pytest
from swansong import protocol
from swansong.protocol import Message, Refused
from swansongd.trainers.admission import CONNECTIONS_PER_USER

from testkit.channel_peer import Client
from testkit.clouds import Aws, Bucket
from testkit.rig import Vm


class Liar(Client):
    """A process that sends arbitrary messages; with ``hello``, as a rank."""

    def __init__(self, vm: Vm, *, hello: bool = True) -> None:
        super().__init__(vm.socket)
        if hello:
            self.send(protocol.Hello("run", step=3, start_id="1ia4", capabilities=["periodic"]))
            self.receive()

    def send(self, message: Message | bytes) -> None:
        with suppress(OSError):  # refused already
            super().send(message)

    def last_reply(self) -> Message | None:
        """The last message before the daemon closed the connection."""
        last = None
        with suppress(ConnectionError):
            while message := self.receive():
                last = message
        return last


@pytest.fixture
def vm(aws: Aws, bucket: Bucket, new_vm: Any, witness: str) -> Vm:
    """A VM that trains and has claimed a generation."""
    made: Vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = made.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    made.start_trainer(script=witness).lines.wait(step=5)
    return made


LIES = [
    {"type": "progress", "step": 4, "snapshot_s": -5},
    {"type": "progress", "step": 4, "save_s": -1e300},
    {"type": "progress", "step": 10**15, "save_bytes": -(2**62)},
    {"type": "sealed", "step": 4, "directory": "d", "save_s": -7, "size_bytes": -1},
]


@pytest.mark.fault("H09", "S13")
def test_impossible_numbers_close_the_connection_and_nothing_else(aws: Aws, vm: Vm) -> None:
    """A negative duration is refused with its field, before a notice and during the evacuation: SAFE."""
    daemon = vm.daemon
    assert daemon is not None

    def lie() -> None:
        for message in LIES:
            with Liar(vm, hello=False) as liar:  # the trainer has the only rank
                liar.send(json.dumps(message).encode())
                answer = liar.last_reply()
                assert isinstance(answer, Refused)
                assert f"{message['type']}: " in answer.reason

    lie()
    aws.notice(in_s=60)
    daemon.lines.wait(event="evacuation", phase="notice")
    lie()
    assert daemon.lines.wait(event="verdict")["verdict"] == "SAFE"
    report = vm.status()
    assert report["pid"] == daemon.pid
    assert report["decision_faults"] == {"count": 0, "last": None}


@pytest.mark.fault("H07", "S12", "H03")
def test_a_flood_of_restore_queries_does_not_cost_the_last_checkpoint(
    vm: Vm, bucket: Bucket
) -> None:
    """After 2,000 queries without a reply the number of threads is bounded, and a SIGTERM ends in SAFE."""
    daemon = vm.daemon
    assert daemon is not None
    tasks = f"/proc/{daemon.pid}/task"
    before = len(os.listdir(tasks))
    bucket.order("answer", status=503, method="GET", match="commits", times=1_000_000)
    sent = 0
    while sent < 2000:
        with Liar(vm) as liar:
            for _ in range(20):
                liar.send(protocol.RestoreQuery(f"q{sent}", generation=5, step=7))
                sent += 1
        assert len(os.listdir(tasks)) <= before + CONNECTIONS_PER_USER + 10
    bucket.order("clear")
    daemon.kill(signal.SIGTERM)
    assert daemon.lines.wait(event="verdict")["verdict"] == "SAFE"
    assert daemon.wait() == 0
