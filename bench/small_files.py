# SPDX-License-Identifier: Apache-2.0
"""Measures flush, commit, verify and restore of a checkpoint with many small files: ``make bench-small``.

The stores are a directory, the strict S3 emulator, and a store in memory that answers after 10 ms.
``bare get`` and ``bare put`` are the rates of the same client without flush and restore.  If the flush
reaches nearly the same rate, the store is the limit.
"""

from __future__ import annotations

import argparse
import os
import queue
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CheckpointId, CheckpointKind, Staged
from swansong_bucket.runs import commit
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.stores.options import S3Options
from swansong_bucket.stores.s3.store import S3Store
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import restore
from swansong_bucket.transfer.target import RestoreTarget
from swansong_bucket.util.threads import parallel
from swansong_tools.upkeep.verify import verify
from swansongd.core.events import Event, Flushed, FlushFailed
from swansongd.flush.engine import FlushEngine
from swansongd.flush.known import KnownChunks
from swansongd.flush.layout import ChunkLayout
from swansongd.staging import scan

from testkit import memory_store as memory
from testkit.emulators.process import EmulatorProcess
from testkit.memory_store import MemoryStore
from testkit.staged import ME
from testkit.strict_bucket import ACCOUNT

CONNECTIONS = 32
ANSWER_S = 0.01
STORES = ["file", "s3", "slow"]
PER_DIRECTORY = 100
SET = "step-000000000001.abc"


def stage(run: Path, files: int, size_bytes: int) -> Staged:
    """A sealed set of ``files`` different files."""
    for number in range(files):
        path = run / SET / f"d{number // PER_DIRECTORY:04d}" / f"{number:06d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(8, "big") * (size_bytes // 8))
    return Staged(
        id=CheckpointId(1, "abc"),
        directory=SET,
        kind=CheckpointKind.PERIODIC,
        files=scan.listing(run, SET, ME),
        markers=frozenset(),
    )


def flush(store: ObjectStore, run: Path, staged: Staged) -> Flushed:
    events: queue.Queue[Event] = queue.Queue()
    (run / ".swansongd").mkdir(mode=0o700)
    keys = RunKeys("r")
    engine = FlushEngine(
        store,
        keys,
        run,
        events.put,
        known=KnownChunks(run / ".swansongd", run="r", store_url=store.url, is_data=keys.is_data),
        layout=ChunkLayout(16 * 2**20, CONNECTIONS),
    )
    engine.start("flush", staged, 1)
    while not isinstance(event := events.get(), Flushed | FlushFailed):
        pass
    assert isinstance(event, Flushed), event
    return event


def manifest_of(flushed: Flushed) -> Manifest:
    return Manifest(
        run="r",
        generation=1,
        step=1,
        kind=CheckpointKind.PERIODIC,
        node=0,
        nodes=1,
        nonce="n",
        shards=flushed.shards,
        created="2030-01-01T00:00:00Z",
    )


def timed(name: str, work: Callable[[], object], files: int) -> None:
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    work()
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    print(f"| {name} | {took_s:.2f} | {cpu_s:.2f} | {files / took_s:.0f} |", flush=True)


def measure(name: str, store: ObjectStore, files: int, size_bytes: int, place: Path) -> None:
    keys = RunKeys("r")
    run, to = place / "staging", place / "restored"
    run.mkdir()
    staged = stage(run, files, size_bytes)
    flushed: list[Flushed] = []
    timed(f"{name} flush", lambda: flushed.append(flush(store, run, staged)), files)
    made = manifest_of(flushed[0])
    claim = commit.claim_generation(store, keys, identity={}, start_id="s").content
    timed(f"{name} commit", lambda: commit.commit(store, keys, made, claim, reads_back=True), files)
    timed(
        f"{name} verify",
        lambda: verify(store, keys, options=ReadOptions(connections=CONNECTIONS)),
        files,
    )
    timed(
        f"{name} restore",
        lambda: restore(
            store, keys, RestoreTarget(to), options=ReadOptions(connections=CONNECTIONS)
        ),
        files,
    )
    assert sum(path.is_file() for path in to.rglob("*")) == files
    some = [chunk.key for chunk in made.chunks[:2000]]
    timed(f"{name} bare get", lambda: bare(some, store.get), len(some))
    data = bytes(size_bytes)
    timed(f"{name} bare put", lambda: bare(some, lambda key: store.put(f"bare/{key}", data)), 2000)


def bare(keys: list[str], request: Callable[[str], object]) -> None:
    parallel(keys, request, threads=CONNECTIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--size-bytes", type=int, default=4096)
    parser.add_argument("--stores", nargs="+", default=STORES, choices=STORES)
    parser.add_argument("--data", type=Path, help="directory for the files; default: TMPDIR")
    options = parser.parse_args()
    os.environ.update(ACCOUNT)
    memory.PAGE_KEYS, memory.WINDOW_BYTES = 1000, 2**20
    print("| operation | seconds | CPU seconds | files per second |\n| --- | --- | --- | --- |")
    for name in options.stores:
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.data)))
            store: ObjectStore
            if name == "file":
                (place / "bucket").mkdir()
                store = FileStore(f"file://{place}/bucket")
            elif name == "s3":
                server = EmulatorProcess(
                    "testkit.emulators.s3_strict", "--port", "0", "--bucket", "ckpt"
                )
                url = stack.enter_context(server).url
                store = S3Store(
                    "s3://ckpt/p",
                    S3Options(endpoint=url, region="us-east-1", connections=CONNECTIONS),
                )
            else:
                store = MemoryStore()
                store.before = lambda _what, _key: time.sleep(ANSWER_S)
            measure(name, store, options.files, options.size_bytes, place)


if __name__ == "__main__":
    main()
