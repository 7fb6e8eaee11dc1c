# SPDX-License-Identifier: Apache-2.0
"""Rehearsal of a checkpoint: claim, upload, commit, list, restore and clean up in the daemon's store.

The rehearsal uses a separate run, ``<run>/probes/doctor-<hex>``, the requests of the daemon and the code of
``swansong restore``.  It finds a store that refuses requests, alters data or hides keys before a checkpoint
depends on that store.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from swansong import layout
from swansong_bucket.errors import CorruptError, Permanent, StagingError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CheckpointKind, Chunk, Extent, StoredShard
from swansong_bucket.runs import catalog, commit
from swansong_bucket.stores.base import Body, ObjectStore
from swansong_bucket.stores.wrappers.retry import Retrying
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import restore
from swansong_bucket.transfer.target import RestoreTarget

_FILES = {
    layout.rank_manifest_name(0): 4096,
    f"{layout.rank_directory(0)}/shard.bin": 2 * 2**20,
}
"""Sizes of the files of the set."""
SET_BYTES = sum(_FILES.values())
_BUDGET_S = 3.0
"""Time in which one call is retried: enough for a lost connection, and short for a waiting operator."""
_CONNECTIONS = 2
_STEP = 1


@dataclass(frozen=True, slots=True)
class CleanUp:
    """Result of the clean-up: objects found, and objects that could not be deleted."""

    objects: int
    left: int
    left_bytes: int


def retried_briefly(store: ObjectStore) -> Retrying:
    """A store whose calls are retried for a few seconds."""
    return Retrying(store, budget_s=_BUDGET_S, stop=threading.Event())


class Rehearsal:
    """The steps of the rehearsal, to be called in this order.  Each step raises the error of the store.

    Args:
        store: the daemon's store.
        run: name of the configured run.
    """

    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store = store
        self.keys = RunKeys(f"{RunKeys(run).probes}doctor-{secrets.token_hex(4)}")
        self._claim: commit.Claim | None = None
        self._files = {path: os.urandom(size_bytes) for path, size_bytes in _FILES.items()}
        self._shards: tuple[StoredShard, ...] = ()
        self._nonce = secrets.token_hex(4)

    def claim(self) -> bool:
        """Claim a generation; returns False if the store ignores create-if-absent."""
        self._claim = commit.claim_generation(
            self._store, self.keys, identity={"program": "swansong doctor"}, start_id=self._nonce
        )
        return self._claim.honours_if_absent

    def send(self) -> None:
        """Create a chunk for each file of the set, as a flush does."""
        self._shards = tuple(self._stored(path, data) for path, data in self._files.items())

    def _stored(self, path: str, data: bytes) -> StoredShard:
        assert self._claim is not None
        key = self.keys.chunk(self._claim.generation, blake3(data).digest(), self._nonce)
        self._store.create(key, Body(data))
        whole = Extent.whole(Chunk(key, len(data)))
        return StoredShard(path=path, size_bytes=len(data), extents=(whole,))

    def commit(self) -> None:
        """Commit the set, and read the manifest back."""
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
        with _scratch() as directory:
            copy = Path(os.path.realpath(directory), "restored")
            restored = restore(
                self._store,
                self.keys,
                RestoreTarget(copy),
                options=ReadOptions(connections=_CONNECTIONS),
            )
            for path, data in self._files.items():
                if (copy / path).read_bytes() != data:
                    raise CorruptError(
                        f"reading {path} back failed: the bytes differ from those that were sent"
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


def _scratch() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="swansong-doctor-", ignore_cleanup_errors=True)
    except OSError as error:
        raise StagingError(
            f"creating a temporary directory failed: {error.strerror}",
            hint="Set TMPDIR to a directory with 5 MB free that the daemon's user may write to",
        ) from error
