# SPDX-License-Identifier: Apache-2.0
"""Measures a restore whose trainer loads files while others arrive: ``python -m bench.load_early``.

A real ``swansongd`` and a real trainer restore 1 GB of weights and moments in 8 shards from a paced store.
Each sample has a new VM with an empty disk.  The prefetch is off, so the download begins with the query.
The trainer either takes files early, or loads all of them from the finished directory.

The memory is the peak of the trainer's resident set (``VmHWM``) during the restore, above that of the process
before it made the model.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.transfer.results import median_and_spread
from testkit.emulators.process import EmulatorProcess
from testkit.rig import Vm

TRAINER = str(Path(__file__).with_name("load_early_trainer.py"))
WAYS = {"early": "while files arrive", "late": "from the finished directory"}
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One restore."""

    seconds: float
    """From the query to the restored state."""
    after_s: float
    """The part after the answer of the daemon, which has all files then."""
    cpu_s: float
    """CPU time of the trainer, with the load."""
    after_cpu_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The checkpoint in the store."""

    size_bytes: int
    shard_sizes: tuple[int, ...]
    total: float
    """Sum of all tensors."""


def arguments(way: str, layers: int, width: int) -> list[str]:
    return ["--way", way, "--layers", str(layers), "--width", str(width)]


def commit(scratch: Path, store: dict[str, str], layers: int, width: int) -> Commit:
    """Save and commit the state on a VM of its own."""
    with _vm(scratch, store) as vm:
        daemon = vm.start_daemon()
        trainer = vm.start_trainer(*arguments("save", layers, width), script=TRAINER)
        saved = trainer.lines.wait(event="saved", timeout_s=_LIMIT_S)
        daemon.lines.wait(event="committed", timeout_s=_LIMIT_S)
        assert trainer.wait() == 0
        files = [path.stat().st_size for path in vm.run_directory.rglob("*.safetensors")]
        shards = [size_bytes for size_bytes in files if size_bytes >= 2**20]
    return Commit(sum(shards), tuple(shards), saved["total"])


def sample(
    scratch: Path, store: dict[str, str], way: str, commit: Commit, size: list[int]
) -> Sample:
    """One restore on a new VM."""
    with _vm(scratch, store) as vm:
        vm.start_daemon()
        trainer = vm.start_trainer(*arguments(way, *size), script=TRAINER)
        restored = trainer.lines.wait(event="restored", timeout_s=_LIMIT_S)
        assert trainer.wait() == 0
        assert restored["step"] == 1
        assert restored["total"] == commit.total, "the restored state differs"
    return Sample(
        restored["seconds"],
        restored["after_s"],
        restored["cpu_s"],
        restored["after_cpu_s"],
        restored["peak_bytes"],
    )


@contextmanager
def _vm(scratch: Path, store: dict[str, str]) -> Iterator[Vm]:
    settings = {"restore": {"prefetch": False}}
    with (
        tempfile.TemporaryDirectory(dir=scratch) as directory,
        Vm(Path(directory), store, settings=settings) as vm,
    ):
        yield vm


def table(commit: Commit, bytes_per_s: float, found: dict[tuple[str, str], list[Sample]]) -> str:
    """The Markdown table of one rate."""
    gigabytes, rate = commit.size_bytes / 1e9, bytes_per_s / 1e6
    heads = (
        f"{gigabytes:.2f} GB at {rate:.0f} MB/s", "tensors are loaded",
        "seconds", "of these after the last file",
        "CPU seconds", "of these after the last file", "peak of the trainer",
    )  # fmt: skip
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for (place, way), samples in sorted(found.items()):
        cells = (
            f"staging on {place}",
            WAYS[way],
            median_and_spread([each.seconds for each in samples], ".2f"),
            median_and_spread([each.after_s for each in samples], ".2f"),
            median_and_spread([each.cpu_s for each in samples], ".2f"),
            median_and_spread([each.after_cpu_s for each in samples], ".2f"),
            f"{_megabytes([each.peak_bytes for each in samples])} MB",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _megabytes(values: list[int]) -> str:
    low, high = min(values) / 1e6, max(values) / 1e6
    return f"{statistics.median(values) / 1e6:,.0f} ({low:,.0f}-{high:,.0f})"


def measured(
    places: dict[str, Path], bytes_per_s: float, repeats: int, size: list[int]
) -> tuple[Commit, dict[tuple[str, str], list[Sample]]]:
    """The samples of one rate, in random order within each repetition."""
    found: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    with ExitStack() as stack:
        disk = places["disk"]
        objects = stack.enter_context(tempfile.TemporaryDirectory(dir=disk))
        rates = ["--total-bytes-s", str(bytes_per_s), "--directory", objects]
        server = stack.enter_context(EmulatorProcess("bench.preemption.store", *rates))
        store = {"url": "s3://ckpt/bench", "endpoint": server.url, "region": "us-east-1"}
        saved = commit(disk, store, *size)
        cases = [(place, way) for place in places for way in WAYS]
        for repeat in range(repeats):
            for place, way in random.sample(cases, len(cases)):
                one = sample(places[place], store, way, saved, size)
                found[place, way].append(one)
                print(f"{repeat + 1} of {repeats}: {place}, {way}: {one}", file=sys.stderr)
    return saved, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="16 MB, once: a test of the benchmark")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="directory on a disk")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="directory on tmpfs")
    options = parser.parse_args()
    size = [20, 2048]
    if options.quick:
        size, options.repeats = [20, 256], 1
    with ExitStack() as stack:
        places = {
            name: Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path)))
            for name, path in (("disk", options.disk), ("tmpfs", options.tmpfs))
        }
        for bytes_per_s in (100e6, 300e6):
            saved, found = measured(places, bytes_per_s, options.repeats, size)
            print(table(saved, bytes_per_s, found), end="\n\n")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"State: {saved.size_bytes / 1e6:,.0f} MB in {len(saved.shard_sizes)} shards, the largest of "
        f"{max(saved.shard_sizes) / 1e6:,.0f} MB; load (1, 5, 15 minutes) of {os.cpu_count()} cores: {load}."
    )


if __name__ == "__main__":
    main()
