# SPDX-License-Identifier: Apache-2.0
"""Swansong as in the daemon: the flush engine from a staged set to ``Flushed``, or a whole restore.

Digests and checksums are on, and the store has the daemon's wrappers.  Part size and connections are the
defaults of the configuration.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from job import Job, run
from swansong_bucket.config.sections import StoreConfig
from swansong_bucket.errors import StoreError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CheckpointId, CheckpointKind, Staged, StagedFile
from swansong_bucket.stores.opening import open_store
from swansong_bucket.stores.wrappers.retry import Retrying
from swansong_bucket.stores.wrappers.throttle import Throttled
from swansong_bucket.transfer.restore import restore
from swansong_bucket.transfer.target import RestoreTarget
from swansongd.config.config import FlushConfig
from swansongd.core.events import Event, Flushed, FlushFailed
from swansongd.flush.cutting import ChunkLayout
from swansongd.flush.engine import FlushEngine
from swansongd.flush.known import KnownChunks


def staged_set(job: Job, number: int) -> Staged:
    """The directory of the job as a scan reports it."""
    files = []
    for name, size_bytes in job.files:
        facts = os.stat(job.directory / name)
        files.append(
            StagedFile(
                path=name, size_bytes=size_bytes, mtime_ns=facts.st_mtime_ns, inode=facts.st_ino
            )
        )
    return Staged(
        id=CheckpointId(number, "bench"),
        directory=job.directory.name,
        kind=CheckpointKind.PERIODIC,
        files=tuple(sorted(files, key=lambda file: file.path)),
    )


def prepare(job: Job) -> Callable[[], object]:
    flush = FlushConfig()
    scheme = "gs" if "gcs" in job.options else "s3"
    connections = job.option("connections", flush.connections)
    store = open_store(
        StoreConfig(
            url=f"{scheme}://{job.bucket}",
            endpoint=job.endpoint,
            region="us-east-1",
            ca_bundle=Path(job.ca),
        ),
        connections=connections + 4,
    )
    with suppress(StoreError):  # a late answer; the daemon tries again later
        store.warm()
    give_up_mono_s = time.monotonic() + 3600
    limit_bytes_s = job.option("limit_bytes_s", 0) or None
    throttled = Throttled(store, lambda: limit_bytes_s)
    retrying = Retrying(throttled, give_up_mono_s=lambda: give_up_mono_s, stop=threading.Event())
    keys = RunKeys(job.prefix)

    def download() -> None:
        restore(retrying, keys, RestoreTarget(job.directory / "restored"))

    events: SimpleQueue[Event] = SimpleQueue()
    own = tempfile.mkdtemp(dir=job.directory.parent)
    engine = FlushEngine(
        retrying,
        keys,
        job.directory.parent,
        events.put,
        known=KnownChunks(Path(own), run=job.prefix, store_url=store.url, is_data=keys.is_data),
        layout=ChunkLayout(flush.chunk_bytes, connections),
    )

    def flush_set(number: int) -> None:
        engine.start(str(number), staged_set(job, number), 1)
        while not isinstance(event := events.get(), Flushed):
            if isinstance(event, FlushFailed):
                raise SystemExit(f"the flush failed: {event}")

    def upload() -> None:
        flush_set(0)
        for number in itertools.count(1) if "endless" in job.options else ():
            flush_set(number)

    return upload if job.operation == "upload" else download


if __name__ == "__main__":
    run(prepare)
