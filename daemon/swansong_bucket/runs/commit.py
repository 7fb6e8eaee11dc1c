# SPDX-License-Identifier: Apache-2.0
"""The durability point: claims of generations, and creation of manifests.

Three rules protect the commits of a run against a second VM, independent of clocks:

- A generation is claimed by create-if-absent, for one start of the training, and never released.  Each commit
  compares the claim in the store with that of its writer.
- Every key contains the generation.
- A manifest is created and never replaced.  If the store refuses the create, the manifest is read back: with
  the same nonce and shards it is our own, and only the reply was lost.

A commit is reported only after the listing that readers use contains its manifest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog
from swansong import bounds
from swansong.bounds import BoundsError

from swansong_bucket.errors import CorruptError, Exists, FencedError, Stopped, StoreError, TooLarge
from swansong_bucket.format import claim as claims
from swansong_bucket.format import manifest as manifests
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CommitRef, is_sound
from swansong_bucket.runs import catalog
from swansong_bucket.stores.base import ObjectStore

_CLAIM_ATTEMPTS_MAX = 100
MANIFESTS_READ = 8
"""Manifests of a checkpoint that each VM reads for a verdict."""
LOOK_BACK = 5
"""Number of newest claims that are searched for that of a job start."""

Owns = Callable[[ClaimObject], bool]
"""Whether a start of this VM holds a claim.  Newer claims fence this VM if one of them is not its own."""

_log = structlog.get_logger(__name__)


def _owns_none(_claim: ClaimObject) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Claim:
    """A generation that a start of this VM holds."""

    content: ClaimObject
    """Content of the claim in the store; over several VMs another VM may have created it."""
    honours_if_absent: bool
    """Whether the store refused to create the claim a second time."""
    is_found: bool = False
    """It existed already."""

    @property
    def generation(self) -> int:
        return self.content.generation


def claim_generation(
    store: ObjectStore,
    keys: RunKeys,
    *,
    start_id: str,
    identity: Mapping[str, str],
    owns: Owns = _owns_none,
    later: Collection[str] = (),
    held: int = 0,
    gap: int = 0,
    look_back: int = LOOK_BACK,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Claim:
    """Claim the next generation for a start, or find the claim that it has; after a lost race, a later one.

    A claim is then created a second time, with the same bytes: a store that accepts this ignores
    create-if-absent.

    Args:
        start_id: of the start.  The first of its VMs creates the claim, and the others share it.
        identity: id, boot and host name of this VM, and the time.
        owns: tells claims of this VM, which fence nothing here, from others.
        later: starts that follow this one; a claim of one of them takes precedence.
        held: the generation from which this start continues; a claim of another VM above it takes precedence,
            also one that is made at the same time.  0: none.
        gap: numbers to leave free above the newest claim.
        look_back: number of newest claims among which the start may have one.
        is_wanted: asked before the create under each number.  A create that is late fails if another VM has
            claimed its number.

    Raises:
        FencedError: a newer generation has taken the run over from this start, or from ``held``, or a later
            start holds one.
        CorruptError: the format has no further number, the listing contains an object that no swansong
            wrote, or a field of the claim is out of bounds; nothing was claimed.
        StoreError: the store failed, or the race was lost too often.
    """
    recent = catalog.newest_claims(store, keys, look_back)
    newest = recent[0][0] if recent else 0
    for place, (number, found) in enumerate(recent):
        if found is not None and found.start == start_id:
            _ensure_own(number, recent[:place], owns)
            return Claim(found, honours_if_absent=True, is_found=True)
    followed = next((n for n, found in recent if found is not None and found.start in later), 0)
    if followed:
        raise FencedError(held, followed)
    if held:
        _ensure_own(held, (claim for claim in recent if claim[0] > held), owns)
    for generation in range(newest + gap + 1, newest + gap + 1 + _CLAIM_ATTEMPTS_MAX):
        if generation > bounds.GENERATION_MAX:
            raise _no_number_left(store, keys, generation - 1)
        key = keys.generation(generation)
        claim = ClaimObject(run=keys.run, generation=generation, start=start_id, identity=identity)
        data = claims.encode(claim)
        claims.decode(data)  # fails before a claim that no other VM could read
        if not is_wanted():
            raise Stopped("the claim is not wanted any more")
        try:
            store.put(key, data, if_absent=True)
        except Exists:
            winner = catalog.claim_of(store, keys, generation)
            if winner is None or winner.start != start_id:
                if held and (winner is None or not owns(winner)):
                    raise FencedError(held, generation) from None
                continue
            if winner != claim:  # of another VM of this start
                return Claim(winner, honours_if_absent=True)
        try:
            store.put(key, data, if_absent=True)
        except Exists:
            return Claim(claim, honours_if_absent=True)
        return Claim(claim, honours_if_absent=False)
    raise StoreError(
        f"another VM was first to claim {_CLAIM_ATTEMPTS_MAX} generations of run {keys.run}"
    )


def _no_number_left(store: ObjectStore, keys: RunKeys, newest: int) -> CorruptError:
    return CorruptError(
        f"run {keys.run} cannot claim generation {newest + 1}: the last number of the format, "
        f"{newest}, is taken",
        hint=f"Delete {store.url}/{keys.generation(newest)} if no VM of this run wrote it, "
        "else continue under another run.name",
    )


def newest_whole_commit(
    store: ObjectStore, keys: RunKeys, *, before: CommitRef | None = None, near: int = 0
) -> CommitRef | None:
    """The newest commit with the manifests of all its nodes; see :func:`newest_whole`."""
    found = newest_whole(store, keys, before=before, near=near)
    return None if found is None else found.ref


def newest_whole(
    store: ObjectStore, keys: RunKeys, *, before: CommitRef | None = None, near: int = 0
) -> catalog.Commit | None:
    """The newest commit with the manifests of all its nodes.  Does not read them.

    Args:
        before: only older commits than this one.
        near: a generation near the newest one, see :func:`swansong_bucket.runs.catalog.newest_commits`.

    Raises:
        CorruptError: the listing contains an object that no swansong wrote.
        StoreError: a request to the store failed.
    """
    for found in catalog.newest_commits(store, keys, near=near):
        if found.is_complete and (before is None or found.ref < before):
            return found
    return None


def are_all_sound(store: ObjectStore, keys: RunKeys, found: catalog.Commit) -> bool:
    """Whether no VM had a failed GPU before it sealed its share.

    Reads the manifests: in a large job a random sample, and the marks of suspect shares.  So the requests of
    all VMs together grow with their number, and not with its square.

    Raises:
        CorruptError: a manifest is damaged.
        StoreError: a request to the store failed.
    """
    if len(found.manifests) > MANIFESTS_READ:
        if catalog.listing(store, keys.suspects_of(found.ref), keys.parse_suspect).newest:
            return False
        sample = random.sample(sorted(found.manifests), MANIFESTS_READ)
        found = replace(found, manifests={node: found.manifests[node] for node in sample})
    return all(is_sound(made.health) for made in catalog.each_manifest(store, keys, found))


def parts_committed(
    store: ObjectStore,
    keys: RunKeys,
    newest: CommitRef,
    nodes: int,
    claim: ClaimObject,
    *,
    after: CommitRef | None = None,
) -> tuple[int, catalog.Commit | None]:
    """The number of nodes with a part of the newest checkpoint, and the newest whole one.

    Costs one listing of the commits since ``after`` and, if one is whole or of a newer generation, one of the
    claims.

    Args:
        newest: the newest checkpoint of which this VM has committed its part.
        nodes: number of VMs of the job.
        claim: of its generation, which this VM holds.
        after: the newest checkpoint that is known to be whole; older ones do not count.

    Returns:
        ``nodes`` and ``newest`` if that checkpoint is whole.

    Raises:
        FencedError: a newer start has taken the run over, perhaps before the last part was committed.
        CorruptError: the listing contains an object that no swansong wrote.
        StoreError: a request to the store failed.
    """
    first = CommitRef(newest.generation, 0)
    if after is not None:
        first = max(first, after)
    committed = 0
    listed = catalog.list_commits(store, keys, since_step=first)
    if listed and listed[0].ref.generation > newest.generation:
        ensure_found(store, keys, claim)  # this VM must not say that the run has no checkpoint
    for found in listed:
        if found.nodes != nodes or not first <= found.ref <= newest or found.ref == after:
            continue
        if found.ref == newest:
            committed = len(found.manifest_keys)
        if found.is_complete:
            ensure_found(store, keys, claim)
            return committed, found
    return committed, None


def ensure_not_fenced(
    store: ObjectStore, keys: RunKeys, claim: ClaimObject, *, owns: Owns = _owns_none
) -> None:
    """Check that no other VM has taken the run over; costs a small listing and a small GET.

    No VM deletes claims, but an operator may empty the prefix while VMs run.  The claim is then created again
    by create-if-absent, so that at most one VM continues with the number.

    Args:
        claim: of the generation that this VM holds.
        owns: see :func:`claim_generation`.

    Raises:
        FencedError: a newer generation is claimed, or another VM has claimed this one.
        CorruptError: the listing contains an object that no swansong wrote, or the claim is malformed.
        StoreError: a request to the store failed.
    """
    _ensure_own(claim.generation, catalog.newer_claims(store, keys, claim.generation), owns)
    found = catalog.claim_of(store, keys, claim.generation) or _claimed_again(store, keys, claim)
    if not found.is_shared_with(claim):
        raise FencedError(claim.generation, claim.generation)


def _ensure_own(
    generation: int, newer: Iterable[tuple[int, ClaimObject | None]], owns: Owns
) -> None:
    """Check all newer claims, newest first.

    The newest alone proves nothing: another writer may have planted it.

    Raises:
        FencedError: one of them is not of this VM.
    """
    for number, claim in newer:
        if claim is None or not owns(claim):
            raise FencedError(generation, number)


def _claimed_again(store: ObjectStore, keys: RunKeys, claim: ClaimObject) -> ClaimObject:
    """Create a deleted claim again; returns the claim that is in the store then."""
    key = keys.generation(claim.generation)
    try:
        store.put(key, claims.encode(claim), if_absent=True)
    except Exists:
        try:
            return claims.decode(store.get(key))
        except CorruptError as error:
            raise CorruptError(
                f"{store.url}/{key} is not the claim that this VM made: {error}",
                hint="Delete it if no VM of this run wrote it",
            ) from None
    _log.warning(
        "claim_made_again",
        generation=claim.generation,
        claim=f"{store.url}/{key}",
        hint="The claim of this VM was deleted: do not empty the prefix of a run that is training",
    )
    return claim


def commit(
    store: ObjectStore,
    keys: RunKeys,
    manifest: Manifest,
    claim: ClaimObject,
    *,
    owns: Owns = _owns_none,
    reads_back: bool = False,
) -> None:
    """Create the manifest.  When this returns, the checkpoint is durable, and readers find it.

    Args:
        claim: of the manifest's generation, which this VM holds.
        owns: see :func:`claim_generation`.  What a start on one VM has sealed is committed in its place, also
            after the next start has claimed; over several VMs the next start has chosen without it.
        reads_back: read the manifest back as a reader does, and compare.

    Raises:
        BoundsError: no reader would accept the manifest; nothing was written, and a retry cannot help.
        FencedError: another VM has taken the run over, perhaps without this commit.
        Exists: another set is committed under this generation and step.
        CorruptError: the store returns another manifest than was written, or the listing contains an
            object that no swansong wrote.
        StoreError: the store failed, or its listing does not contain the manifest.  The manifest may exist;
            a retry is safe.
    """
    data = manifests.encode(manifest)
    try:
        written = manifests.decode(data)
    except CorruptError as error:
        raise BoundsError(str(error)) from None
    if manifest.generation != claim.generation:
        raise FencedError(manifest.generation, claim.generation)
    owns_next = owns if manifest.nodes == 1 else _owns_none
    ensure_not_fenced(store, keys, claim, owns=owns_next)
    mark_suspect(store, keys, manifest)
    key = keys.commit(manifest.ref, manifest.node, manifest.nodes)
    is_new = True
    try:
        store.put(key, data, if_absent=True)
    except Exists:
        if not _is_ours(store, key, manifest):
            raise
        is_new = False  # created by an attempt whose reply was lost, and just read back
    found = next(
        (
            found
            for found in catalog.list_commits(store, keys, manifest.ref)
            if key in found.manifest_keys.values()
        ),
        None,
    )
    if found is None:
        raise StoreError(
            f"{store.url}/{key} was created, and the listing of the store does not contain it",
            hint="No reader would find this commit; check that the store lists all its objects",
        )
    if reads_back and is_new and catalog.load_node(store, keys, found, manifest.node) != written:
        raise CorruptError(f"{store.url}/{key} contains another manifest than was written")
    ensure_found(store, keys, claim, owns=owns_next)


def ensure_found(
    store: ObjectStore, keys: RunKeys, claim: ClaimObject, *, owns: Owns = _owns_none
) -> None:
    """Check that no VM has claimed before the last manifest of a listed commit was created.

    The VM that created it may have stood still after its own check.  A VM that claimed meanwhile may have
    resumed without this commit, while one that claims from now on finds it.

    Raises:
        FencedError, CorruptError, StoreError: as :func:`ensure_not_fenced`.
    """
    if catalog.newest_generation(store, keys, above=claim.generation) > claim.generation:
        ensure_not_fenced(store, keys, claim, owns=owns)


def mark_suspect(store: ObjectStore, keys: RunKeys, manifest: Manifest) -> None:
    """Mark a suspect share of a large job.  Called before the manifest is created in this store.

    So a VM that lists the whole checkpoint lists the mark as well.
    """
    if manifest.nodes > MANIFESTS_READ and not is_sound(manifest.health):
        with suppress(Exists):
            store.put(keys.suspect(manifest.ref, manifest.node), b"{}\n", if_absent=True)


def _is_ours(store: ObjectStore, key: str, manifest: Manifest) -> bool:
    """Whether the object is this manifest, apart from informational fields.

    Equal nonces are not enough: it can be a copy of the set's manifest from another generation, or name
    chunks that the store has lost since, so that the set was stored again.
    """
    try:
        found = manifests.decode(store.get(key))
    except (CorruptError, TooLarge):
        return False
    return _names(found) == _names(manifest)


def _names(manifest: Manifest) -> tuple[object, ...]:
    place = manifest.run, manifest.ref, manifest.node, manifest.nodes
    return manifest.nonce, place, manifest.shards
