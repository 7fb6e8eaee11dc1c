# SPDX-License-Identifier: Apache-2.0
"""Measures the start of the daemon and of ``swansong restore`` on a new VM: ``make bench-start``.

A store emulator holds one commit.  On an empty disk the command measures the time and the CPU time of the
process from its start to its first request for data of the checkpoint, and the requests before that one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from testkit.emulators.process import EmulatorProcess
from testkit.rig import BIN, CREDENTIALS, Process, Vm
from testkit.staged import seal_files
from testkit.store_tap import StoreTap
from testkit.waiting import until

SIZE_BYTES = 4_000_000
EMULATORS = {"s3": "testkit.emulators.s3_server", "gs": "testkit.emulators.gcs_server"}


@dataclass(frozen=True)
class Sample:
    """One start, until the first request for data."""

    wall_s: float
    cpu_s: float
    requests: int


class Tap(StoreTap):
    """Counts the requests, and stops the clock at the first one for data."""

    def __init__(self, upstream_url: str) -> None:
        super().__init__(upstream_url)
        self.requests: list[str] = []
        self.on_data: Callable[[], None] = lambda: None

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        is_data = handler.command == "GET" and "run/data/" in handler.path.replace("%2F", "/")
        if is_data and "prefix=" not in handler.path:
            on_data, self.on_data = self.on_data, lambda: None
            on_data()
        self.requests.append(f"{handler.command} {handler.path}")
        super().forward(handler)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(tap: Tap, start: Callable[[], Process]) -> Sample:
    """Start a process, and wait for its first request for data."""
    tap.requests.clear()
    samples: list[Sample] = []
    pids: list[int] = []

    def note() -> None:
        until(lambda: pids)
        wall_s = time.monotonic() - began_mono_s
        samples.append(Sample(wall_s, cpu_s(pids[0]), len(tap.requests)))

    tap.on_data = note
    began_mono_s = time.monotonic()
    process = start()
    pids.append(process.pid)
    until(lambda: samples, timeout_s=120, what="the first request for data")
    return samples[0]


def of_a_command(tap: Tap, vm: Vm, *arguments: str) -> Sample:
    """Run one command of ``swansong`` to its end."""
    words = [str(BIN / "swansong"), "--config", str(vm.config), *arguments]
    sample = measure(tap, lambda: vm.spawn(words, **CREDENTIALS))
    assert vm.processes[-1].wait() == 0
    return sample


def joined_cpu_s(vm: Vm, there: Path) -> float:
    """CPU time of ``swansong restore --local`` beside a daemon that has the checkpoint."""
    before = os.times()
    done = vm.swansong("restore", "--local", "--to", str(there), "--json")
    after = os.times()
    assert json.loads(done.stdout)["step"] == 1, done.stderr
    assert there.is_symlink(), done.stderr
    taken = after.children_user + after.children_system
    return taken - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--store", choices=sorted(EMULATORS), default="s3")
    args = parser.parse_args()
    daemons: list[Sample] = []
    commands: list[Sample] = []
    joined: list[float] = []
    with ExitStack() as stack:
        server = stack.enter_context(EmulatorProcess(EMULATORS[args.store], "--bucket", "ckpt"))
        tap = stack.enter_context(Tap(server.url))
        store = {"url": f"{args.store}://ckpt/ours", "endpoint": tap.url}
        if args.store == "s3":
            store["region"] = "us-east-1"
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swansong-start-")))
        (scratch / "first").mkdir()
        with Vm(scratch / "first", store) as vm:
            daemon = vm.start_daemon()
            seal_files(vm.run_directory, 1, {"x": os.urandom(SIZE_BYTES)})
            daemon.lines.wait(event="committed", step=1)
        for number in range(args.repetitions):
            disk = scratch / str(number)
            disk.mkdir()
            with Vm(disk, store) as vm:
                commands.append(of_a_command(tap, vm, "restore", "--to", str(disk / "to")))
                daemons.append(measure(tap, lambda vm=vm: vm.start_daemon(ready=False)))  # type: ignore[misc]
                assert vm.daemon is not None
                vm.daemon.lines.wait(event="prefetched")
                joined.append(joined_cpu_s(vm, disk / "link"))
            print(f"{number + 1} of {args.repetitions}", file=sys.stderr)
    print(f"| {args.store}, median of {args.repetitions} | wall s | CPU s | requests before |")
    print("| --- | --- | --- | --- |")
    for name, samples in {"swansongd": daemons, "swansong restore": commands}.items():
        row = [
            f"{statistics.median(getattr(sample, key) for sample in samples):.2f}"
            for key in ("wall_s", "cpu_s")
        ]
        count = statistics.median(sample.requests for sample in samples)
        print(f"| `{name}` to the first request for data | {' | '.join(row)} | {count:.0f} |")
    print(f"| `swansong restore --local` in all, joined | | {statistics.median(joined):.2f} | 0 |")


if __name__ == "__main__":
    main()
