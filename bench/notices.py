# SPDX-License-Identifier: Apache-2.0
"""Measures the time from a notice in the metadata service to the checkpoint request: ``make bench-notices``.

A real ``swansongd`` polls a metadata emulator, and a peer on the trainer socket records the time of the
request.  Two plain pollers run during the same minutes against their own emulators: every 5 s, which AWS
suggests, and every 2 s, as aws-node-termination-handler does.  Each notice appears at a random phase of
the polls.  The benchmark also counts requests, CPU time and memory of an idle daemon.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import requests
from swansong import protocol

from testkit.emulators.process import EmulatorProcess
from testkit.rig import Vm, control
from testkit.waiting import until

Samples = dict[str, list[float]]
GCP_KEY = "instance/preempted"


class Peer:
    """Sends the Hello of a rank and records the time of a checkpoint request."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(str(path))
        self._socket.send(protocol.encode(protocol.Hello(run="")))
        self.asked_mono_s: float | None = None
        self.is_welcome = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while data := self._socket.recv(protocol.MAX_MESSAGE_BYTES):
            now = time.monotonic()
            message = protocol.decode(data)
            if isinstance(message, protocol.Welcome):
                self.is_welcome = True
            elif isinstance(message, protocol.Request):
                self.asked_mono_s = now
            elif isinstance(message, protocol.Withdrawn):
                self.asked_mono_s = None


def notify(cloud: str, url: str, number: int) -> None:
    if cloud == "aws":
        control(url, "notice", action="terminate", in_s=300 + number)
    else:
        control(url, "set", key=GCP_KEY, value="TRUE")


def withdraw(cloud: str, url: str) -> None:
    if cloud == "aws":
        control(url, "withdraw")
    else:
        control(url, "set", key=GCP_KEY, value="FALSE")


def daemon_lane(cloud: str, notices: int, samples: Samples) -> None:
    """Send ``notices`` notices to one daemon and record the delays."""
    module = {"aws": "testkit.emulators.aws_imds", "gcp": "testkit.emulators.gcp_metadata"}[cloud]
    with (
        tempfile.TemporaryDirectory() as directory,
        EmulatorProcess(module, "--port", "0") as cloud_vm,
    ):
        disk = Path(directory)
        store = {"url": f"file://{disk}/store"}
        (disk / "store").mkdir()
        settings = {"sources": {"poll_interval_s": 1.0}}
        with Vm(disk, store, metadata=(cloud, cloud_vm.url), settings=settings) as vm:
            vm.start_daemon()
            peer = Peer(vm.socket)
            until(lambda: peer.is_welcome)
            for number in range(notices):
                time.sleep(random.uniform(0.2, 1.2))
                began = time.monotonic()
                notify(cloud, cloud_vm.url, number)
                until(lambda: peer.asked_mono_s is not None, what="the request")
                assert peer.asked_mono_s is not None
                samples[f"swansongd, {cloud}"].append(peer.asked_mono_s - began)
                withdraw(cloud, cloud_vm.url)
                until(lambda: peer.asked_mono_s is None, what="the withdrawal")


def poller_lane(intervals_s: tuple[float, ...], notices: int, samples: Samples) -> None:
    """Send ``notices`` notices to pollers with fixed intervals, as the documentation of AWS describes."""
    with EmulatorProcess("testkit.emulators.aws_imds", "--port", "0") as cloud_vm:
        url = f"{cloud_vm.url}/latest/meta-data/spot/instance-action"
        token = requests.put(
            f"{cloud_vm.url}/latest/api/token",
            headers={"X-aws-ec2-metadata-token-ttl-seconds": "21600"},
            timeout=5,
        ).text
        seen: dict[float, float | None] = dict.fromkeys(intervals_s)
        stop = threading.Event()

        def poll(interval_s: float) -> None:
            with requests.Session() as session:
                while not stop.is_set():
                    answer = session.get(
                        url, headers={"X-aws-ec2-metadata-token": token}, timeout=5
                    )
                    now = time.monotonic()
                    if answer.status_code != 200:
                        seen[interval_s] = None
                    elif seen[interval_s] is None:
                        seen[interval_s] = now
                    stop.wait(interval_s)

        threads = [threading.Thread(target=poll, args=(i,), daemon=True) for i in intervals_s]
        for thread in threads:
            thread.start()
        for number in range(notices):
            time.sleep(random.uniform(0.2, max(intervals_s)))
            began = time.monotonic()
            notify("aws", cloud_vm.url, number)
            until(lambda: all(seen.values()), what="the pollers")
            for interval_s, at in seen.items():
                assert at is not None
                samples[f"poll every {interval_s:g} s"].append(at - began)
            withdraw("aws", cloud_vm.url)
            until(lambda: not any(seen.values()), what="the pollers")
        stop.set()
        for thread in threads:
            thread.join()


def idle_cost(cloud: str, duration_s: float) -> tuple[float, float, float]:
    """(requests per hour, CPU seconds per hour, resident MB) of an idle daemon."""
    module = {"aws": "testkit.emulators.aws_imds", "gcp": "testkit.emulators.gcp_metadata"}[cloud]
    with (
        tempfile.TemporaryDirectory() as directory,
        EmulatorProcess(module, "--port", "0") as cloud_vm,
    ):
        disk = Path(directory)
        store = {"url": f"file://{disk}/store"}
        (disk / "store").mkdir()
        settings = {"sources": {"poll_interval_s": 1.0}}
        with Vm(disk, store, metadata=(cloud, cloud_vm.url), settings=settings) as vm:
            daemon = vm.start_daemon()
            time.sleep(5)
            before_cpu_s, before = _cpu_s(daemon.pid), _requests(cloud_vm.url)
            time.sleep(duration_s)
            cpu_s = _cpu_s(daemon.pid) - before_cpu_s
            asked = _requests(cloud_vm.url) - before
            status = Path(f"/proc/{daemon.pid}/status").read_text()
            resident_kb = int(status.split("VmRSS:")[1].split()[0])
            return asked * 3600 / duration_s, cpu_s * 3600 / duration_s, resident_kb / 1024


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _requests(url: str) -> int:
    answer = requests.get(f"{url}/_control/requests", timeout=5).json()
    return sum(counts["total"] for name, counts in answer.items() if name != "connections")


def in_parallel(tasks: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notices", type=int, default=200, help="number for each contestant")
    parser.add_argument("--idle-s", type=float, default=600.0, help="time to measure idle daemons")
    args = parser.parse_args()
    samples: Samples = {
        name: []
        for name in ("swansongd, aws", "swansongd, gcp", "poll every 2 s", "poll every 5 s")
    }
    lanes = 4
    each = -(-args.notices // lanes)
    tasks: list[Callable[[], None]] = []
    for _ in range(lanes):
        tasks.append(lambda: daemon_lane("aws", each, samples))
        tasks.append(lambda: poller_lane((2.0, 5.0), each, samples))
    tasks.append(lambda: daemon_lane("gcp", args.notices, samples))
    in_parallel(tasks)
    print(f"{'from the change to the request':30} {'n':>4} {'median':>9} {'worst':>9}")
    for name, values in samples.items():
        print(f"{name:30} {len(values):4} {statistics.median(values):7.3f} s {max(values):7.3f} s")
    print(f"\n{'idle':30} {'requests/h':>10} {'CPU s/h':>8} {'MB':>6}")
    for cloud in ("aws", "gcp"):
        asked, cpu_s, resident_mb = idle_cost(cloud, args.idle_s / 2)
        print(f"{f'swansongd, {cloud}':30} {asked:10.0f} {cpu_s:8.1f} {resident_mb:6.0f}")


if __name__ == "__main__":
    main()
