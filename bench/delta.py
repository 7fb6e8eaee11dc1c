# SPDX-License-Identifier: Apache-2.0
"""Measures the flush of one large file of which some chunks have changed: ``make bench-delta``.

The flush engine with the daemon's wrappers sends to the sink of ``make bench`` over TLS.  The file is in the
page cache.  Before each flush the newest commit has the file of before; ``first`` is the flush of a daemon
without any commit.  ``new VM``: the daemon knows that commit only from its manifest.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from swansongd.bucket.keys import RunKeys
from swansongd.config.config import FlushConfig, StoreConfig
from swansongd.core.events import Event, Flushed, FlushFailed
from swansongd.flush.engine import FlushEngine
from swansongd.flush.known import KnownChunks
from swansongd.flush.layout import ChunkLayout
from swansongd.model import CheckpointId, CheckpointKind, CommitRef, Staged
from swansongd.staging import scan
from swansongd.stores.base import ObjectStore
from swansongd.stores.opening import open_store
from swansongd.stores.wrappers.retry import Retrying
from swansongd.stores.wrappers.throttle import Throttled

from bench.transfer.sink import DIRECT, PACED, PATTERN_BYTES, Sink, build, certificates
from testkit.staged import ME

CHUNK = FlushConfig().chunk_bytes
SET = "step-000000000001.abc"
KEYS = RunKeys("r")


@dataclass(frozen=True)
class Case:
    """``period``: one chunk in this many is changed; 0 for none."""

    name: str
    period: int
    has_commit: bool = True
    is_new_vm: bool = False


CASES = [
    Case("first flush", 1, has_commit=False),
    Case("all changed", 1),
    Case("all changed, new VM", 1, is_new_vm=True),
    Case("1 in 2 changed", 2),
    Case("1 in 8 changed", 8),
    Case("1 in 8 changed, new VM", 8, is_new_vm=True),
    Case("none changed", 0),
]


class Machine:
    """A staged file, and the daemons that flush it."""

    def __init__(self, place: Path, chunks: int) -> None:
        self.run = place / "staging"
        self.chunks = chunks
        self._noise = random.Random(1).randbytes(2 * CHUNK)
        self._choose = random.Random(2)
        (self.run / SET).mkdir(parents=True)
        with (self.run / SET / "model.pt").open("wb") as file:
            for _ in range(chunks):
                file.write(self._chunk())

    def _chunk(self) -> bytes:
        """Random bytes that no other chunk has."""
        at = self._choose.randrange(CHUNK)
        return self._choose.randbytes(64) + self._noise[at : at + CHUNK - 64]

    def change(self, period: int) -> None:
        """Overwrite one chunk in ``period``."""
        with (self.run / SET / "model.pt").open("r+b") as file:
            for index in range(0, self.chunks, period) if period else ():
                file.seek(index * CHUNK)
                file.write(self._chunk())

    def staged(self, step: int) -> Staged:
        return Staged(
            id=CheckpointId(step, "abc"),
            directory=SET,
            kind=CheckpointKind.PERIODIC,
            files=scan.listing(self.run, SET, ME),
        )


class Daemon:
    """A flush engine with known chunks of its own."""

    def __init__(self, store: ObjectStore, machine: Machine, own: Path) -> None:
        own.mkdir(mode=0o700)
        self._machine = machine
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.known = KnownChunks(own, run="r", store_url=store.url, is_data=KEYS.is_data)
        self._engine = FlushEngine(
            store,
            KEYS,
            machine.run,
            self._events.put,
            known=self.known,
            layout=ChunkLayout(CHUNK, FlushConfig().connections),
        )

    def flush(self, step: int) -> Flushed:
        staged = self._machine.staged(step)
        self._engine.start(str(step), staged, 1)
        while not isinstance(event := self._events.get(), Flushed):
            if isinstance(event, FlushFailed):
                raise SystemExit(f"the flush failed: {event}")
        return event

    def commit(self, step: int, flushed: Flushed) -> None:
        self.known.committed(flushed.shards, CommitRef(1, step))


def measure(
    case: Case, store: ObjectStore, sink: Sink, machine: Machine, place: Path
) -> list[float]:
    """Seconds, CPU seconds and GB sent of one flush."""
    steps = itertools.count(1)
    daemon = Daemon(store, machine, place / "own")
    if case.has_commit:
        step = next(steps)
        flushed = daemon.flush(step)
        daemon.commit(step, flushed)
        if case.is_new_vm:
            daemon = Daemon(store, machine, place / "own-of-new-vm")
            daemon.known.seed(CommitRef(1, step), flushed.shards)
        machine.change(case.period)
    before = sink.counters().bytes_in
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    daemon.flush(next(steps))
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    return [took_s, cpu_s, (sink.counters().bytes_in - before) / 1e9]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--paced", action="store_true", help="85 MB/s per connection, 30 ms a request"
    )
    parser.add_argument("--data", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    program = Path("build/bench")
    program.mkdir(parents=True, exist_ok=True)
    built = build(program).resolve()
    os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
    results: dict[str, list[list[float]]] = {case.name: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=options.data) as name:
        data = Path(name)
        certificates(data)
        (data / "pattern").write_bytes(bytes(PATTERN_BYTES))
        machine = Machine(data, round(options.gib * 2**30 / CHUNK))
        with Sink(built, data, PACED if options.paced else DIRECT) as sink:
            backend = open_store(
                StoreConfig(
                    url="s3://bench",
                    endpoint=sink.endpoint,
                    region="us-east-1",
                    ca_bundle=data / "ca.pem",
                ),
                connections=FlushConfig().connections + 4,
            )
            backend.warm()
            store = Retrying(
                Throttled(backend, lambda: None),
                give_up_mono_s=lambda: time.monotonic() + 3600,
                stop=threading.Event(),
            )
            for repeat, case in itertools.product(range(options.repeats), CASES):
                place = data / f"{repeat}-{case.name}"
                place.mkdir()
                results[case.name].append(measure(case, store, sink, machine, place))
    print("| | GB sent | s | CPU s |\n| --- | --- | --- | --- |")
    for case_name, found in results.items():
        seconds, cpu, sent = ([run[column] for run in found] for column in range(3))
        print(
            f"| {case_name} | {statistics.median(sent):.2f} "
            f"| {statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}) "
            f"| {statistics.median(cpu):.2f} ({min(cpu):.2f}-{max(cpu):.2f}) |"
        )


if __name__ == "__main__":
    main()
