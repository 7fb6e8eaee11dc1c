# SPDX-License-Identifier: Apache-2.0
"""Measures the time from a notice in the metadata service to the checkpoint request: ``make bench-notices``.

A real ``swansongd`` polls a metadata emulator, and a peer on the trainer socket records the time of the
request.  Each notice appears at a random phase of the polls.  The benchmark also counts the requests, CPU
time and memory of an idle daemon, and the CPU time and memory of its GPU probe with a fake NVML library.
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
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import requests
from swansong import protocol

from testkit.emulators.process import EmulatorProcess
from testkit.fake_nvml import FakeNvml
from testkit.rig import Vm, control
from testkit.waiting import until

Samples = dict[str, list[float]]
GCP_KEY = "instance/preempted"
GPUS = 8
LANES = 4
PAUSE_S = 20.5
"""Between two notices: the daemon answers three at once, and then one each 20 s."""


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
    with emulated(cloud) as (daemon_vm, url):
        daemon_vm.start_daemon()
        peer = Peer(daemon_vm.socket)
        until(lambda: peer.is_welcome)
        for number in range(notices):
            time.sleep(PAUSE_S + random.uniform(0.0, 1.0))
            began = time.monotonic()
            notify(cloud, url, number)
            until(lambda: peer.asked_mono_s is not None, what="the request")
            assert peer.asked_mono_s is not None
            samples[f"swansongd, {cloud}"].append(peer.asked_mono_s - began)
            withdraw(cloud, url)
            until(lambda: peer.asked_mono_s is None, what="the withdrawal")


@contextmanager
def emulated(cloud: str) -> Iterator[tuple[Vm, str]]:
    """A VM with an empty store, and the URL of its metadata service."""
    module = {"aws": "testkit.emulators.aws_imds", "gcp": "testkit.emulators.gcp_metadata"}[cloud]
    with (
        tempfile.TemporaryDirectory() as directory,
        EmulatorProcess(module, "--port", "0") as cloud_vm,
    ):
        store = Path(directory, "store")
        store.mkdir()
        metadata, settings = (cloud, cloud_vm.url), {"sources": {"poll_interval_s": 1.0}}
        table = {"url": f"file://{store}"}
        with Vm(Path(directory), table, metadata=metadata, settings=settings) as vm:
            yield vm, cloud_vm.url


def idle_cost(cloud: str, duration_s: float) -> tuple[float, float, float]:
    """(requests per hour, CPU seconds per hour, resident MB) of an idle daemon."""
    with emulated(cloud) as (vm, url):
        daemon = vm.start_daemon()
        time.sleep(5)
        before_cpu_s, before = _cpu_s(daemon.pid), _requests(url)
        time.sleep(duration_s)
        cpu_s = _cpu_s(daemon.pid) - before_cpu_s
        asked = _requests(url) - before
        return asked * 3600 / duration_s, cpu_s * 3600 / duration_s, _resident_mb(daemon.pid)


def probe_cost(duration_s: float) -> tuple[float, float]:
    """(CPU seconds per hour, resident MB) of the process that asks a fake NVML library for its GPUs."""
    with tempfile.TemporaryDirectory() as directory:
        disk = Path(directory)
        for name in ("store", "nvml", "vm"):
            (disk / name).mkdir()
        nvml = FakeNvml(disk / "nvml")
        nvml.set(count=GPUS)
        with Vm(disk / "vm", {"url": f"file://{disk}/store"}) as vm:
            daemon = vm.start_daemon(**nvml.environment)
            until(lambda: len(vm.status()["gpus"]) == GPUS, what="the GPUs")
            tasks = Path(f"/proc/{daemon.pid}/task").glob("*/children")
            (child,) = {pid for each in tasks for pid in each.read_text().split()}
            before_cpu_s = _cpu_s(int(child))
            time.sleep(duration_s)
            cpu_s = _cpu_s(int(child)) - before_cpu_s
            return cpu_s * 3600 / duration_s, _resident_mb(int(child))


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


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
    parser.add_argument("--notices", type=int, default=200, help="number for each cloud")
    parser.add_argument("--idle-s", type=float, default=600.0, help="time to measure idle daemons")
    args = parser.parse_args()
    samples: Samples = defaultdict(list)
    each = -(-args.notices // LANES)
    tasks: list[Callable[[], None]] = []
    for cloud in ("aws", "gcp"):
        tasks += [partial(daemon_lane, cloud, each, samples)] * LANES
    in_parallel(tasks)
    print("| from the change in the metadata service to the request | n | median | worst |")
    print("| --- | --- | --- | --- |")
    for name, values in sorted(samples.items()):
        median_s, worst_s = statistics.median(values), max(values)
        print(f"| {name} | {len(values)} | {median_s:.3f} s | {worst_s:.3f} s |")
    print("\n| idle | requests to the metadata service per hour | CPU s per hour | memory |")
    print("| --- | --- | --- | --- |")
    for cloud in ("aws", "gcp"):
        asked, cpu_s, resident_mb = idle_cost(cloud, args.idle_s / 3)
        print(f"| swansongd, {cloud} | {asked:,.0f} | {cpu_s:.1f} | {resident_mb:.0f} MB |")
    cpu_s, resident_mb = probe_cost(args.idle_s / 3)
    print(f"| GPU probe, {GPUS} GPUs | | {cpu_s:.1f} | {resident_mb:.0f} MB |")


if __name__ == "__main__":
    main()
