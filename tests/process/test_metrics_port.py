# SPDX-License-Identifier: Apache-2.0
"""Another user takes the address of the metrics before the daemon, and serves forged ones."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from testkit.as_user import OUTSIDER
from testkit.clouds import Aws, Bucket
from testkit.other_users import needs_root
from testkit.raw_server import Peer, RawServer
from testkit.rig import Vm
from testkit.waiting import until

pytestmark = needs_root

FORGED = b'swansong_last_verdict{run="run",verdict="SAFE",drill="no"} 1\n'
SOON = {
    "swansongd.observe.exposition._RETRY_S": 0.5,
    "swansongd.notifications.notifier.SETTLE_S": 1.0,
    "swansongd.notifications.notifier._WARM_S": 0.5,
}
"""The daemon tries again each 10 s, and notifies after 15 s and at first 5 s, without these constants."""


@contextmanager
def thief() -> Iterator[tuple[int, int]]:
    """Process id and port of another user's server."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(OUTSIDER, OUTSIDER, OUTSIDER)
            os.setresuid(OUTSIDER, OUTSIDER, OUTSIDER)
            listener = socket.create_server(("127.0.0.1", 0))
            os.write(writer, str(listener.getsockname()[1]).encode())
            while True:
                client, _ = listener.accept()
                client.recv(4096)
                client.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + FORGED)
                client.close()
        finally:
            os._exit(0)
    os.close(writer)
    try:
        yield pid, int(os.read(reader, 16))
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def scraped(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        content: bytes = answer.read()
    return content


def silent_for(vm: Vm) -> str:
    """The reason why the heartbeat is silent."""
    return str(vm.status()["notifications"]["heartbeat"]["silent"])


@pytest.mark.fault("OM02")
def test_a_user_who_takes_the_port_first_is_reported_and_changes_nothing_else(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """One alarm over a restart, in each place; the verdict is SAFE; the metrics return to a free port."""
    told: list[dict[str, Any]] = []

    def receive(peer: Peer) -> None:
        while (request := peer.request()) is not None:
            if request.body:
                told.append(json.loads(request.body))
            peer.answer(200, b"ok")

    def alarms() -> list[bool]:
        return [body["over"] for body in told if body["kind"] == "metrics"]

    with RawServer(receive) as server:
        with thief() as (pid, port):
            settings = {
                "metrics": {"listen": f"127.0.0.1:{port}"},
                "notify": {"webhook_url": server.url, "heartbeat_url": server.url},
            }
            vm = new_vm(
                "vm", bucket.store, metadata=aws.metadata, settings=settings, constants=SOON
            )
            daemon = vm.start_daemon()
            line = daemon.lines.wait(event="metrics_failed", level="error")
            assert f"of user {OUTSIDER} listens at 127.0.0.1:{port}" in line["reason"]
            assert "metrics.listen" in line["hint"]
            assert FORGED in scraped(port)

            daemon.lines.wait(event="health", source="store", health="ok")
            vm.start_trainer(script=witness).lines.wait(step=5)
            aws.notice(in_s=60)
            daemon.lines.wait(event="verdict", verdict="SAFE")
            aws.withdraw()

            assert line["reason"] == vm.status()["metrics"]["failure"]
            until(lambda: "not served" in silent_for(vm), what="the silence of the heartbeat")
            assert "not served" in vm.status_words()
            findings = json.loads(vm.swansong("doctor", "--json").stdout)
            (found,) = (each for each in findings if each["name"] == "metrics address")
            assert found["level"] == "warning"
            assert f"process {pid} (" in found["found"]

            daemon.lines.wait(event="notification_sent", kind="metrics")
            record = vm.run_directory / ".swansongd" / "notifications.json"
            until(lambda: '"metrics"' in record.read_text(), what="the record of the alarm")
            daemon.kill()
            daemon = vm.start_daemon()
            daemon.lines.wait(event="metrics_failed")
        daemon.lines.wait(event="metrics_served")
        own = scraped(port)
        assert b"swansong_build_info{" in own
        assert FORGED not in own
        assert vm.status()["metrics"] == {"address": f"127.0.0.1:{port}", "failure": None}
        until(lambda: True in alarms(), what="the end of the alarm")
    assert alarms() == [False, True]
    groups = {body["group"] for body in told if body["kind"] == "metrics"}
    assert len(groups) == 1
