# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of a flush for a training loop on the same machine: ``make bench-beside``.

Two loops replace the trainer, each with one thread.  One computes small matrix products, which need the
processor; the other adds arrays larger than any cache, which need the memory.  Each loop runs without a
flush, with background flushes at two bandwidth limits, and with the unlimited flush of an evacuation.  The
order is random within every repetition.  The flush engine of the daemon sends the same set to the TLS sink
again and again.

Flush, loop and sink each run in their own session, so the scheduler shares the cores as it does between
services under systemd.  The sink also uses these cores; a real store does not.  So the measured cost is an
upper bound.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.transfer import measure, sink
from bench.transfer.__main__ import environment, job_file
from bench.transfer.cases import Workload, make_files, sink_objects
from bench.transfer.contestants import CLIENTS, OURS, interpreter
from bench.transfer.results import write_page

BUILD = Path(__file__).resolve().parents[1] / "build" / "bench"
CONDITIONS: dict[str, list[str] | None] = {
    "no flush": None,
    "background flush at 100 MB/s": ["limit_bytes_s=100000000"],
    "background flush at 400 MB/s": ["limit_bytes_s=400000000"],
    "evacuation, no limit": [],
}
LOOPS = {"processor": "bound by the processor", "memory": "bound by memory"}
WORKLOAD = Workload(name="beside", count=8, size_bytes=64 * 2**20)
FLUSH_STARTS_S = 10.0


@contextmanager
def flushing(program: Path, data: Path, options: list[str]) -> Iterator[sink.Sink]:
    """A process that flushes in a loop; its first bytes have arrived when the context is entered."""
    with sink.Sink(program, data, sink.DIRECT) as far:
        job = job_file(
            data,
            OURS,
            operation="upload",
            workload=WORKLOAD,
            directory=data / "stage" / "set",
            endpoint=far.endpoint,
        )
        command = [
            sys.executable,
            str(CLIENTS / "swansong_client.py"),
            str(job),
            "endless",
            *options,
        ]
        with open(data / "output", "w") as output:
            process = subprocess.Popen(
                command,
                env=environment(data),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            give_up_s = time.monotonic() + FLUSH_STARTS_S
            while not far.counters().bytes_in:
                if process.poll() is not None or time.monotonic() > give_up_s:
                    raise SystemExit(
                        f"the flush sent nothing:\n{(data / 'output').read_text()[-2000:]}"
                    )
                time.sleep(0.05)
            yield far
            if process.poll() is not None:
                raise SystemExit(f"the flush ended:\n{(data / 'output').read_text()[-2000:]}")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def steps_a_s(loop: str, seconds: float) -> float:
    """Steps per second of the loop, in its own process."""
    command = [str(interpreter("beside", BUILD)), str(CLIENTS / "loop.py"), loop, str(seconds)]
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=one_thread, capture_output=True, text=True, check=True, start_new_session=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-beside", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement")
    parser.add_argument("--quick", action="store_true", help="one short repetition")
    parser.add_argument(
        "--data", type=Path, default=Path("/dev/shm"), help="directory for the files"
    )
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument(
        "--write", action="store_true", help="write the table into docs/performance.md"
    )
    options = parser.parse_args()
    repeats, seconds = (1, 1.0) if options.quick else (options.repeats, options.seconds)
    BUILD.mkdir(parents=True, exist_ok=True)
    program = sink.build(BUILD)
    interpreter("beside", BUILD)
    steps: dict[tuple[str, str], list[float]] = {}
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=options.data) as place:
        data = Path(place)
        sink.certificates(data)
        sink_objects(WORKLOAD, data)  # makes the pattern
        make_files(WORKLOAD, data / "stage" / "set")
        for _ in range(repeats):
            for loop in LOOPS:
                for condition in random.sample(list(CONDITIONS), len(CONDITIONS)):
                    if not options.quick:
                        measure.wait_for_quiet(limit_s=30)
                    flush_options = CONDITIONS[condition]
                    if flush_options is None:
                        value = steps_a_s(loop, seconds)
                    else:
                        with flushing(program, data, flush_options) as far:
                            before, began = far.counters().bytes_in, time.monotonic()
                            value = steps_a_s(loop, seconds)
                            moved = far.counters().bytes_in - before
                            rates.setdefault(condition, []).append(
                                moved / (time.monotonic() - began)
                            )
                    steps.setdefault((loop, condition), []).append(value)
                    print(f"{loop}, {condition}: {value:.1f} steps/s", file=sys.stderr)
    if options.json:
        measured = {f"{loop}, {condition}": values for (loop, condition), values in steps.items()}
        options.json.write_text(json.dumps(measured, indent=1))
    print(table(steps, rates))
    if options.write:
        write_page("make bench-beside", table(steps, rates))


def table(steps: dict[tuple[str, str], list[float]], rates: dict[str, list[float]]) -> str:
    """Steps per second as a share of those without a flush in the same repetition."""
    lines = [
        "| | flush, MB/s | loop bound by the processor | loop bound by memory |",
        "| --- | --- | --- | --- |",
    ]
    for condition in CONDITIONS:
        cells = [condition]
        moved = rates.get(condition)
        cells.append(f"{statistics.median(moved) / 1e6:.0f}" if moved else "")
        for loop in LOOPS:
            alone = steps[loop, "no flush"]
            shares = [a / b for a, b in zip(steps[loop, condition], alone, strict=True)]
            cells.append(
                f"{statistics.median(shares):.0%} ({min(shares):.0%}-{max(shares):.0%})"
                if moved
                else f"{statistics.median(alone):,.1f} steps/s"
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
