# SPDX-License-Identifier: Apache-2.0
"""What lies in the bucket: the commits and generations of a run, as the listing shows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from swansongd.errors import CorruptError, NotFound
from swansongd.keys import RunKeys
from swansongd.manifest import Manifest, decode
from swansongd.model import CommitRef
from swansongd.stores.base import ObjectStore


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
