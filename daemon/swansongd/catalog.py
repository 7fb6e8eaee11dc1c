# SPDX-License-Identifier: Apache-2.0
"""What lies in the bucket: the commits and generations of a run, as the listing shows them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from swansongd.core.cadence import History
from swansongd.errors import CorruptError, NotFound
from swansongd.keys import RunKeys
from swansongd.manifest import Manifest, decode
from swansongd.model import CheckpointKind, CommitRef, Verdict
from swansongd.stores.base import ObjectStore

HISTORY_MAX = 8
"""So many earlier generations are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The manifests of one (generation, step); a checkpoint once all its nodes have committed."""

    ref: CommitRef
    nodes: int
    manifest_keys: Mapping[int, str]
    """By node."""

    @property
    def is_complete(self) -> bool:
        return self.manifest_keys.keys() == set(range(self.nodes))


def list_commits(store: ObjectStore, keys: RunKeys) -> list[Commit]:
    """All commits of the run, complete or not, newest first by (generation, step).

    Raises:
        StoreError: the listing failed.
    """
    found: defaultdict[tuple[CommitRef, int], dict[int, str]] = defaultdict(dict)
    for info in store.list(keys.commits):
        commit_key = keys.parse_commit(info.key)
        if commit_key is not None:
            found[commit_key.ref, commit_key.nodes][commit_key.node] = info.key
    return [
        Commit(ref=ref, nodes=nodes, manifest_keys=manifest_keys)
        for (ref, nodes), manifest_keys in sorted(found.items(), reverse=True)
    ]


def load(store: ObjectStore, keys: RunKeys, commit: Commit) -> tuple[Manifest, ...]:
    """The manifests of the commit that are there, by node.

    Raises:
        CorruptError: one is damaged, gone, or says something else than its key.
        StoreError: the store could not be asked.
    """
    return tuple(
        _load(store, keys, commit, node, key) for node, key in sorted(commit.manifest_keys.items())
    )


def _load(store: ObjectStore, keys: RunKeys, commit: Commit, node: int, key: str) -> Manifest:
    try:
        manifest = decode(store.get(key))
    except NotFound:
        raise CorruptError(f"the manifest of node {node} is gone") from None
    said = (manifest.run, manifest.ref, manifest.node, manifest.nodes)
    if said != (keys.run, commit.ref, node, commit.nodes):
        raise CorruptError(
            f"the manifest of node {node} is that of run {manifest.run!r:.100} {manifest.ref} "
            f"node {manifest.node} of {manifest.nodes}"
        )
    return manifest


def newest_generation(store: ObjectStore, keys: RunKeys) -> int:
    """The highest generation that anybody has claimed; 0 when none.

    Raises:
        StoreError: the listing failed.
    """
    claimed = (keys.parse_generation(info.key) for info in store.list(keys.generations))
    return max((generation for generation in claimed if generation is not None), default=0)


def history(store: ObjectStore, keys: RunKeys, generation: int) -> History:
    """How long the run's earlier VMs lived, and how many went without a SAFE farewell.

    Wall clocks are compared here: what comes of it is an estimate, and orders nothing.

    Args:
        generation: our own; the newest ones before it are looked at.

    Raises:
        StoreError: the store could not be read.
    """
    claimed = (keys.parse_generation(info.key) for info in store.list(keys.generations))
    earlier = sorted(g for g in claimed if g is not None and g < generation)[-HISTORY_MAX:]
    if not earlier:
        return History()
    newest: dict[int, Commit] = {}
    for commit in list_commits(store, keys):
        newest.setdefault(commit.ref.generation, commit)
    farewells = [info.key for info in store.list(keys.farewells)]
    next_boot = _identity(store, keys, generation).get("boot_id")
    observed_s, uncovered = 0.0, 0
    for number in reversed(earlier):
        identity = _identity(store, keys, number)
        words = [
            _object(store, key) for key in farewells if key.startswith(keys.farewell_prefix(number))
        ]
        last, kind = _last_commit(store, keys, newest.get(number))
        ends = [_instant_s(last), *(_instant_s(word.get("written")) for word in words)]
        begun_s = _instant_s(identity.get("claimed"))
        ended_s = max((end for end in ends if end is not None), default=None)
        if begun_s is not None and ended_s is not None:
            observed_s += max(0.0, ended_s - begun_s)
        is_covered = any(word.get("verdict") == Verdict.SAFE for word in words)
        # The same boot twice is a rollback, or a daemon that has lost its claim; a final commit, the end.
        is_same_vm = next_boot is not None and identity.get("boot_id") == next_boot
        if not (is_covered or is_same_vm or kind is CheckpointKind.FINAL):
            uncovered += 1
        next_boot = identity.get("boot_id")
    return History(observed_s, uncovered)


def _identity(store: ObjectStore, keys: RunKeys, generation: int) -> dict[str, Any]:
    identity = _object(store, keys.generation(generation)).get("identity")
    return identity if isinstance(identity, dict) else {}


def _object(store: ObjectStore, key: str) -> dict[str, Any]:
    """A small JSON object, for people; empty when it is gone or makes no sense."""
    try:
        body = json.loads(store.get(key))
    except (NotFound, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _last_commit(
    store: ObjectStore, keys: RunKeys, commit: Commit | None
) -> tuple[str, CheckpointKind | None]:
    try:
        manifests = load(store, keys, commit) if commit is not None else ()
    except CorruptError:
        manifests = ()
    return (manifests[0].created, manifests[0].kind) if manifests else ("", None)


def _instant_s(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
