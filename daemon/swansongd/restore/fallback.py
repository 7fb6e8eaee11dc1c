# SPDX-License-Identifier: Apache-2.0
"""Reads from the mirror what the store has lost or damaged: a manifest, or the objects of some shards.

The listing of the store alone decides which commits exist, so a deleted commit stays deleted.  Bytes from the
mirror are compared with the same digests.  A mirror that cannot be read changes nothing: the commit is
damaged, as without a mirror.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import structlog

from swansongd.bucket import catalog
from swansongd.bucket.catalog import Commit
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import Manifest
from swansongd.errors import CorruptError, StoreError
from swansongd.model import StoredShard
from swansongd.restore.journal import Noted
from swansongd.restore.reader import OpenLocal, Problems, Reader, ReadOptions
from swansongd.restore.target import RestoreTarget
from swansongd.stores.base import ObjectStore

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Fallback:
    """The mirror, for one restore.

    Args:
        mirror: None: there is no mirror, and each defect is final.
        keys: of the run.
        options: of the restore.
    """

    def __init__(self, mirror: ObjectStore | None, keys: RunKeys, options: ReadOptions) -> None:
        self._mirror = mirror
        self._keys = keys
        self._options = options
        self.used: list[str] = []
        """The manifests and shards that came from the mirror."""

    def manifests(self, commit: Commit, error: CorruptError) -> tuple[Manifest, ...]:
        """The manifests of a complete commit that cannot be read from the store.

        Raises:
            CorruptError: ``error``, the defect in the store: the mirror has no intact copy.
        """

        def load(mirror: ObjectStore) -> tuple[Manifest, ...]:
            return catalog.load(mirror, self._keys, commit)

        loaded = self._attempt(f"the manifests of {commit.ref}", load)
        if loaded is None or not commit.is_complete:
            raise error
        self._note(f"manifest of {commit.ref}", error.line())
        return loaded

    def absent(self, problems: Problems) -> frozenset[StoredShard]:
        """Shards whose objects the store lacks and the mirror has; all of ``problems`` or none."""

        def compare(mirror: ObjectStore) -> Problems:
            return Reader(mirror, self._options).check_sizes(list(problems))

        if not problems or self._attempt("the sizes of its objects", compare) != {}:
            return frozenset()
        return frozenset(problems)

    def read(
        self,
        shards: Mapping[int, StoredShard],
        target: RestoreTarget,
        problems: Problems,
        *,
        noted: Noted,
        local: Mapping[int, OpenLocal],
    ) -> Problems:
        """Read shards from the mirror; returns the defects that remain.

        Args:
            problems: the defects of these shards in the store.
        """

        def fetch(mirror: ObjectStore) -> Problems:
            reader = Reader(mirror, self._options)
            return reader.read(shards, target=target, noted=noted, local=local).problems

        if not shards:
            return problems
        left = self._attempt("the shards of a commit", fetch)
        if left is None:
            return problems or dict.fromkeys(shards.values(), "is missing from the store")
        for shard in shards.values():
            if shard not in left:
                self._note(shard.path, problems.get(shard, ""))
        return {shard: problems.get(shard, why) for shard, why in left.items()}

    def _attempt(self, what: str, request: Callable[[ObjectStore], T]) -> T | None:
        """The result of a request to the mirror; None without a mirror, or if the request fails."""
        if self._mirror is None:
            return None
        try:
            return request(self._mirror)
        except (CorruptError, StoreError) as error:
            _log.warning("mirror_fallback_failed", what=what, reason=error.line())
            return None

    def _note(self, what: str, reason: str) -> None:
        self.used.append(what)
        _log.warning("read_from_mirror", what=what, reason=reason)
