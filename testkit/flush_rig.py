# SPDX-License-Identifier: Apache-2.0
"""A flush engine with a staging directory, a store in memory, and the events that it posts."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from blake3 import blake3
from swansongd.bucket.keys import RunKeys
from swansongd.core.events import Event, Flushed, FlushFailed, FlushProgress
from swansongd.flush.engine import FlushEngine
from swansongd.flush.known import KnownChunks
from swansongd.flush.layout import Layout
from swansongd.model import CheckpointId, CheckpointKind, Staged
from swansongd.staging import scan

from testkit.committed import stored_bytes
from testkit.memory_store import MemoryStore
from testkit.staged import ME, write_files

CHUNK = 1000
SET = "step-000000000005.abc"


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


def keys_of(done: Flushed) -> list[str]:
    """The keys of all chunks with bytes of the set."""
    return [extent.chunk.key for shard in done.shards for extent in shard.extents]


class FlushRig:
    """A flush engine, its staging directory, its store and its events.

    Args:
        small_bytes_max: largest file that shares a chunk; by default none does.
    """

    def __init__(
        self,
        tmp_path: Path,
        *,
        connections: int = 3,
        small_bytes_max: int = 0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = MemoryStore()
        self.run_directory = tmp_path / "staging" / "r"
        self.own_directory = self.run_directory / ".swansongd"
        self.own_directory.mkdir(parents=True)
        self._layout = Layout(CHUNK, connections, small_bytes_max)
        self._monotonic = monotonic
        self._nonces = count(1)
        self.start_daemon()

    def start_daemon(self) -> None:
        """Start the engine of a restarted daemon: it has only the files of the earlier one."""
        self.events: queue.Queue[Event] = queue.Queue()
        keys = RunKeys("r")
        self.known = KnownChunks(
            self.own_directory, run="r", store_url=self.store.url, is_data=keys.is_data
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

    def outcome(self) -> Flushed | FlushFailed:
        """The next event that ends a flush."""
        while True:
            event = self.events.get(timeout=20)
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

    def expect_whole(self, staged: Staged, done: Flushed) -> None:
        assert [shard.path for shard in done.shards] == [file.path for file in staged.files]
        for shard in done.shards:
            content = (self.run_directory / staged.directory / shard.path).read_bytes()
            assert stored_bytes(self.store, shard) == content
            assert shard.size_bytes == len(content)
            for chunk in {extent.chunk for extent in shard.extents}:
                assert blake3(self.store.objects[chunk.key]).digest() == chunk.digest
        assert not self.store.overwritten

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
