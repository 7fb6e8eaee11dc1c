# SPDX-License-Identifier: Apache-2.0
"""Measures the time from a restore query to the end of the restore: ``make bench-load-early``.

A daemon fetches a checkpoint from the S3 emulator, which sends a fixed number of bytes per second.  The
prefetch is off, so the download begins with the query.  In the one case the hooks load tensors while files
arrive, in the other one they wait for the answer.  The order is random within each repetition.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import swansong
import torch
from swansong.torch import TrainingState
from torch import nn

from bench.into_tensors import cpu_name
from bench.transfer.results import write_page
from testkit.clouds import Bucket
from testkit.emulators.process import EmulatorProcess
from testkit.rig import Vm

NAME = "make bench-load-early"
LAYERS = 8


class Waiting(TrainingState):
    """A state that is loaded after the answer."""

    def arrivals(self) -> None:  # type: ignore[override]
        return None


def attached(vm: Vm, size_bytes: int, kind: type[TrainingState]) -> swansong.Guard:
    """A guard for a model and Adam moments of about this size; the moments do not exist yet."""
    width = round((size_bytes / (LAYERS * 4 * 3)) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    return swansong.attach(
        kind(model, torch.optim.Adam(model.parameters())), socket=vm.socket, every_steps=1
    )


def save(vm: Vm, size_bytes: int) -> None:
    daemon = vm.start_daemon()
    with attached(vm, size_bytes, TrainingState) as guard:
        guard.restore()
        state = guard._state  # noqa: SLF001
        assert isinstance(state, TrainingState)
        model, optimizer = (state._objects[name] for name in ("model", "optimizer"))  # noqa: SLF001
        width = model[0].in_features
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        guard.step(1)
        assert guard.wait_saved(600)
        daemon.lines.wait(event="committed", timeout_s=600)


def restore(vm: Vm, size_bytes: int, kind: type[TrainingState]) -> float:
    vm.start_daemon()
    with attached(vm, size_bytes, kind) as guard:
        begun_mono_s = time.monotonic()
        assert guard.restore() == 1
        return time.monotonic() - begun_mono_s


def main() -> None:
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state")
    parser.add_argument("--mb-per-s", type=float, default=100.0, help="rate of the store")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="20 MB, once: a test of the benchmark")
    parser.add_argument(
        "--write", action="store_true", help="write the table into docs/performance/"
    )
    options = parser.parse_args()
    size_bytes = 20_000_000 if options.quick else int(options.gb * 1e9)
    seconds: dict[type[TrainingState], list[float]] = {TrainingState: [], Waiting: []}
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as place,
        EmulatorProcess("testkit.emulators.s3_server", "--port", "0", "--bucket", "ckpt") as s3,
    ):
        bucket, off = Bucket(s3.url, "bench"), {"restore": {"prefetch": False}}

        def new_vm(name: str) -> Vm:
            directory = Path(place, name)
            directory.mkdir()
            return Vm(directory, bucket.store, settings=off)

        with new_vm("first") as vm:
            save(vm, size_bytes)
        bucket.order("pace", total_bytes_per_s=options.mb_per_s * 1e6)
        for repeat in range(1 if options.quick else options.repeats):
            for kind in random.sample(list(seconds), 2):
                with new_vm(f"{kind.__name__}-{repeat}") as vm:
                    seconds[kind].append(restore(vm, size_bytes, kind))
                print(f"{kind.__name__}: {seconds[kind][-1]:.2f} s", file=sys.stderr)
    transfer_s = size_bytes / options.mb_per_s / 1e6
    case = f"{size_bytes / 1e9:g} GB at {options.mb_per_s:g} MB/s"
    lines = [
        f"| {case} | query to restored, s | beyond the transfer, s |",
        "| --- | --- | --- |",
    ]
    for kind, name in (
        (Waiting, "loads after the answer"),
        (TrainingState, "loads while files arrive"),
    ):
        low, middle, high = (f(seconds[kind]) for f in (min, statistics.median, max))
        lines.append(
            f"| {name} | {middle:.2f} ({low:.2f}-{high:.2f}) | {middle - transfer_s:.2f} |"
        )
    lines += ["", f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}."]
    print("\n".join(lines))
    if options.write:
        write_page(NAME, "\n".join(lines))


if __name__ == "__main__":
    main()
