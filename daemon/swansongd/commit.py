# SPDX-License-Identifier: Apache-2.0
"""The durability point: claiming a generation, and creating manifests.

Three rules make two VMs with one run harmless to each other, whatever their clocks say.  A generation
is claimed by create-if-absent and never given back.  Every key carries the generation.  A manifest is
created and never replaced, and a refused create is settled by reading back: the same nonce means that
it was our own, a reply lost on the way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from swansongd import manifest as manifests
from swansongd.catalog import list_commits, newest_generation
from swansongd.errors import CorruptError, Exists, FencedError, NotFound, StoreError
from swansongd.keys import RunKeys
from swansongd.manifest import Manifest
from swansongd.model import CommitRef
from swansongd.stores.base import ObjectStore

_CLAIM_ATTEMPTS_MAX = 100
_LOOK_BACK = 5
"""Among so many newest claims the one of an incarnation is looked for."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A generation that is ours."""

    generation: int
    honours_if_absent: bool
    """Whether the store refused to create the claim a second time, as it must."""


def claim_generation(
    store: ObjectStore,
    keys: RunKeys,
    *,
    identity: Mapping[str, object],
    nonce: str,
    incarnation: str = "",
) -> Claim:
    """Claim the next generation of the run; whoever loses the race for a number takes a later one.

    The claim is then created once more: a store that lets that happen ignores create-if-absent.  The
    bytes are the same, so nothing is damaged by asking.

    With an ``incarnation``, VMs that name the same one share a generation: the first claims it.

    Args:
        identity: who claims: instance, boot, host name; for people.
        nonce: tells this claim from everybody else's.
        incarnation: names one start of a job over several VMs; empty for a run on one VM.

    Raises:
        FencedError: the incarnation has a generation, and another one has taken the run over since.
        StoreError: the store failed, or the race was lost too often.
    """
    generation = newest_generation(store, keys)
    for number in range(generation, max(0, generation - _LOOK_BACK), -1) if incarnation else ():
        if _claim_body(store, keys.generation(number)).get("incarnation") == incarnation:
            if number < generation:
                raise FencedError(number, generation)
            return Claim(number, honours_if_absent=True)
    for _ in range(_CLAIM_ATTEMPTS_MAX):
        generation += 1
        key = keys.generation(generation)
        body = {"version": 1, "run": keys.run, "generation": generation, "nonce": nonce}
        if incarnation:
            body["incarnation"] = incarnation
        data = json.dumps({**body, "identity": dict(identity)}, sort_keys=True).encode()
        try:
            store.put(key, data, if_absent=True)
        except Exists:
            winner = _claim_body(store, key)
            if incarnation and winner.get("incarnation") == incarnation:
                return Claim(generation, honours_if_absent=True)
            if winner.get("nonce") != nonce:
                continue
        try:
            store.put(key, data, if_absent=True)
        except Exists:
            return Claim(generation, honours_if_absent=True)
        return Claim(generation, honours_if_absent=False)
    raise StoreError(f"lost the race for {_CLAIM_ATTEMPTS_MAX} generations of run {keys.run}")


def _claim_body(store: ObjectStore, key: str) -> Mapping[str, object]:
    try:
        body = json.loads(store.get(key))
    except (NotFound, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def newest_whole_commit(store: ObjectStore, keys: RunKeys) -> CommitRef | None:
    """Newest commit that all its nodes have made; its shards are not looked at."""
    return next((commit.ref for commit in list_commits(store, keys) if commit.is_complete), None)


def ensure_not_fenced(store: ObjectStore, keys: RunKeys, generation: int) -> None:
    """Look whether another VM has taken the run over.

    Raises:
        FencedError: a newer generation is claimed; ``newer`` says which.
        StoreError: the store could not be asked.
    """
    newest = newest_generation(store, keys)
    if newest > generation:
        raise FencedError(generation, newest)


def commit(store: ObjectStore, keys: RunKeys, manifest: Manifest) -> None:
    """Create the manifest.  When this returns, the checkpoint exists.

    Raises:
        FencedError: a newer generation of the run is claimed; nothing was written.
        Exists: another set is committed under this generation and step; it stands.
        StoreError: the store failed; the manifest may exist or not, and trying again is safe.
    """
    ensure_not_fenced(store, keys, manifest.generation)
    key = keys.commit(manifest.ref, manifest.node, manifest.nodes)
    try:
        store.put(key, manifests.encode(manifest), if_absent=True)
    except Exists:
        if _committed_nonce(store, key) != manifest.nonce:
            raise


def _committed_nonce(store: ObjectStore, key: str) -> str | None:
    try:
        return manifests.decode(store.get(key)).nonce
    except CorruptError:
        return None
