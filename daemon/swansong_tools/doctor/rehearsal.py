# SPDX-License-Identifier: Apache-2.0
"""Rehearsal of a checkpoint: claim, flush, commit, list, restore and clean up in the daemon's store.

The rehearsal uses a separate run, ``<run>/probes/doctor-<hex>``, and the code of the daemon and of
``swansong restore``.  It finds a store that refuses requests, alters data or hides keys before a checkpoint
depends on that store.
"""

from __future__ import annotations

import filecmp
import os
import queue
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from swansong import layout
from swansong_bucket.errors import CorruptError, Permanent, StagingError, StoreError, Transient
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CheckpointId, CheckpointKind, Staged, StoredShard
from swansong_bucket.runs import catalog, commit
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.wrappers.retry import Retrying
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import restore
from swansong_bucket.transfer.target import RestoreTarget
from swansongd.core.events import Event, Flushed, FlushFailed
from swansongd.flush.engine import FlushEngine
from swansongd.flush.known import KnownChunks
from swansongd.flush.layout import ChunkLayout
from swansongd.staging import scan

_FILES = {
    layout.rank_manifest_name(0): 4096,
    f"{layout.rank_directory(0)}/shard.bin": 2 * 2**20,
}
"""Sizes of the files of the set: more than two windows together."""
SET_BYTES = sum(_FILES.values())
FLUSH_S = 45.0
"""Time limit of the flush: 2 MiB over a link of 500 kbit/s."""
_BUDGET_S = 3.0
"""Time in which one call is retried: enough for a lost connection, and short for a waiting operator."""
_CONNECTIONS = 2
_STEP = 1
_SET = layout.sealed_name(_STEP, "doctor")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CleanUp:
    """Result of the clean-up: objects found, and objects that could not be deleted."""

    objects: int
    left: int
    left_bytes: int


class RetryingBriefly(Retrying):
    """A store whose calls are retried for a few seconds.

    ``failure`` is the last error, because a flush reports its failure as text only.
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store, budget_s=_BUDGET_S, stop=threading.Event())
        self.failure: StoreError | None = None

    def _try(self, call: str, attempt: Callable[[], T]) -> T:
        try:
            return super()._try(call, attempt)
        except StoreError as error:
            self.failure = error
            raise


class Rehearsal:
    """The steps of the rehearsal, to be called in this order.  Each step raises the error of the store.

    Args:
        store: the daemon's store.
        run: name of the configured run.
    """

    def __init__(self, store: RetryingBriefly, run: str) -> None:
        self._store = store
        self.keys = RunKeys(f"{RunKeys(run).probes}doctor-{secrets.token_hex(4)}")
        self._claim: commit.Claim | None = None
        self._shards: tuple[StoredShard, ...] = ()
        self._nonce = secrets.token_hex(4)
        self._scratch: Path | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def claim(self) -> bool:
        """Claim a generation; returns False if the store ignores create-if-absent."""
        self._claim = commit.claim_generation(
            self._store, self.keys, identity={"program": "swansong doctor"}, start_id=self._nonce
        )
        return self._claim.honours_if_absent

    def send(self) -> None:
        """Flush the set."""
        for path, size_bytes in _FILES.items():
            self._write(path, size_bytes)
        self._shards = self._flushed()

    def commit(self) -> None:
        """Commit the flushed set, and read the manifest back."""
        assert self._claim is not None
        manifest = Manifest(
            run=self.keys.run,
            generation=self._claim.generation,
            step=_STEP,
            kind=CheckpointKind.PERIODIC,
            node=0,
            nodes=1,
            nonce=self._nonce,
            shards=self._shards,
        )
        commit.commit(self._store, self.keys, manifest, self._claim.content, reads_back=True)

    def restore(self) -> int:
        """Find the commit as a reader does, restore it, and compare; returns the restored bytes.

        Raises:
            CorruptError: the store returned other bytes or another listing.
            NothingToRestore: a reader does not find the shards.
        """
        found = [str(each.ref) for each in catalog.list_commits(self._store, self.keys)]
        if len(found) != 1:
            raise CorruptError(
                f"listing the commits failed: {self._store.url}/{self.keys.commits} contains one commit, the "
                f"listing {len(found)}"
            )
        source, copy = self._directory() / _SET, self._directory() / "restored"
        restored = restore(
            self._store,
            self.keys,
            RestoreTarget(copy),
            options=ReadOptions(connections=_CONNECTIONS),
        )
        for shard in self._shards:
            if not filecmp.cmp(source / shard.path, copy / shard.path, shallow=False):
                raise CorruptError(
                    f"reading {shard.path} back failed: the bytes differ from those that were sent"
                )
        return restored.size_bytes

    def clean_up(self) -> CleanUp:
        """Delete the objects of the rehearsal, as far as the role allows."""
        prefix = f"{self.keys.run}/"
        left = list(self._store.list(prefix))
        stored = len(left)
        with suppress(Permanent):
            while left:
                self._store.delete(left[-1].key)
                left.pop()
        return CleanUp(stored, len(left), sum(info.size_bytes for info in left))

    def close(self) -> None:
        """Remove the temporary files on this VM."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    # ------------------------------------------------------------ the flush

    def _flushed(self) -> tuple[StoredShard, ...]:
        """Flush the set from the temporary directory."""
        assert self._claim is not None
        engine = self._new_engine()
        staged = Staged(
            id=CheckpointId(_STEP, self._nonce),
            directory=_SET,
            kind=CheckpointKind.PERIODIC,
            files=scan.listing(self._directory(), _SET),
        )
        flush_id = secrets.token_hex(4)
        self._store.failure = None
        engine.start(flush_id, staged, self._claim.generation)
        deadline_mono_s = time.monotonic() + FLUSH_S
        while (left_s := deadline_mono_s - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left_s)
            except queue.Empty:
                break
            match event:
                case Flushed() if event.flush_id == flush_id:
                    return event.shards
                case FlushFailed() if event.flush_id == flush_id:
                    failure = None if event.void else self._store.failure
                    raise failure or StagingError(event.reason)
        engine.cancel(flush_id)
        raise Transient(
            f"flushing {staged.size_bytes} bytes to {self._store.url} failed: not finished in {FLUSH_S:g} s"
        )

    def _new_engine(self) -> FlushEngine:
        own = self._directory() / scan.OWN_DIRECTORY
        own.mkdir(mode=0o700)
        return FlushEngine(
            self._store,
            self.keys,
            self._directory(),
            self._events.put,
            known=KnownChunks(
                own, run=self.keys.run, store_url=self._store.url, is_data=self.keys.is_data
            ),
            layout=ChunkLayout(SET_BYTES, _CONNECTIONS),
        )

    def _write(self, path: str, size_bytes: int) -> None:
        file = self._directory() / _SET / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(os.urandom(size_bytes))
        except OSError as error:
            raise _no_scratch(error) from error

    def _directory(self) -> Path:
        if self._scratch is None:
            try:
                self._scratch = Path(os.path.realpath(tempfile.mkdtemp(prefix="swansong-doctor-")))
            except OSError as error:
                raise _no_scratch(error) from error
        return self._scratch


def _no_scratch(error: OSError) -> StagingError:
    return StagingError(
        f"writing a temporary file failed: {error.strerror}",
        hint="Set TMPDIR to a directory with 5 MB free that the daemon's user may write to",
    )
