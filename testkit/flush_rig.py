# SPDX-License-Identifier: Apache-2.0
"""A flush engine with a staging directory, a store in memory, and the events that it posts."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import ClassVar

from blake3 import blake3
from swansong_bucket.errors import Transient
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CheckpointId, CheckpointKind, CommitRef, Staged
from swansongd.core.events import Event, Flushed, FlushFailed, FlushProgress
from swansongd.flush.cutting import ChunkLayout
from swansongd.flush.engine import FlushEngine
from swansongd.flush.known import KnownChunks
from swansongd.staging import scan

from testkit.committed import stored_bytes
from testkit.memory_store import MemoryStore
from testkit.staged import ME, write_files
from testkit.waiting import until

CHUNK = 1000
SET = "step-000000000005.abc"


def noise(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def staged_set(
    run_directory: Path,
    files: dict[str, bytes],
    markers: tuple[str, ...] = (),
    *,
    step: int = 5,
    directory: str = SET,
) -> Staged:
    """Write these files, and return the set as the scan finds it."""
    write_files(run_directory / directory, files)
    return found_set(run_directory, markers, step=step, directory=directory)


def found_set(
    run_directory: Path, markers: tuple[str, ...] = (), *, step: int = 5, directory: str = SET
) -> Staged:
    """The set with the files that are in its directory."""
    return Staged(
        id=CheckpointId(step, "abc"),
        directory=directory,
        kind=CheckpointKind.PERIODIC,
        files=scan.listing(run_directory, directory, ME),
        markers=frozenset(markers),
    )


def is_named(key: str, data: bytes) -> bool:
    """Whether this is a key of a chunk with these bytes."""
    return f"/{blake3(data).hexdigest()}-" in key


def keys_of(done: Flushed) -> list[str]:
    """The keys of all chunks with bytes of the set."""
    return [extent.chunk.key for shard in done.shards for extent in shard.extents]


class FlushRig:
    """A flush engine, its staging directory, its store and its events.

    Args:
        small_bytes_max: largest file that shares a chunk, up to a quarter of a chunk; by default none does.
        monotonic: the clock of the concurrency limit.

    Attributes:
        later_s: how far the clocks of the VM and of the store are ahead.
        engines: those of all rigs.
    """

    engines: ClassVar[weakref.WeakSet[FlushEngine]] = weakref.WeakSet()

    def __init__(
        self,
        tmp_path: Path,
        *,
        connections: int = 3,
        small_bytes_max: int = 0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = MemoryStore()
        self.store.clock = lambda: time.time() + self.later_s
        self.later_s = 0.0
        self.run_directory = tmp_path / "staging" / "r"
        self.own_directory = self.run_directory / ".swansongd"
        self.own_directory.mkdir(parents=True)
        self._layout = ChunkLayout(CHUNK, connections, small_bytes_max)
        self._monotonic = monotonic
        self._nonces = count(1)
        self.start_daemon()

    def start_daemon(self) -> None:
        """Start the engine of a restarted daemon: it has only the files of the earlier one."""
        self.events: queue.Queue[Event] = queue.Queue()
        keys = RunKeys("r")
        self.known = KnownChunks(
            self.own_directory,
            run="r",
            store_url=self.store.url,
            is_data=keys.is_data,
            boottime=lambda: time.monotonic() + self.later_s,
        )
        self.engine = FlushEngine(
            self.store,
            keys,
            self.run_directory,
            self.events.put,
            known=self.known,
            layout=self._layout,
            nonce=lambda: f"n{next(self._nonces)}",
            monotonic=self._monotonic,
        )
        self.engines.add(self.engine)

    def outcome(self) -> Flushed | FlushFailed:
        """The next event that ends a flush."""
        while True:
            event = self.events.get(timeout=60)
            if isinstance(event, Flushed | FlushFailed):
                return event
            assert isinstance(event, FlushProgress)

    def flushed(self, staged: Staged, *, generation: int = 1) -> Flushed:
        """Flush the set, and check that the store has every byte of it."""
        self.engine.start(f"{staged.id}.{next(self._nonces)}", staged, generation)
        done = self.outcome()
        assert isinstance(done, Flushed), done
        self.expect_whole(staged, done)
        return done

    def saved(self, files: dict[str, bytes], step: int) -> Flushed:
        """Write, flush and commit a set."""
        staged = staged_set(self.run_directory, files, step=step, directory=f"s-{step}.abc")
        done = self.flushed(staged)
        self.known.committed(done.shards, CommitRef(1, step))
        return done

    def started(self, staged: Staged, *, flush_id: str = "f", is_sealed: bool = True) -> None:
        self.engine.start(flush_id, staged, 1, is_sealed=is_sealed)

    def failure(self, staged: Staged) -> FlushFailed:
        """Flush the set, which must fail."""
        self.started(staged)
        failed = self.outcome()
        assert isinstance(failed, FlushFailed), failed
        return failed

    def hold(self, first: int = 1, *, fails: bool = False) -> threading.Event:
        """Hold this create and all later ones until the event is set; then they may fail."""
        held, numbers = threading.Event(), count(1)

        def before(what: str, key: str) -> None:
            if what == "create" and next(numbers) >= first:
                assert held.wait(60)
                if fails:
                    raise Transient("let go")

        self.store.before = before
        return held

    def wait_for_creates(self, number: int) -> None:
        until(lambda: self.store.count("create") >= number, what=f"{number} creates")

    def wait_until_idle(self) -> None:
        workers = self._layout.connections
        until(lambda: self.engine._idle == workers, what="all workers to be idle")

    def expect_named_bytes(self) -> None:
        """Every object has the bytes of its name."""
        assert all(is_named(key, data) for key, data in self.store.objects.items())

    def expect_whole(self, staged: Staged, done: Flushed) -> None:
        assert [shard.path for shard in done.shards] == [file.path for file in staged.files]
        for shard in done.shards:
            content = (self.run_directory / staged.directory / shard.path).read_bytes()
            assert stored_bytes(self.store, shard) == content
            assert shard.size_bytes == len(content)
            for chunk in {extent.chunk for extent in shard.extents}:
                assert is_named(chunk.key, self.store.objects[chunk.key])
                assert len(self.store.objects[chunk.key]) == chunk.size_bytes

    def open_files(self) -> list[str]:
        names = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        own = str(self.own_directory)
        mine = str(self.run_directory)
        return [name for name in names if name.startswith(mine) and not name.startswith(own)]
